import { expect, test } from "vitest";
import type { Environment } from "../types";
import { declaredRange, isSparse, sourceOf, statisticOf } from "./sources";

const ALL_SAMPLES = { environment: "", tag: "" };

const known = (name: string) => name === "environment/wordle/entropy";
const wordle = { environment: "wordle", tag: "" };
const easy = { environment: "", tag: "level=1" };

test("step metrics lead to the statistic of the samples that they are", () => {
  expect(statisticOf("reward/total/mean")).toEqual({ metric: "reward", environment: "", statistic: "mean" });
  expect(statisticOf("rollouts/tokens_completion/std")).toEqual({ metric: "completion_tokens", environment: "", statistic: "std" });
  expect(statisticOf("reward/wordle/max")).toEqual({ metric: "reward", environment: "wordle", statistic: "max" });
  expect(statisticOf("reward/gini_mean")).toEqual({ metric: "reward", environment: "", statistic: "gini" });
  expect(statisticOf("group_length_gini_mean")).toEqual({ metric: "completion_tokens", environment: "", statistic: "gini" });
});

test("a sample metric is a mean unless its name ends in another statistic", () => {
  expect(statisticOf("sample_metrics/countdown/format")).toEqual({ metric: "sample_metrics/format", environment: "countdown", statistic: "mean" });
  expect(statisticOf("sample_metrics/countdown/a/b/gini")).toEqual({ metric: "sample_metrics/a/b", environment: "countdown", statistic: "gini" });
});

test("lengths and rewards of all discarded samples have their distribution", () => {
  expect(statisticOf("discarded/all/tokens_mean")).toEqual({ metric: "discarded/completion_tokens", environment: "", statistic: "mean" });
  expect(statisticOf("discarded/all/prompt_tokens_max")).toEqual({ metric: "discarded/prompt_tokens", environment: "", statistic: "max" });
  expect(statisticOf("discarded/all/reward_mean")).toEqual({ metric: "discarded/reward", environment: "", statistic: "mean" });
  expect(statisticOf("discarded/all/groups")).toBeNull();
});

test.each(["entropy", "reward/all_groups/mean", "reward/overlong_penalty/mean", "loss/policy", "discarded/max_async/tokens_mean"])("%s is no statistic of the trained samples", (name) =>
  expect(statisticOf(name)).toBeNull(),
);

test("without a filter every chart shows its step metric", () => {
  expect(sourceOf("reward/total/mean", ALL_SAMPLES, known)).toEqual({ kind: "metric", name: "reward/total/mean", filtered: true });
});

test("a filter replaces statistics of all samples by those of the chosen ones", () => {
  expect(sourceOf("reward/total/mean", wordle, known)).toMatchObject({ kind: "samples", metric: "reward", environment: "wordle", tag: "" });
  expect(sourceOf("sample_metrics/wordle/x", easy, known)).toMatchObject({ kind: "samples", environment: "wordle", tag: "level=1" });
});

test("a filter by environment finds the metrics that the trainer measures for each", () => {
  expect(sourceOf("entropy", wordle, known)).toEqual({ kind: "metric", name: "environment/wordle/entropy", filtered: true });
  expect(sourceOf("entropy", easy, known)).toEqual({ kind: "metric", name: "entropy", filtered: false });
  expect(sourceOf("grad_norm", wordle, known)).toEqual({ kind: "metric", name: "grad_norm", filtered: false });
});

test("metrics of other environments have nothing under the filter", () => {
  expect(sourceOf("sample_metrics/countdown/x", wordle, known)).toBeNull();
  expect(sourceOf("environment/countdown/entropy", wordle, known)).toBeNull();
});

const environment = (name: string, reward: [number | null, number | null], ranges: Environment["metrics_ranges"] = {}): Environment =>
  ({ name, purpose: "training", reward_min: reward[0], reward_max: reward[1], metrics_ranges: ranges }) as Environment;

test("a chart has the range that its environment declares", () => {
  const all = [environment("a", [0, 2], { steps: { min: 0, max: 20 } })];
  expect(declaredRange("reward/total/mean", ALL_SAMPLES, all)).toEqual({ low: 0, high: 2 });
  expect(declaredRange("reward/all_groups/mean", ALL_SAMPLES, all)).toEqual({ low: 0, high: 2 });
  expect(declaredRange("sample_metrics/a/steps/max", ALL_SAMPLES, all)).toEqual({ low: 0, high: 20 });
  expect(declaredRange("reward/total/std", ALL_SAMPLES, all)).toEqual({});
  expect(declaredRange("entropy", ALL_SAMPLES, all)).toEqual({});
});

test("rewards of several environments have a range when all declare one", () => {
  const both = [environment("a", [0, 1]), environment("b", [-1, null])];
  expect(declaredRange("reward/total/mean", ALL_SAMPLES, both)).toEqual({ low: -1 });
  expect(declaredRange("reward/total/mean", { environment: "a", tag: "" }, both)).toEqual({ low: 0, high: 1 });
});

test("metrics of an environment, an age or a fate may be missing in a step, others are gaps", () => {
  for (const name of ["sample_metrics/a/correct", "reward/a/mean", "environment/a/entropy", "staleness/age_2/entropy", "discarded/max_async/tokens_mean"]) expect(isSparse(name), name).toBe(true);
  for (const name of ["reward/total/mean", "grad_norm", "staleness/steps/mean", "timing_step_total"]) expect(isSparse(name), name).toBe(false);
});
