import { expect, test } from "vitest";
import type { Distribution } from "../types";
import { NO_STEPS } from "../state/steps";
import { axisEnd, bandsOf, clock, drawnLines, heatOf, isTwoValued, statisticColumn } from "./data";
import { type DrawnRun, leafColumn } from "./runs";

const distribution = (p25: number[], p50: number[], p75: number[], std = 0.25): Distribution => {
  const all = (value: number) => p25.map(() => value);
  return { step: p25.map((_, i) => i), n: all(8), mean: all(0.5), std: all(std), min: all(0), max: all(1), p5: all(0), p25, p50, p75, p95: all(1), gini: all(0), low: [], high: [], histogram: [] };
};

test("a reward of right and wrong has no bands", () => {
  expect(isTwoValued(distribution([0, 0], [0, 1], [1, 1], 0.5))).toBe(true);
  // Percentiles of few samples lie between the two values.
  expect(isTwoValued(distribution([0.25, 0], [0.5, 1], [1, 1], 0.51))).toBe(true);
});

test("a reward of many values has bands", () => {
  expect(isTwoValued(distribution([0.2, 0.3], [0.5, 0.4], [0.7, 0.9]))).toBe(false);
});

test("a run may have more steps than a call takes arguments", () => {
  const many = new Array<number>(150_000).fill(0);
  expect(isTwoValued(distribution(many, many, many, 0.5))).toBe(true);
});

test("seconds on an axis are minutes or hours", () => {
  expect(clock(75)).toBe("1:15");
  expect(clock(3660)).toBe("1:01 h");
  expect([clock(7200, 30), clock(7230, 30)]).toEqual(["2:00:00 h", "2:00:30 h"]);
});

test("the axis of a live run ends at its plan, or where data fill half of it", () => {
  expect(axisEnd(47, 60)).toBe(59);
  expect(axisEnd(10, 300)).toBe(19);
  expect(axisEnd(60, null)).toBe(59);
});

const run = (steps: number[], more: Partial<DrawnRun> = {}): DrawnRun => ({
  id: "a", name: "a", color: "--c1", evals: new Map(), steps: { ...NO_STEPS, step: steps, metrics: { m: steps.map((step) => 10 * step) } }, x: steps, ...more,
});

test("a distribution lies at the steps of its run, and a step without one is a gap", () => {
  const given = { ...distribution([0.1, 0.2], [0.5, 0.4], [0.7, 0.8]), step: [1, 3] };
  expect(statisticColumn(run([1, 2, 3]), given, "mean")?.values).toEqual([0.5, null, 0.5]);
  expect(bandsOf(run([1, 2, 3]), given, "percentiles", 0)[1]).toMatchObject({ low: [0.1, null, 0.2], high: [0.7, null, 0.8] });
  expect(bandsOf(run([1, 2, 3]), given, "range", 0)).toMatchObject([{ low: [0, null, 0], high: [1, null, 1], measured: { names: ["min", "max"], low: [0, null, 0] } }]);
});

test("the range of two values is shown, their percentiles are not", () => {
  const given = distribution([0], [0], [1], 0.5);
  expect(bandsOf(run([0]), given, "range", 0).length).toBe(1);
  expect(bandsOf(run([0]), given, "percentiles", 0)).toEqual([]);
});

test("histograms lie at the places of their steps on the axis, without superseded steps", () => {
  const given = { ...distribution([0, 0, 0], [0, 0, 0], [1, 1, 1]), low: [0, 1, 2], high: [1, 2, 3], histogram: [[1], null, [3]] };
  const heat = heatOf(run([0, 2], { x: [5, 70] }), given);
  expect(heat).toEqual({ x: [5, 70], low: [0, 2], high: [1, 3], counts: [[1], [3]] });
  expect(heatOf(run([0]), distribution([0], [0], [1]))).toBeNull();
  const equal = { ...given, min: [5, 5, 5], max: [5, 6, 5], low: [4.5, 5, 4.5], high: [5.5, 6, 5.5] };
  expect(heatOf(run([0, 1, 2]), equal)).toMatchObject({ low: [5, 5, 5], high: [5, 6, 5] });
});

test("a run without values has no line, and only the first has bands", () => {
  const empty = run([0], { steps: { ...NO_STEPS, step: [0], metrics: { m: [null] } } });
  const lines = drawnLines([run([0, 1]), empty, run([0, 1])], (one) => leafColumn(one, "m"), 0, [{ low: [], high: [], opacity: 1 }]);
  expect(lines.map((line) => [line.values, Boolean(line.bands)])).toEqual([[[0, 10], true], [[0, 10], false]]);
});

test("a metric that many steps lack is drawn on to its next value, with its bands", () => {
  const band = { low: [1, null, 2], high: [5, null, 6], opacity: 1 };
  const [line] = drawnLines([run([0, 1, 2])], () => ({ at: [0, 1, 2], x: [0, 1, 2], values: [3, null, 4] }), 0.5, [band], true);
  expect(line).toMatchObject({ x: [0, 2], raw: [3, 4], bands: [{ low: [1, 2], high: [5, 6] }] });
  expect(line!.values[1]).toBeCloseTo((0.25 * 3 + 0.5 * 4) / 0.75);
});
