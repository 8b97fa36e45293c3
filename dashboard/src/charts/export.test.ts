import { expect, test } from "vitest";
import { csv, fileName, linesCsv } from "./export";

test("fields with commas and quotes are quoted", () => {
  expect(csv(["a", "b"], [['x,"y"', 1], [null, 2]])).toBe('a,b\r\n"x,""y""",1\r\n,2\r\n');
});

test("runs with different steps share the rows", () => {
  const text = linesCsv("step", [
    { label: "one", x: [0, 1], values: [1, 2] },
    { label: "two", x: [1, 2], values: [3, null] },
  ]);
  expect(text.split("\r\n")).toEqual(["step,one,two", "0,1,", "1,2,3", "2,,", ""]);
});

test("steps at one place of the axis have a row each", () => {
  const text = linesCsv("entropy", [{ label: "one", x: [0.1, 0.4, 0.4], values: [1, 2, 3] }]);
  expect(text.split("\r\n")).toEqual(["entropy,one", "0.1,1", "0.4,2", "0.4,3", ""]);
});

test("a metric's name makes a file's name", () => {
  expect(fileName("reward/total/mean")).toBe("reward_total_mean");
  expect(fileName("実験 हिन्दी/1")).toBe("実験_हिन्दी_1");
});
