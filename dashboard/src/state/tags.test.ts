import { expect, test } from "vitest";
import { setTag } from "./tags";

test("a tag is added to several runs once", () => {
  expect(setTag({ a: ["x"] }, ["a", "b"], "x", true)).toEqual({ a: ["x"], b: ["x"] });
  expect(setTag({ a: ["x"] }, ["a"], "best", true)).toEqual({ a: ["best", "x"] });
});

test("a run without tags is forgotten", () => {
  expect(setTag({ a: ["x"], b: ["x", "y"] }, ["a", "b"], "x", false)).toEqual({ b: ["y"] });
});
