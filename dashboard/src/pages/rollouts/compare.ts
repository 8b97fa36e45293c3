/** Two samples beside each other: their numbers in pairs, and where their answers begin to differ. */

import { count, number, signed } from "../../format";
import type { Sample } from "../../types";

export interface Pair {
  name: string;
  first: string;
  second: string;
}

const ROWS: [name: string, text: (detail: Sample) => string][] = [
  ["reward", (detail) => number(detail.reward)],
  ["advantage", (detail) => signed(detail.advantage, 2)],
  ["status", (detail) => detail.reason?.replaceAll("_", " ") ?? detail.status],
  ["stopped by", (detail) => detail.stop_reason ?? ""],
  ["step", (detail) => count(detail.step)],
  ["age", (detail) => number(detail.age)],
  ["prompt tokens", (detail) => number(detail.prompt_tokens)],
  ["answer tokens", (detail) => number(detail.completion_tokens)],
  ["turns", (detail) => number(detail.num_turns)],
  ["seconds", (detail) => number(detail.started_at === null || detail.finished_at === null ? null : detail.finished_at - detail.started_at)],
];

/** Returns the numbers of two samples in pairs, the metrics of their environments among them. */
export function pairs(first: Sample, second: Sample): Pair[] {
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

interface DiffPiece {
  text: string;
  /** Not in the other text. */
  own: boolean;
}

/** Cells of the table of two texts: the product of their words, without what they share at both ends. */
const MOST_CELLS = 4_000_000;

const WORDS = /\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;
const LINES = /[^\n]*\n|[^\n]+/g;

/** Returns the pieces of two texts that both have, and those of one alone, by their longest common sequence of words; of lines if they are long. */
export function wordDiff(first: string, second: string, unit = WORDS): [DiffPiece[], DiffPiece[]] {
  const [a, b] = [first.match(unit) ?? [], second.match(unit) ?? []];
  let [start, end] = [0, 0];
  while (start < Math.min(a.length, b.length) && a[start] === b[start]) start += 1;
  while (end < Math.min(a.length, b.length) - start && a.at(-1 - end) === b.at(-1 - end)) end += 1;
  const [n, m] = [a.length - start - end, b.length - start - end];
  if (n * m > MOST_CELLS && unit === WORDS) return wordDiff(first, second, LINES);
  const [ownA, ownB] = [a.map((_, i) => i >= start && i < a.length - end), b.map((_, i) => i >= start && i < b.length - end)];
  if (n > 0 && m > 0 && n * m <= MOST_CELLS) {
    // Length of the longest common sequence of what follows word i of one and word j of the other.
    const longest = new Uint16Array((n + 1) * (m + 1));
    const at = (i: number, j: number) => i * (m + 1) + j;
    for (let i = n - 1; i >= 0; i--) {
      for (let j = m - 1; j >= 0; j--) {
        longest[at(i, j)] = a[start + i] === b[start + j] ? longest[at(i + 1, j + 1)]! + 1 : Math.max(longest[at(i + 1, j)]!, longest[at(i, j + 1)]!);
      }
    }
    for (let i = 0, j = 0; i < n && j < m; ) {
      if (a[start + i] === b[start + j]) ownA[start + i++] = ownB[start + j++] = false;
      else if (longest[at(i + 1, j)]! >= longest[at(i, j + 1)]!) i += 1;
      else j += 1;
    }
  }
  return [joined(a, ownA), joined(b, ownB)];
}

function joined(words: string[], own: boolean[]): DiffPiece[] {
  const pieces: DiffPiece[] = [];
  words.forEach((text, i) => {
    const last = pieces.at(-1);
    if (last && last.own === own[i]) last.text += text;
    else pieces.push({ text, own: own[i]! });
  });
  return pieces;
}
