import { expect, test } from "vitest";
import type { DrawnRun } from "../../charts/runs";
import { NO_STEPS } from "../../state/steps";
import type { Environment, RunInfo } from "../../types";
import { standardCharts } from "./charts";

const step = Array.from({ length: 50 }, (_, i) => i);
const rewards = step.map((i) => i / 50 - 0.1);
const run: DrawnRun = { id: "a", name: "a", color: "--c1", x: step, evals: new Map(), steps: { ...NO_STEPS, step, metrics: { "reward/all_groups/mean": rewards, "reward/total/mean": rewards } } };
const environments = [{ purpose: "training", name: "math", reward_min: 0, reward_max: 1, metrics_ranges: {} }] as unknown as Environment[];
const reward = () => standardCharts([run], { config: {}, environments } as unknown as RunInfo, undefined).get("reward")!;

test("a CSV has the measured values of every line", () => {
  expect(reward().lines.map((line) => line.measured ?? line.raw)).toEqual([rewards, rewards]);
});

test("the gradient norms of all runs together may be more than a call takes arguments", () => {
  const norms = { ...run, steps: { ...run.steps, metrics: { grad_norm: step.map((i) => 0.02 * i) } } };
  const many = new Array<DrawnRun>(3000).fill(norms);
  expect(standardCharts(many, { config: { grad_clip: 1 }, environments } as unknown as RunInfo, undefined).get("gradient")!.high).toBe(1.2);
});

test("the axis of the reward is as declared, without an end that penalties cross", () => {
  expect([reward().low, reward().high]).toEqual([undefined, 1]);
});

test("groups with a small equal reward are not called right", () => {
  const share = step.map(() => 50);
  const metrics = { ...run.steps.metrics, "discarded/zero_advantage/pct": share, "discarded/zero_advantage_all_positive/pct": share };
  const { lines } = standardCharts([{ ...run, steps: { ...run.steps, metrics } }], { config: {}, environments } as unknown as RunInfo, undefined).get("signal")!;
  expect(lines.map((line) => line.label)).toEqual(["all above 0"]);
});

test("what rounding leaves of the shares is no part of the stack", () => {
  const shares = { "": 31.0346, _all_zero: 17.2414, _all_positive: 13.7931 };
  const metrics = Object.fromEntries(Object.entries(shares).map(([name, share]) => [`discarded/zero_advantage${name}/pct`, step.map(() => share)]));
  const { lines } = standardCharts([{ ...run, steps: { ...run.steps, metrics } }], { config: {}, environments } as unknown as RunInfo, undefined).get("signal")!;
  expect(lines.map((line) => line.label)).toEqual(["all 0", "all above 0"]);
});
