import { expect, test } from "vitest";
import { commonStart, pairs, startWords, wordDiff } from "./compare";
import type { Sample } from "../../types";

const detail = (more: Partial<Sample>): Sample =>
  ({ reward: 0, advantage: null, status: "kept", reason: null, stop_reason: "stop", step: 3, age: 0, started_at: 1, finished_at: 3.5, metrics: {}, ...more }) as Sample;

test("numbers stand in pairs, metrics of either sample among them", () => {
  const found = pairs(detail({ reward: 1, metrics: { a: 1 } }), detail({ advantage: 0.5, metrics: { b: 2 }, status: "discarded", reason: "zero_advantage" }));
  const row = (name: string) => found.find((pair) => pair.name === name);
  expect(row("reward")).toMatchObject({ first: "1", second: "0" });
  expect(row("advantage")).toMatchObject({ first: "–", second: "+0.50" });
  expect(row("a")).toMatchObject({ first: "1", second: "–" });
  expect(row("status")).toMatchObject({ first: "kept", second: "zero advantage" });
  expect(row("seconds")).toMatchObject({ first: "2.50", second: "2.50" });
});

test("the common start of two texts ends at a whole character", () => {
  expect(commonStart("abc", "abd")).toBe(2);
  expect(commonStart("a\u{1f600}", "a\u{1f601}")).toBe(1);
  expect(commonStart("ab", "ab")).toBe(2);
  expect(commonStart("", "x")).toBe(0);
});

test("the difference of answers is described in words", () => {
  expect(startWords("same", "same")).toContain("equal");
  expect(startWords("xa", "ya")).toContain("from the first character");
  expect(startWords("abc", "abd")).toBe("The first 2 characters are equal.");
});

test("a word diff has both texts whole, and what only one of them has", () => {
  const [first, second] = wordDiff("so 2 + 3 is 5, right", "so 2 * 3 is 6, right");
  expect(first.map((piece) => piece.text).join("")).toBe("so 2 + 3 is 5, right");
  expect([first, second].map((side) => side.filter((piece) => piece.own).map((piece) => piece.text))).toEqual([["+", "5"], ["*", "6"]]);
  expect(wordDiff("", "new")).toEqual([[], [{ text: "new", own: true }]]);
  expect(wordDiff("same", "same")).toEqual([[{ text: "same", own: false }], [{ text: "same", own: false }]]);
});

test("long texts are compared by lines, and very long lines as a whole", () => {
  const lines = (word: string) => Array.from({ length: 900 }, (_, i) => (i % 300 === 1 ? `${word} ${i}\n` : `line ${i} has words\n`)).join("");
  const [first, second] = wordDiff(lines("one"), lines("two"));
  expect([first, second].map((side) => side.filter((piece) => piece.own).map((piece) => piece.text.trim()))).toEqual([["one 1", "one 301", "one 601"], ["two 1", "two 301", "two 601"]]);
  expect(wordDiff("x ".repeat(3000), "y x ".repeat(3000))[0]).toEqual([{ text: "x ".repeat(3000), own: true }]);
});
