/** Log lines: merging of pages, tracebacks, levels. */

import type { LogLine } from "../../types";

/** Lowest levels that the page offers. */
export const LEVELS = [["", "all"], ["INFO", "info"], ["WARNING", "warnings"], ["ERROR", "errors"]] as const;

/** Compares two lines by time. Lines with equal times keep the order of the record. */
export const isBefore = (one: LogLine, other: LogLine): boolean => ((one.time ?? 0) - (other.time ?? 0) || one.row - other.row) < 0;

/** Merges pages of rows by time, without duplicates. */
export function join(old: readonly LogLine[], fresh: readonly LogLine[]): LogLine[] {
  if (fresh.length === 0) return old as LogLine[];
  const byRow = new Map([...old, ...fresh].map((row) => [row.row, row]));
  return [...byRow.values()].sort((a, b) => (isBefore(a, b) ? -1 : 1));
}

/** Most lines of a page that follows a run for days. */
const MOST_ROWS = 20_000;

/** Returns the rows, or the newest half of those that a page may have. */
export const newest = <Row>(rows: Row[], most = MOST_ROWS): Row[] => (rows.length > most ? rows.slice(-most / 2) : rows);

/** Lines of a message that are shown before a traceback is unfolded. */
export const FOLDED_LINES = 24;

/** The first and last lines of a long message: a traceback says what happened in its last line. */
export function fold(message: string, lines = FOLDED_LINES): { head: string; hidden: number; tail: string } {
  const all = message.replace(/\s+$/, "").split("\n");
  if (all.length <= lines) return { head: all.join("\n"), hidden: 0, tail: "" };
  const tail = 4;
  return { head: all.slice(0, lines - tail).join("\n"), hidden: all.length - lines, tail: all.slice(-tail).join("\n") };
}

/** Local time of a line with milliseconds. */
export function clockTime(time: number): string {
  const date = new Date(time * 1000);
  const two = (value: number) => String(value).padStart(2, "0");
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}.${String(date.getMilliseconds()).padStart(3, "0")}`;
}
