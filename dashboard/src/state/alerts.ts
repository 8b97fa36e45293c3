/** When an alert was, how long it lasted, and where its moment is shown. */

import { duration, moment } from "../format";
import type { Alert } from "../types";
import { elsewhere, type Place } from "./url";

/** Pages of kinds that are about no metric. */
const PAGES: Record<string, string> = { server: "timeline", trainer: "timeline", stalled: "timeline", checkpoint: "timeline", eval: "evals" };

/** Returns the place of an alert: its metric, its step on the timeline, its eval, or the lines of the log around its time. */
export function placeOf(alert: Alert, now: Place): Place {
  const step: Record<string, string> = alert.step === null ? {} : { step: String(alert.step) };
  const [metric] = alert.metrics;
  if (metric) return elsewhere(now, { page: "metrics" }, { ...step, metric });
  const page = PAGES[alert.kind ?? ""];
  if (page === "evals") return elsewhere(now, { page });
  if (page !== undefined && alert.step !== null) return elsewhere(now, { page }, step);
  // The range of the page may not have the moment.
  const at: Record<string, string> = alert.time === null ? {} : { at: String(alert.time), range: "" };
  return elsewhere(now, { page: "logs" }, { ...step, ...at, level: alert.level === "info" ? "" : "WARNING" });
}

/** Returns when an alert was first reported. */
export function momentOf(alert: Alert): string {
  // Its text says the version, which is the number of finished steps.
  if (alert.kind === "eval") return "";
  if (alert.first_step !== null) return `${alert.count > 1 ? "since step" : "step"} ${alert.first_step}`;
  return alert.first_time === null ? "" : moment(alert.first_time);
}

/** Returns for how long an alert was reported again: `Reported 3 times in 200 steps.` */
export function lastedOf(alert: Alert): string {
  if (alert.count < 2) return "";
  const inSteps = alert.step !== null && alert.first_step !== null ? alert.step - alert.first_step : 0;
  const inTime = alert.time !== null && alert.first_time !== null ? ` in ${duration(alert.time - alert.first_time)}` : "";
  return `Reported ${alert.count} times${inSteps > 0 ? ` in ${inSteps} steps` : inTime}.`;
}
