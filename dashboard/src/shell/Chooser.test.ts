import { expect, test } from "vitest";
import { moved } from "./Chooser";

test("an item moves to another place, and not beyond the ends", () => {
  expect(moved(["a", "b", "c"], 0, 2)).toEqual(["b", "c", "a"]);
  expect(moved(["a", "b", "c"], 2, 1)).toEqual(["a", "c", "b"]);
  expect(moved(["a", "b"], 1, 2)).toEqual(["a", "b"]);
});
