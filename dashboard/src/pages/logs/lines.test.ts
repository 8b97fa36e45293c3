import { expect, test } from "vitest";
import type { LogLine } from "../../types";
import { FOLDED_LINES, fold, join, newest } from "./lines";

const row = (n: number): LogLine => ({ row: n, attempt: 1, time: n, level: "INFO", component: "driver", message: `m${n}`, process: 1, place: null, source: null });

test("pages join by time with every row once, rows of one time as in the record", () => {
  expect(join([row(3), row(4)], [row(1), row(2), row(3)]).map((one) => one.row)).toEqual([1, 2, 3, 4]);
  const late = { ...row(5), time: 2 };
  const old = join([row(1), row(2), row(3)], [late]);
  expect(old.map((one) => one.row)).toEqual([1, 2, 5, 3]);
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

test("a page that follows a run keeps the newest lines", () => {
  expect(newest([1, 2, 3, 4], 4)).toEqual([1, 2, 3, 4]);
  expect(newest([1, 2, 3, 4, 5], 4)).toEqual([4, 5]);
});
