/** Runs that belong together. */

import { groups } from "d3-array";
import { setting } from "../format";
import { visible } from "../text/hostile";
import type { RunRow } from "../types";

/** Groups runs whose settings are equal but for the seed. */
export const SEEDS = "seeds";

export interface RunGroup {
  key: string;
  /** Value of each grouping field; empty when runs are grouped over their seeds. */
  values: unknown[];
  runs: RunRow[];
}

/** Returns the runs by their values of some fields, or by experiment without fields, in the order of their first runs. */
export function groupRuns(runs: RunRow[], fields: string[], value: (run: RunRow, field: string) => unknown): RunGroup[] {
  const valuesOf = (run: RunRow) => fields.map((field) => value(run, field) ?? null);
  const keyOf = (run: RunRow) => (fields.length > 0 ? JSON.stringify(valuesOf(run)) : run.experiment);
  return groups(runs, keyOf).map(([key, own]) => ({ key, values: valuesOf(own[0]!), runs: own }));
}

/** Returns what the names have in common: `grpo-s1`, `grpo-s2` give `grpo-s…`. */
export function commonName(names: string[]): string {
  const [first = "", ...rest] = names;
  if (rest.every((name) => name === first)) return first;
  let length = first.length;
  for (const name of rest) while (!name.startsWith(first.slice(0, length))) length -= 1;
  return length > 0 ? `${first.slice(0, length)}…` : `${first}, …`;
}

/** Returns the fields that a grouping of the address names; none for seeds. */
export const groupFields = (grouping: string): string[] => (grouping === SEEDS ? [] : grouping.split(",").filter(Boolean));

export function groupTitle(group: RunGroup, grouping: string): string {
  if (grouping === SEEDS) return visible(commonName(group.runs.map((run) => run.name)));
  return groupFields(grouping)
    .map((field, i) => `${field.replace(/^(config|last|eval)\./, "")} ${setting(group.values[i])}`)
    .join(", ");
}

export type Sortable = number | string | null;

/** Compares two values: numbers before texts, nothing last in both directions. */
export function compare(a: Sortable, b: Sortable, descending: boolean): number {
  if (a === null || b === null) return a === b ? 0 : a === null ? 1 : -1;
  const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return descending ? -order : order;
}
