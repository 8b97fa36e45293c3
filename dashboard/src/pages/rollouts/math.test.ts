import { expect, test } from "vitest";
import { nextTex, texAt } from "./math";

test.each([
  ["$x^2$ rest", "x^2", false],
  ["$$\\frac12$$", "\\frac12", true],
  ["\\(a+b\\)", "a+b", false],
  ["\\[a\n+b\\]", "a\n+b", true],
])("%s is a formula", (text, tex, display) => {
  expect(texAt(text)).toMatchObject({ tex, display });
});

test("prices are not formulas", () => {
  expect(texAt("$5 and $6")).toBeNull();
  expect(texAt("$ 5$")).toBeNull();
});

test("an unclosed delimiter is text", () => {
  expect(texAt("\\[a")).toBeNull();
  expect(texAt("$x")).toBeNull();
});

test("the search for a start finds each delimiter", () => {
  expect(nextTex("ab \\(c\\)")).toBe(3);
  expect(nextTex("none")).toBe(-1);
});
