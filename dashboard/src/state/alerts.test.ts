import { expect, test } from "vitest";
import type { Alert } from "../types";
import { lastedOf, momentOf, placeOf } from "./alerts";
import type { Place } from "./url";

const NOW: Place = { run: "demo", page: "overview", params: { range: "10-40", config: "all" } };
const alert = (change: Partial<Alert>): Alert => ({ step: 12, time: 1, kind: "log", level: "warning", first_step: 12, first_time: 1, count: 1, title: "", text: "", advice: null, metrics: [], resolved: false, ...change });

test("an alert leads to its metric at its step, and keeps the range", () => {
  expect(placeOf(alert({ kind: "waiting", metrics: ["timing_waiting_for_data", "timing_step_total"] }), NOW)).toEqual({
    run: "demo",
    page: "metrics",
    params: { range: "10-40", step: "12", metric: "timing_waiting_for_data" },
  });
});

test("an alert without a metric leads to the page that shows its moment", () => {
  const page = (change: Partial<Alert>) => placeOf(alert(change), NOW);
  expect(page({ kind: "server" })).toMatchObject({ page: "timeline", params: { step: "12" } });
  expect(page({ kind: "eval" }).page).toBe("evals");
  expect(page({ kind: "log", step: null })).toEqual({ run: "demo", page: "logs", params: { range: "", at: "1", level: "WARNING" } });
  expect(page({ kind: "stalled", step: null, time: 7.5 }), "not at a step").toMatchObject({ page: "logs", params: { at: "7.5" } });
  expect(page({ kind: "config", level: "info" }).params.level).toBe("");
  expect(page({ kind: null }).page, "of an old record").toBe("logs");
});

test("a problem that was reported again says since when and how often", () => {
  const lasting = alert({ first_step: 12, step: 212, count: 3 });
  expect([momentOf(lasting), lastedOf(lasting)]).toEqual(["since step 12", "Reported 3 times in 200 steps."]);
  const full = alert({ kind: "disk", first_step: 12, step: 12, first_time: 0, time: 7200, count: 3 });
  expect(lastedOf(full)).toBe("Reported 3 times in 2 h.");
  expect([momentOf(alert({})), lastedOf(alert({}))]).toEqual(["step 12", ""]);
});
