import { expect, test } from "vitest";
import type { Changes, Node } from "../../types";
import { factsOf } from "../infra/Infra";
import { cellName, changeOf, effectName, sentence } from "./words";

const cell = { environment: "a", cell: "level=1", n_before: 1, n_after: 3, mean_before: 0.2, mean_after: 0.6, mix: 0, within: 0 };
const found: Changes = {
  decomposed: "reward/all_groups/mean",
  cells: [cell, { ...cell, cell: "", n_before: 1, n_after: 1, mean_before: 0.4, mean_after: 1 }],
  effects: [{ name: "entropy", kind: "metric", before: 2, after: 1.5, effect: -3 }],
  events: [],
  answers: [],
};

test("a decomposed metric changes by the mean of its samples, another by that of its steps", () => {
  const change = changeOf(found, "reward/all_groups/mean")!;
  expect([change.before, change.after].map((value) => value.toFixed(3))).toEqual(["0.300", "0.700"]);
  expect(changeOf(found, "entropy")).toEqual({ before: 2, after: 1.5 });
  expect(changeOf({ ...found, cells: [] }, "reward/all_groups/mean")).toBe(null);
});

test("the sentence says where it went, by how much and when", () => {
  expect(sentence("entropy", { before: 2, after: 1.5 }, 7)).toBe("entropy fell from 2 to 1.50 (−0.500) at step 7.");
  expect(sentence("reward/all_groups/mean", null, 7)).toBe("Reward of all groups has no values on both sides of step 7.");
});

test("cells and effects have names", () => {
  expect(found.cells.map(cellName)).toEqual(["a, level=1", "a"]);
  expect(effectName({ name: "weight_sync server 0", kind: "span" })).toBe("seconds of weight sync, server 0");
});

test("equal GPUs are counted, and what was not recorded is left out", () => {
  const node: Node = { attempt: 1, time: 1, node: "a", cpu: "EPYC", num_cores: 64, memory_bytes: 2 ** 40, os: null, gpus: ["H100", "H100"], gpu_driver: null, links: [] };
  expect(factsOf(node)).toEqual([["CPU", "EPYC, 64 cores"], ["memory", "1024 GiB"], ["GPUs", "2 × H100"]]);
});
