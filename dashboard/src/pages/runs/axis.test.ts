import { expect, test } from "vitest";
import { moment } from "../../format";
import { axisOf } from "./axis";
import { columnsOf } from "./columns";

const texts = (values: (number | string | null)[]) => axisOf(values, String).ticks.map((tick) => tick.text);

test("the few values of a setting are its ticks", () => {
  expect(texts([8, 4, 8, 16, null])).toEqual(["4", "8", "16"]);
});

test("learning rates are on a log scale, equal factors apart", () => {
  const { place, log } = axisOf([1e-6, 1e-5, 1e-4], String);
  expect(log).toBe(true);
  expect(place(1e-5)).toBeCloseTo(0.5);
  expect(place(0)).toBeNull();
});

test("many numbers have round ticks inside the axis", () => {
  const values = Array.from({ length: 50 }, (_, i) => i / 49);
  const { ticks } = axisOf(values, String);
  expect(ticks.map((tick) => tick.text)).toContain("0.6");
  expect(ticks.every((tick) => tick.at >= 0 && tick.at <= 1)).toBe(true);
});

test("names, and numbers among them, are places beside each other, and no value has no place", () => {
  const { place, ticks } = axisOf(["rloo", "grpo", 3, null], String);
  expect(ticks.map((tick) => tick.text)).toEqual(["3", "grpo", "rloo"]);
  expect([place("grpo"), place(null), place("ppo")]).toEqual([0.5, null, null]);
});

test("one value is in the middle", () => {
  expect(axisOf([7], String).place(7)).toBeCloseTo(0.5);
});

test("a start is a date on an axis too, and has no mean", () => {
  const [column] = columnsOf(["started_at"], { id: "tags", title: "", right: false, value: () => null, show: () => null });
  expect(column!.write!(1_764_000_000)).toBe(moment(1_764_000_000));
  expect(column!.averaged).toBe(false);
});
