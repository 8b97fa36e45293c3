/** Runs that belong together, and the mean of a number over them with its interval. */

import type { RunRow } from "../../types";

export interface RunGroup {
  key: string;
  /** Value of each grouping field; empty when runs are grouped over their seeds. */
  values: unknown[];
  runs: RunRow[];
}

export interface Mean {
  n: number;
  mean: number;
  /** Half of the 95 % interval (Student's t); null for one value. */
  half: number | null;
}

/** 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom. */
const T = [
  12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131,
  2.12, 2.11, 2.101, 2.093, 2.086, 2.08, 2.074, 2.069, 2.064, 2.06, 2.056, 2.052, 2.048, 2.045, 2.042,
];

/** Returns mean and interval of the values that were measured; null without any. */
export function meanOf(values: (number | null)[]): Mean | null {
  const known = values.filter((value): value is number => value !== null && Number.isFinite(value));
  const n = known.length;
  if (n === 0) return null;
  const mean = known.reduce((sum, value) => sum + value, 0) / n;
  if (n === 1) return { n, mean, half: null };
  const variance = known.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (n - 1);
  // Above 30 degrees of freedom, an expansion of the quantile around the normal one is right to three digits.
  const t = T[n - 2] ?? 1.96 + 2.4 / (n - 1);
  return { n, mean, half: t * Math.sqrt(variance / n) };
}

/** Returns the runs by their values of some fields, or by experiment without fields, in the order of their first runs. */
export function groupRuns(runs: RunRow[], fields: string[], value: (run: RunRow, field: string) => unknown): RunGroup[] {
  const groups = new Map<string, RunGroup>();
  for (const run of runs) {
    const values = fields.map((field) => value(run, field) ?? null);
    const key = fields.length > 0 ? JSON.stringify(values) : run.experiment;
    const group = groups.get(key);
    if (group) group.runs.push(run);
    else groups.set(key, { key, values, runs: [run] });
  }
  return [...groups.values()];
}

/** Returns what the names have in common: `grpo-s1`, `grpo-s2` give `grpo-s…`. */
export function commonName(names: string[]): string {
  const [first = "", ...rest] = names;
  if (rest.every((name) => name === first)) return first;
  let length = first.length;
  for (const name of rest) while (!name.startsWith(first.slice(0, length))) length -= 1;
  return length > 0 ? `${first.slice(0, length)}…` : `${first}, …`;
}

export type Sortable = number | string | null;

/** Compares two values: numbers before texts, nothing last in both directions. */
export function compare(a: Sortable, b: Sortable, descending: boolean): number {
  if (a === null || b === null) return a === b ? 0 : a === null ? 1 : -1;
  const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return descending ? -order : order;
}
