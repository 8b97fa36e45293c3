import { expect, test } from "vitest";
import { at, ownerOf, perOther, rate, type GaugeSeries } from "./gauges";

const series = (time: number[], values: (number | null)[], more: Partial<GaugeSeries> = {}): GaugeSeries => ({
  name: "x", component: "host", node: "a", gpu: null, rank: null, server: null, labels: {}, time, min: values, mean: values, max: values, ...more,
});

test("a counter becomes a rate, and a restart a gap", () => {
  expect(rate(series([0, 2, 4, 6], [0, 10, 3, 5])).mean).toEqual([null, 5, null, 1]);
});

test("a share is the growth of one counter over that of another", () => {
  expect(perOther(series([0, 10], [0, 4]), series([0, 10], [100, 108])).mean).toEqual([null, 0.5]);
});

test("the reading at a time is the last one before it", () => {
  const one = series([1, 2, 3], [10, 20, 30]);
  expect([at(one, 0.5), at(one, 2), at(one, 9)]).toEqual([null, 20, 30]);
});

test("a series is named by its owner", () => {
  expect(ownerOf(series([], [], { gpu: 3 }), true)).toBe("a GPU 3");
  expect(ownerOf(series([], [], { server: 0, labels: { reason: "capacity" } }), false)).toBe("server 0 capacity");
});
