import { expect, test } from "vitest";
import { clockTicks, logTicks, meanOf, nearest, passAtK, rollingMedian, smooth, smoothingFor, stack, stdBand, ticks, valueAt, valueRange, wilson } from "./math";

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

test("a longer run is smoothed more, so that its line bends as often", () => {
  expect([1, 100, 200, 1000].map(smoothingFor)).toEqual([expect.closeTo(0.6), expect.closeTo(0.6), expect.closeTo(0.8), expect.closeTo(0.96)]);
  expect(smoothingFor(100_000)).toBe(0.98);
});

test("the range leaves 6 percent of room on both sides", () => {
  const [low, high] = valueRange([[10, 12]]);
  expect([low, high]).toEqual([expect.closeTo(9.88), expect.closeTo(12.12)]);
  expect(valueRange([[-3, -1.5]])).toEqual([expect.closeTo(-3.09), expect.closeTo(-1.41)]);
});

test("an axis that nearly reaches zero starts or ends there", () => {
  expect(valueRange([[0.39, 1]])[0]).toBe(0);
  expect(valueRange([[0.41, 1]])[0]).toBeGreaterThan(0.3);
  expect(valueRange([[-1, -0.39]])[1]).toBe(0);
  expect(valueRange([[-1, 1]])).toEqual([expect.closeTo(-1.12), expect.closeTo(1.12)]);
});

test("a fixed end stays, the other follows the values of all lines", () => {
  expect(valueRange([[0, 5], [null, 7]], { low: 0, high: 8 })).toEqual([0, 8]);
  expect(valueRange([[2, 5], [7]], { high: 8 })[1]).toBe(8);
  expect(valueRange([[20, 25]], { low: 0 })).toEqual([0, expect.closeTo(26.5)]);
});

test("an axis rises also if all values lie beyond its chosen end", () => {
  expect(valueRange([[0, 1]], { low: 5 })).toEqual([5, 6]);
  expect(valueRange([[10, 12]], { high: 5 })).toEqual([4, 5]);
  expect(valueRange([[null]], { low: 5 })).toEqual([5, 6]);
  for (const ends of [{ low: 5 }, { high: 0.001 }, { low: 0, high: 1 }, { high: 0 }, { low: -1 }]) {
    const [low, high] = valueRange([[0.01, 1]], { log: true, ...ends });
    expect(low).toBeGreaterThan(0);
    expect(high).toBeGreaterThan(low);
    expect(high).toBeLessThan(1000);
  }
});

test("a range without a value is a plain axis", () => {
  expect(valueRange([[null, NaN, Infinity]])).toEqual([0, 1]);
  expect(valueRange([[-1, 0]], { log: true })).toEqual([0.1, 1]);
});

test("outliers can be left out of the range: 2 percent on each side", () => {
  const values = [...Array.from({ length: 99 }, (_, i) => 100 + i), 10_000];
  expect(valueRange([values])[1]).toBeGreaterThan(10_000);
  const [low, high] = valueRange([values], { withoutOutliers: true });
  expect(low).toBeLessThan(102);
  expect(high).toBeGreaterThan(197);
  expect(high).toBeLessThan(210);
  expect(valueRange([[1, 1000]], { withoutOutliers: true })[1]).toBeGreaterThan(1000);
});

test("a log range leaves out what has no logarithm, and room in decades", () => {
  const [low, high] = valueRange([[0, -1, 0.01, 100]], { log: true });
  expect(low).toBeCloseTo(0.01 / 10 ** 0.24);
  expect(high).toBeCloseTo(100 * 10 ** 0.24);
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

test("the interval of three values uses Student's t", () => {
  const mean = meanOf([1, 2, 3, null])!;
  expect(mean.mean).toBe(2);
  expect(mean.half).toBeCloseTo(4.303 / Math.sqrt(3), 3);
});

test("one value has no interval, and none has no mean", () => {
  expect(meanOf([4])).toEqual({ n: 1, mean: 4, half: null });
  expect(meanOf([null, NaN])).toBeNull();
});

test("the interval of many values is near that of the normal distribution", () => {
  const many = Array.from({ length: 101 }, (_, i) => i % 2);
  const deviation = Math.sqrt((51 * 50) / 101 / 100);
  expect(meanOf(many)!.half! / (deviation / Math.sqrt(101))).toBeCloseTo(1.984, 2);
});

test("a rolling median follows what most values are", () => {
  expect(rollingMedian([1, 0, 1, 1, null, 1, 0], 3)).toEqual([0.5, 1, 1, 1, null, 0.5, 0.5]);
  expect(rollingMedian([2, 9, null, 4, 4, 1], 5)).toEqual([5.5, 4, null, 4, 4, 4]);
});

test("a line is read at its nearest place, and not where it has not begun or has ended", () => {
  const read = (x: number) => valueAt([10, 11, 14], [1, 2, null], x);
  expect([9, 10, 11.2, 12, 14, 15].map(read)).toEqual([null, 1, 2, 2, null, null]);
  expect(valueAt([], [], 0)).toBeNull();
});
