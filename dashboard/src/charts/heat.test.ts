import { expect, test } from "vitest";
import { type Heat, heatGrid } from "./heat";

const heat = (counts: (number[] | null)[], more: Partial<Heat> = {}): Heat => ({
  x: counts.map((_, i) => i),
  low: counts.map(() => 0),
  high: counts.map(() => 4),
  counts,
  ...more,
});
const quarter = (value: number) => value / 4;
const rounded = (grid: Float64Array) => [...grid].map((cell) => Math.round(1000 * cell) / 1000);

test("each cell has its share of the samples of its step", () => {
  expect(rounded(heatGrid(heat([[1, 0, 0, 3], [0, 2, 0, 0]]), -0.5, 1.5, 2, 4, quarter))).toEqual([0.25, 0, 0, 0.75, 0, 1, 0, 0]);
});

test("a bin that lies in two rows gives each its part", () => {
  expect(rounded(heatGrid(heat([[4]]), -0.5, 0.5, 1, 2, quarter))).toEqual([0.5, 0.5]);
});

test("samples beyond the axis are left out, not moved to its edge", () => {
  expect(rounded(heatGrid(heat([[1, 1]]), -0.5, 0.5, 1, 2, (value) => value / 2))).toEqual([0.25, 0.25]);
});

test("steps that share a column are averaged", () => {
  expect(rounded(heatGrid(heat([[1, 0], [0, 5]]), -0.5, 1.5, 1, 2, quarter))).toEqual([0.5, 0.5]);
});

test("a step reaches half way to its neighbors, and a missing one leaves a gap", () => {
  const grid = heatGrid(heat([[1], [1], null, [1]]), -0.5, 3.5, 8, 1, quarter);
  expect(rounded(grid)).toEqual([1, 1, 1, 1, 0, 0, 1, 1]);
});

test("the axis beyond the last step is empty", () => {
  expect(rounded(heatGrid(heat([[1], [1]]), -0.5, 3.5, 4, 1, quarter))).toEqual([1, 1, 0, 0]);
});

test("a single value lies in one row, also at the ends of the axis", () => {
  const one = (value: number) => rounded(heatGrid(heat([[7]], { low: [value], high: [value] }), -0.5, 0.5, 1, 4, quarter));
  expect(one(0)).toEqual([1, 0, 0, 0]);
  expect(one(4)).toEqual([0, 0, 0, 1]);
  expect(one(2.5)).toEqual([0, 0, 1, 0]);
  expect(one(5)).toEqual([0, 0, 0, 0]);
});
