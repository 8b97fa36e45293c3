import { expect, test } from "vitest";
import type { LogLine } from "../../types";
import { FOLDED_LINES, fold, join, } from "./lines";

const row = (n: number): LogLine => ({ row: n, attempt: 1, time: n, level: "INFO", component: "driver", message: `m${n}`, process: 1, place: null, source: null });

test("pages join with every row once, in order", () => {
  expect(join([row(3), row(4)], [row(1), row(2), row(3)]).map((one) => one.row)).toEqual([1, 2, 3, 4]);
  expect(join([row(1)], [row(2)]).map((one) => one.row)).toEqual([1, 2]);
  const old = [row(1)];
  expect(join(old, [])).toBe(old);
});

test("a short traceback is whole", () => {
  expect(fold("a\nb\n")).toEqual({ head: "a\nb", hidden: 0, tail: "" });
});

test("a long traceback keeps its last lines", () => {
  const text = Array.from({ length: 100 }, (_, i) => `line ${i}`).join("\n");
  const { head, hidden, tail } = fold(text);
  expect(head.split("\n").length + 4).toBe(FOLDED_LINES);
  expect(hidden).toBe(100 - FOLDED_LINES);
  expect(tail.endsWith("line 99")).toBe(true);
});
