/** Two samples beside each other: their numbers in pairs, and where their answers begin to differ. */

import { number, signed } from "../../format";
import type { Detail } from "./types";

export interface Pair {
  name: string;
  first: string;
  second: string;
}

const ROWS: [name: string, text: (detail: Detail) => string][] = [
  ["reward", (detail) => number(detail.reward)],
  ["advantage", (detail) => signed(detail.advantage, 2)],
  ["status", (detail) => detail.reason?.replaceAll("_", " ") ?? detail.status],
  ["stopped by", (detail) => detail.stop_reason ?? ""],
  ["step", (detail) => number(detail.step)],
  ["age", (detail) => number(detail.age)],
  ["prompt tokens", (detail) => number(detail.prompt_tokens)],
  ["answer tokens", (detail) => number(detail.completion_tokens)],
  ["turns", (detail) => number(detail.num_turns)],
  ["seconds", (detail) => number(detail.started_at === null || detail.finished_at === null ? null : detail.finished_at - detail.started_at)],
];

/** Returns the numbers of two samples in pairs, the metrics of their environments among them. */
export function pairs(first: Detail, second: Detail): Pair[] {
  const metrics = [...new Set([...Object.keys(first.metrics), ...Object.keys(second.metrics)])].sort();
  const rows = [...ROWS.slice(0, 2), ...metrics.map((name): (typeof ROWS)[number] => [name, (detail) => number(detail.metrics[name])]), ...ROWS.slice(2)];
  return rows.map(([name, text]) => ({ name, first: text(first), second: text(second) }));
}

/** Returns how many characters two texts have in common at their start, whole characters only. */
export function commonStart(first: string, second: string): number {
  const most = Math.min(first.length, second.length);
  let at = 0;
  while (at < most && first[at] === second[at]) at += 1;
  const last = first.charCodeAt(at - 1);
  return last >= 0xd800 && last <= 0xdbff ? at - 1 : at;
}

/** Says where two answers begin to differ. */
export function startWords(first: string, second: string): string {
  if (first === second) return "The answers are equal.";
  const same = commonStart(first, second);
  return same === 0 ? "The answers differ from the first character." : `The first ${number(same)} characters are equal.`;
}
