/** Where the moment of an alert is shown. */

import type { Place } from "../../state/url";
import { elsewhere } from "../../state/url";
import type { Alert } from "../../types";

/** Pages of kinds that are about no metric. */
const PAGES: Record<string, string> = { server: "timeline", trainer: "timeline", stalled: "timeline", checkpoint: "timeline", eval: "evals" };

/** Returns the place of an alert: its metric, its step on the timeline, its eval, or the warnings of the log. */
export function placeOf(alert: Alert, now: Place): Place {
  const step: Record<string, string> = alert.step === null ? {} : { step: String(alert.step) };
  const [metric] = alert.metrics;
  if (metric) return elsewhere(now, { page: "metrics" }, { ...step, metric });
  const page = PAGES[alert.kind ?? ""] ?? "logs";
  return elsewhere(now, { page }, page === "logs" ? { ...step, level: alert.level === "info" ? "" : "WARNING" } : step);
}
