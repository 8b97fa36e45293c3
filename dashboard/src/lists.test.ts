import { expect, test } from "vitest";
import { moved, neighbor, toggled } from "./lists";

test("an item moves to another place, and not beyond the ends", () => {
  expect(moved(["a", "b", "c"], 0, 2)).toEqual(["b", "c", "a"]);
  expect(moved(["a", "b", "c"], 2, 1)).toEqual(["a", "c", "b"]);
  expect(moved(["a", "b"], 1, 2)).toEqual(["a", "b"]);
});

test("an item is added at the end, or taken away", () => {
  expect(toggled(["a"], "b")).toEqual(["a", "b"]);
  expect(toggled(["a", "b"], "a")).toEqual(["b"]);
});

test("a neighbor beyond the ends is the outermost item", () => {
  expect([-5, -1, 1, 5].map((by) => neighbor(["a", "b", "c"], 1, by))).toEqual(["a", "a", "c", "c"]);
  expect(neighbor([], 0, 1)).toBeUndefined();
});
