import { expect, test } from "vitest";
import type { Distribution } from "../types";
import { axisEnd, clock, distributionOf, isTwoValued } from "./data";

const distribution = (p25: number[], p50: number[], p75: number[]): Distribution => {
  const all = (value: number) => p25.map(() => value);
  return { step: p25.map((_, i) => i), n: all(8), mean: all(0.5), std: all(0.5), min: all(0), max: all(1), p5: all(0), p25, p50, p75, p95: all(1), gini: all(0), low: [], high: [], histogram: [] };
};

test("a reward of right and wrong has no bands", () => {
  expect(isTwoValued(distribution([0, 0], [0, 1], [1, 1]))).toBe(true);
});

test("a reward of many values has bands", () => {
  expect(isTwoValued(distribution([0.2, 0.3], [0.5, 0.4], [0.7, 0.9]))).toBe(false);
});

test("step metrics lead to the distribution of their samples", () => {
  expect(distributionOf("reward/total/mean")).toEqual({ metric: "reward", environment: "" });
  expect(distributionOf("reward/wordle/mean")).toEqual({ metric: "reward", environment: "wordle" });
  expect(distributionOf("sample_metrics/countdown/format")).toEqual({ metric: "sample_metrics/format", environment: "countdown" });
  expect(distributionOf("reward/all_groups/mean")).toBeNull();
  expect(distributionOf("entropy")).toBeNull();
});

test("seconds on an axis are minutes or hours", () => {
  expect(clock(75)).toBe("1:15");
  expect(clock(3660)).toBe("1:01 h");
});

test("the axis of a live run ends at its plan, or where data fill half of it", () => {
  expect(axisEnd(47, 60)).toBe(59);
  expect(axisEnd(10, 300)).toBe(19);
  expect(axisEnd(60, null)).toBe(59);
});
