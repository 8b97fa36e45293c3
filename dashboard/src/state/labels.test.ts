import { expect, test } from "vitest";
import type { RunRow } from "../types";
import { named, parseLabels, setLabels, setTag } from "./labels";

test("a run has the name that the user gave it until that is empty", () => {
  const run = { id: "a", key: "k", name: "grpo-s1" } as RunRow;
  const labels = setLabels({}, ["k"], { name: "baseline" })!;
  expect(named(run, labels).name).toBe("baseline");
  expect(setLabels(labels, ["k"], { name: "" })).toBeNull();
  expect(named(run, {})).toBe(run);
});

test("an archived run keeps its name, and comes back", () => {
  const archived = setLabels({ a: { name: "mine" } }, ["a", "b"], { archived: true })!;
  expect(archived).toEqual({ a: { name: "mine", archived: true }, b: { archived: true } });
  expect(setLabels(archived, ["a", "b"], { archived: false })).toEqual({ a: { name: "mine" } });
});

test("what has another form is left out", () => {
  expect(parseLabels({ a: { name: 3 }, b: null, c: { archived: "yes" }, d: { name: "x" } })).toEqual({ d: { name: "x" } });
  expect(parseLabels([1])).toEqual({});
});

test("a tag is added to several runs once", () => {
  expect(setTag({ a: ["x"] }, ["a", "b"], "x", true)).toEqual({ a: ["x"], b: ["x"] });
  expect(setTag({ a: ["x"] }, ["a"], "best", true)).toEqual({ a: ["best", "x"] });
});

test("a run without tags is forgotten", () => {
  expect(setTag({ a: ["x"], b: ["x", "y"] }, ["a", "b"], "x", false)).toEqual({ b: ["y"] });
});
