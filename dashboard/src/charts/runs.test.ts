import { expect, test } from "vitest";
import { NO_STEPS } from "../state/steps";
import type { EvalRow } from "../types";
import { drawnLines, linesOf } from "./data";
import { columnOf, commonStep, dashed, type DrawnRun, evalColumns, groupOf, longest, metricNames, overMetric } from "./runs";

const run = (id: string, step: number[], m: number[]): DrawnRun => ({ id, name: id, color: "--c1", steps: { ...NO_STEPS, step, metrics: { m } }, x: step, evals: new Map() });

test("a group is the mean of its runs with a 95 % interval, also where one has ended", () => {
  const group = groupOf("g", "a group", [run("a", [0, 1], [1, 2]), run("b", [0, 1, 2], [3, 2, 9])]);
  const column = columnOf(group, "m")!;
  expect(column).toMatchObject({ at: [0, 1, 2], x: [0, 1, 2], values: [2, 2, 9] });
  // Student's t for one degree of freedom, times the standard error 1.
  expect(column.high![0]! - 2).toBeCloseTo(12.706, 3);
  expect([column.low![1], column.high![1], column.low![2]]).toEqual([2, 2, null]);
  expect(metricNames([group])).toEqual(["m"]);
});

test("the axis of a group never turns back, also where a slow run has ended", () => {
  const slow = { ...run("slow", [0, 1], [1, 1]), x: [100, 200] };
  const fast = { ...run("fast", [0, 1, 2, 3], [3, 3, 3, 3]), x: [10, 20, 30, 45] };
  const group = groupOf("g", "g", [slow, fast]);
  expect(group.x).toEqual([55, 110, 120, 135]);
  expect(columnOf(group, "m")!.x).toEqual(group.x);
});

test("a group of runs that lack a metric at many steps keeps the last value of each", () => {
  const some = (values: (number | null)[]) => ({ ...run("a", [0, 1, 2], []), steps: { ...NO_STEPS, step: [0, 1, 2], metrics: { m: values } } });
  const group = groupOf("g", "g", [some([1, null, 1]), some([3, 3, 3])]);
  const [line] = drawnLines([group], (leaf) => ({ at: leaf.steps.step, x: leaf.x, values: leaf.steps.metrics.m! }), 0, [], true);
  expect(line).toMatchObject({ values: [2, 2, 2] });
});

test("evals lie at their numbers of finished steps, or where these ended", () => {
  const row = (version: number, accuracy: number) => ({ name: "math", version, accuracy, accuracy_low: accuracy - 0.1, accuracy_high: accuracy + 0.1, metrics: { length: 10 * version }, status: "finished", source: "live" }) as unknown as EvalRow;
  const steps = { ...NO_STEPS, step: [0, 1, 2] };
  const of = (axis: "step" | "time") => evalColumns([row(3, 0.7), row(0, 0.5)], steps, [5, 10, 15], axis).get("eval/math/accuracy");
  expect(of("step")).toMatchObject({ x: [0, 3], values: [0.5, 0.7], low: [0.4, 0.6] });
  expect(of("time")?.x).toEqual([0, 15]);
  expect([...evalColumns([row(0, 0.5)], steps, [], "step").keys()]).toEqual(["eval/math/accuracy", "eval/math/length"]);
  const rewarded = evalColumns([{ ...row(0, 1.2), metric: "reward", metrics: { reward: 1.2 } }], steps, [], "step");
  expect([...rewarded].map(([name, { low }]) => [name, low !== undefined])).toEqual([["eval/math/reward", true]]);
});

test("runs of one color differ by their dashes", () => {
  expect(dashed([run("a", [], []), run("b", [], [])]).map((one) => one.dash)).toEqual([undefined, [6, 3]]);
});

test("the common step is the last that all runs have, also those of a group", () => {
  const runs = [run("a", [0, 1, 2, 5], []), run("b", [0, 1, 2, 3, 4], [])];
  expect(commonStep(runs)).toBe(2);
  expect(commonStep([groupOf("g", "g", runs), run("c", [1], [])])).toBe(1);
  expect(commonStep([run("a", [0], []), run("b", [1], [])])).toBeNull();
  expect(longest([groupOf("g", "g", runs)])).toBe(5);
});

test("values up to a common step are read there, those of evals after it", () => {
  const accuracy = { at: [0, 2, 3], x: [0, 2, 3], values: [0.1, 0.2, 0.3] };
  const both = { ...run("a", [0, 1, 2], [5, 6, 7]), evals: new Map([["eval/math/accuracy", accuracy]]) };
  const last = (until?: number) => ["m", "eval/math/accuracy"].map((metric) => linesOf([{ ...both, until }], metric, 0)[0]!.last);
  expect(last()).toEqual([7, 0.3]);
  expect(last(1)).toEqual([6, 0.2]);
});

test("over a metric, steps lie in the order of its values, and the last value is still that of the last step", () => {
  const both = { ...run("a", [0, 1, 2], [1, 2, 3]), evals: new Map([["eval/math/accuracy", { at: [0, 2], x: [0, 2], values: [0.1, 0.4] }]]) };
  both.steps.metrics.kl = [0.3, null, 0.1];
  const over = overMetric(both, "kl")!;
  expect([over.x, over.steps.step, over.steps.metrics.m]).toEqual([[0.1, 0.3], [2, 0], [3, 1]]);
  expect(linesOf([over], "m", 0)[0]).toMatchObject({ x: [0.1, 0.3], values: [3, 1], last: 3 });
  expect(overMetric(both, "kl", { from: 0, to: 1 })!.x).toEqual([0.3]);
  // Each step has the newest result before it.
  expect(overMetric(both, "eval/math/accuracy")!.x).toEqual([0.1, 0.4, 0.4]);
  expect(overMetric(both, "nothing")).toBeNull();
});

test("a metric of one environment is joined over its gaps, whatever the name of the chart", () => {
  const gaps = { ...run("a", [0, 1, 2], []), steps: { ...NO_STEPS, step: [0, 1, 2], metrics: { "environment/math/entropy": [1, null, 3], entropy: [1, null, 3] } } };
  expect(linesOf([gaps], "environment/math/entropy", 0)[0]!.values).toEqual([1, 3]);
  expect(linesOf([gaps], "entropy", 0)[0]!.values).toEqual([1, null, 3]);
});
