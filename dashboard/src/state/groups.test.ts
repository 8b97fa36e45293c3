import { expect, test } from "vitest";
import type { RunRow } from "../types";
import { commonName, compare, groupRuns, type Sortable } from "./groups";

const run = (name: string, experiment: string, rate: number) => ({ name, experiment, rate }) as unknown as RunRow;
const runs = [run("a1", "x", 1), run("b1", "y", 2), run("a2", "x", 1), run("c1", "z", 1)];
const names = (groups: { runs: RunRow[] }[]) => groups.map((group) => group.runs.map((one) => one.name));

test("runs of one experiment are one group", () => {
  expect(names(groupRuns(runs, [], () => null))).toEqual([["a1", "a2"], ["b1"], ["c1"]]);
});

test("runs are grouped by the values of fields", () => {
  const groups = groupRuns(runs, ["rate"], (one) => (one as unknown as { rate: number }).rate);
  expect(names(groups)).toEqual([["a1", "a2", "c1"], ["b1"]]);
  expect(groups[0]!.values).toEqual([1]);
});

test("names of a group are shortened to what they share", () => {
  expect(commonName(["grpo-s1", "grpo-s2"])).toBe("grpo-s…");
  expect(commonName(["demo", "demo"])).toBe("demo");
  expect(commonName(["a", "b"])).toBe("a, …");
});

test("nothing comes last in both directions", () => {
  const order = (descending: boolean) => ([2, null, 10] as Sortable[]).sort((a, b) => compare(a, b, descending));
  expect(order(false)).toEqual([2, 10, null]);
  expect(order(true)).toEqual([10, 2, null]);
  expect((["s10", "s9"] as Sortable[]).sort((a, b) => compare(a, b, false))).toEqual(["s9", "s10"]);
});
