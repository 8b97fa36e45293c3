import { expect, test } from "vitest";
import { clockTicks, logTicks, nearest, passAtK, smooth, stack, stdBand, ticks, valueRange, wilson } from "./math";

test("ticks are round numbers inside the range", () => {
  expect(ticks(0, 1, 4)).toEqual([0, 0.2, 0.4, 0.6, 0.8, 1]);
  expect(ticks(0.11, 0.34, 4)).toEqual([0.15, 0.2, 0.25, 0.3]);
  expect(ticks(-3, 3, 3)).toEqual([-2, 0, 2]);
  expect(ticks(0, 1e-5, 2)).toEqual([0, 5e-6, 1e-5]);
});

test("ticks of an empty range are its end", () => {
  expect(ticks(5, 5, 4)).toEqual([5]);
  expect(ticks(1, 1 + 4e-16, 4)).toEqual([1]);
});

test("ticks of a log axis are powers of ten", () => {
  expect(logTicks(0.001, 10)).toEqual([0.001, 0.01, 0.1, 1, 10]);
  expect(logTicks(2, 6).length).toBeGreaterThan(1);
});

test("smoothing starts at the first value and keeps gaps", () => {
  const out = smooth([2, null, 4], 0.5);
  expect(out[0]).toBe(2);
  expect(out[1]).toBeNull();
  expect(out[2]).toBeCloseTo((0.5 * 0.5 * 2 + 0.5 * 4) / 0.75);
});

test("smoothing does not change a constant", () => {
  for (const value of smooth([3, 3, 3, 3], 0.95)) expect(value).toBeCloseTo(3);
});

test("smoothing by nothing returns the same values", () => {
  const values = [1, 2, null];
  expect(smooth(values, 0)).toBe(values);
});

test("the range leaves room, and starts at zero when values come near it", () => {
  expect(valueRange([[0.1, 1]])[0]).toBe(0);
  expect(valueRange([[10, 11]])[0]).toBeGreaterThan(9);
  expect(valueRange([[null]])).toEqual([0, 1]);
  expect(valueRange([[0, 5]], { low: 0, high: 8 })).toEqual([0, 8]);
});

test("outliers can be left out of the range", () => {
  const values = [...Array.from({ length: 99 }, (_, i) => i / 100), 1000];
  expect(valueRange([values])[1]).toBeGreaterThan(1000);
  expect(valueRange([values], { withoutOutliers: true })[1]).toBeLessThan(2);
});

test("a log range leaves out values that have no logarithm", () => {
  const [low] = valueRange([[0, -1, 0.01, 10]], { log: true });
  expect(low).toBeGreaterThan(0);
});

test("a stack adds up, and a gap in one part is nothing", () => {
  expect(stack([[1, 2], [3, null]])).toEqual([[1, 2], [4, 2]]);
});

test("a band of one standard deviation stays within what was measured", () => {
  expect(stdBand([0.5, null], [1, 1], [0, 0], [1, 1])).toEqual({ low: [0, null], high: [1, null] });
});

test("the nearest row is found by its place", () => {
  expect(nearest([0, 10, 20], 14)).toBe(1);
  expect(nearest([0, 10, 20], 16)).toBe(2);
  expect(nearest([], 1)).toBe(-1);
  expect(nearest([4], 100)).toBe(0);
});

test("the Wilson interval of 82 right of 500 is 13.4 to 19.9 percent", () => {
  const [low, high] = wilson(0.164, 500);
  expect(low).toBeCloseTo(0.134, 3);
  expect(high).toBeCloseTo(0.199, 3);
});

test("pass@1 is the share of right answers, pass@n is whether one is right", () => {
  expect(passAtK(8, 2, 1)).toBeCloseTo(0.25);
  expect(passAtK(8, 1, 8)).toBe(1);
  expect(passAtK(8, 0, 8)).toBe(0);
  expect(passAtK(4, 2, 2)).toBeCloseTo(1 - 1 / 6);
});

test("a time axis is marked at whole minutes", () => {
  expect(clockTicks(0, 200, 4)).toEqual([0, 60, 120, 180]);
  expect(clockTicks(10, 18000, 5)).toEqual([3600, 7200, 10800, 14400, 18000]);
});

test("a constant line has an axis from zero", () => {
  expect(valueRange([[0, 0]])).toEqual([0, 1]);
  expect(valueRange([[2, 2]])).toEqual([0, 3]);
});
