import { expect, test } from "vitest";
import { rowsInView } from "./window";

test("rows in view are drawn with some on both sides, and never outside of the list", () => {
  expect(rowsInView(0, 240, 200_000, 24)).toEqual([0, 26]);
  expect(rowsInView(24_000, 240, 200_000, 24)).toEqual([984, 1026]);
  expect(rowsInView(24_000, 240, 5, 24)).toEqual([5, 5]);
  expect(rowsInView(0, 0, 0, 24)).toEqual([0, 0]);
});
