import { expect, test } from "vitest";
import { NO_STEPS } from "../state/steps";
import type { EvalRow } from "../types";
import { drawnLines } from "./data";
import { columnOf, dashed, type DrawnRun, evalColumns, groupOf, metricNames } from "./runs";

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
});

test("runs of one color differ by their dashes", () => {
  expect(dashed([run("a", [], []), run("b", [], [])]).map((one) => one.dash)).toEqual([undefined, [6, 3]]);
});
