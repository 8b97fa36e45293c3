import { expect, test } from "vitest";
import { commonStart, pairs, startWords } from "./compare";
import type { Detail } from "./types";

const detail = (more: Partial<Detail>): Detail =>
  ({ reward: 0, advantage: null, status: "kept", reason: null, stop_reason: "stop", step: 3, age: 0, started_at: 1, finished_at: 3.5, metrics: {}, ...more }) as Detail;

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
