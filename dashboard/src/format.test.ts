import { expect, test } from "vitest";
import { count, duration, number, percent, setting } from "./format";

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
});

test("shares are percents", () => {
  expect(percent(0.164)).toBe("16.4\u202f%");
});

test("settings read as a person would write them", () => {
  expect(setting(null)).toBe("none");
  expect(setting([{ name: "countdown", weight: 1 }])).toBe("name: countdown, weight: 1");
  expect(setting(0.0002)).toBe("2e−4");
});
