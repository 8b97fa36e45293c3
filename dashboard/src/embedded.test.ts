import { expect, test } from "vitest";
import { canonical } from "./embedded";

test("the order of parameters and those without a value do not matter", () => {
  expect(canonical("/api/runs/a/distribution?metric=reward&environment=&band=1")).toBe("/api/runs/a/distribution?band=1&metric=reward");
  expect(canonical("/api/runs")).toBe("/api/runs");
});

test("names are written as the exporter writes them", () => {
  expect(canonical("/d?metric=sample_metrics/a b~c*(d)")).toBe("/d?metric=sample_metrics%2Fa+b%7Ec*%28d%29");
});
