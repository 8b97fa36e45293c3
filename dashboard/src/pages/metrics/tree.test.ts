import { expect, test } from "vitest";
import { allSections, mainSections, place, titleOf, treeRows } from "./tree";

test("a name has a section, a group and a metric", () => {
  expect(place("entropy")).toEqual(["general", "", "entropy"]);
  expect(place("timing_step_total")).toEqual(["timing", "", "step_total"]);
  expect(place("loss/policy")).toEqual(["loss", "", "policy"]);
  expect(place("weight_sync/pause_seconds/server_0")).toEqual(["weight_sync", "pause_seconds", "server_0"]);
});

test("the tree counts its metrics, and a closed section keeps them", () => {
  const rows = treeRows(["entropy", "loss/policy", "reward/total/mean"], "", new Set(["loss"]));
  expect(rows.map((row) => row.label)).toEqual(["reward", "total", "mean", "general", "entropy", "loss"]);
  expect(rows.at(-1)?.count).toBe(1);
});

test("a search finds words anywhere in a name, also in closed sections", () => {
  const rows = treeRows(["loss/policy", "reward/total/mean"], "pol", new Set(["loss"]));
  expect(rows.map((row) => row.label)).toEqual(["loss", "policy"]);
});

test("every metric has one chart in the layout of all", () => {
  const names = ["entropy", "grad_norm", "x/y/z"];
  expect(allSections(names).flatMap((section) => section.metrics).sort()).toEqual(names);
});

test("the first layout holds only what the run measured", () => {
  expect(mainSections(["entropy"])).toEqual([{ title: "Optimizer", metrics: ["entropy"] }]);
});

test("the first layout has each sample metric once, by its mean", () => {
  const names = ["sample_metrics/a/correct", "sample_metrics/a/correct/std", "sample_metrics/a/correct/gini"];
  expect(mainSections(names)).toEqual([{ title: "Learning", metrics: ["sample_metrics/a/correct"] }]);
});

test("the first layout has the sections that a training backend adds", () => {
  const names = ["entropy", "tokens/trained", "custom/my_metric", "debug/grads/layer_norm"];
  expect(mainSections(names)).toEqual([
    { title: "Optimizer", metrics: ["entropy"] },
    { title: "custom", metrics: ["custom/my_metric"] },
    { title: "debug", metrics: ["debug/grads/layer_norm"] },
  ]);
});

test("a chart's title is the end of a name that tells it from others", () => {
  const titled = (name: string) => Object.values(titleOf(name)).slice(0, 2).join(" · ");
  expect(titled("sample_metrics/calculator_agent/correct")).toBe("correct · calculator_agent");
  expect(titled("sample_metrics/calculator_agent/correct/std")).toBe("correct · calculator_agent, std");
  expect(titled("eval/countdown/accuracy")).toBe("accuracy · eval countdown");
  expect(titled("reward/all_groups/mean")).toBe("reward/all_groups · mean");
  expect(titled("rollouts/tokens_completion/mean")).toBe("tokens_completion · rollouts, mean, tokens");
  expect(titled("discarded/zero_advantage/pct")).toBe("zero_advantage · discarded, %");
  expect(titled("timing_step_total")).toBe("step_total · s");
  expect(titled("entropy")).toBe("entropy · ");
});
