import { expect, test } from "vitest";
import { count, duration, number, percent, resultFormat, setting, tick } from "./format";

test("numbers have about three digits and a true minus", () => {
  expect(number(-0.0790)).toBe("−0.0790");
  expect(number(0.5571)).toBe("0.557");
  expect(number(12.34)).toBe("12.3");
  expect(number(4230656)).toBe("4.2M");
  expect(number(-5e30)).toBe("−5.0e30");
  expect(number(0.000356)).toBe("0.00036");
  expect(number(0.0000356)).toBe("3.6e−5");
  expect(number(null)).toBe("–");
  expect(number(0)).toBe("0");
});

test("ticks of one axis differ, and are what they stand for", () => {
  const labels = (...values: number[]) => values.map((value) => tick(value, values[1]! - values[0]!));
  expect(labels(131_000, 131_500, 132_000)).toEqual(["131.0k", "131.5k", "132.0k"]);
  expect(labels(1_020_000, 1_040_000, 1_060_000)).toEqual(["1.02M", "1.04M", "1.06M"]);
  expect(labels(0.99992, 0.99994, 0.99996)).toEqual(["0.99992", "0.99994", "0.99996"]);
  expect(labels(0, 5e-7, 1e-6)).toEqual(["0", "5.0e−7", "1.0e−6"]);
  expect(labels(0, 0.5, 1)).toEqual(["0.0", "0.5", "1.0"]);
  expect(labels(20_000, 40_000)).toEqual([count(20_000), count(40_000)]);
  // One tick alone has no distance to another one.
  expect(tick(0.4)).toBe("0.400");
});

test("a number that rounds up to the next unit has it", () => {
  expect([number(999_600), number(999_990_000)]).toEqual(["1.0M", "1.0G"]);
});

test("a rounded zero has no sign", () => {
  expect(number(-0.001, 2)).toBe("0.00");
});

test("a thin space groups thousands", () => {
  expect(count(7680)).toBe("7\u202f680");
  expect(count(999)).toBe("999");
});

test("durations have two units", () => {
  expect(duration(3905)).toBe("1 h 5 min");
  expect(duration(85)).toBe("1 min 25 s");
  expect(duration(60)).toBe("1 min");
  expect(duration(1.87)).toBe("1.9 s");
  expect([duration(-3), duration(Infinity)]).toEqual(["−3.0 s", "–"]);
});

test("shares are percents", () => {
  expect(percent(0.164)).toBe("16.4\u202f%");
});

test("results of evals are percents only where their metric is a share", () => {
  const told = (metric: string | null) => {
    const { label, suffix, points, value, bare, change } = resultFormat(metric);
    return [label, suffix, value(1.2), value(1, 0), bare(-0.5), change(0.12) + points, value(null)];
  };
  expect(told("reward")).toEqual(["reward", ", reward", "1.200", "1", "−0.500", "+0.120", "–"]);
  expect(told("correct")).toEqual(["accuracy", "", "120.0\u202f%", "100\u202f%", "−50.0", "+12.0 points", "–"]);
  expect(told(null)).toEqual(told("correct"));
  expect(resultFormat("pass@8/correct").value(0.25)).toBe("25.0\u202f%");
});

test("settings read as a person would write them", () => {
  expect(setting(null)).toBe("none");
  expect(setting([{ name: "countdown", weight: 1 }])).toBe("name: countdown, weight: 1");
  expect(setting(0.0002)).toBe("2e−4");
});
