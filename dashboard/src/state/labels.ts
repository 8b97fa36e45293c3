/** What the user gives to runs: names, tags, and which are archived. The server saves it by the run's key; runs do not change. */

import { useMemo } from "react";
import type { RunRow } from "../types";
import { useDocument } from "./documents";

export interface Label {
  name?: string;
  archived?: true;
}

export type Labels = Record<string, Label>;

/** Parses saved labels, and ignores malformed ones. */
export function parseLabels(value: unknown): Labels {
  const known = value && typeof value === "object" && !Array.isArray(value) ? Object.entries(value as Record<string, Partial<Label> | null>) : [];
  const clean = known.map(([key, label]): [string, Label] => [
    key,
    { ...(typeof label?.name === "string" && label.name ? { name: label.name } : {}), ...(label?.archived === true ? { archived: true } : {}) },
  ]);
  return Object.fromEntries(clean.filter(([, label]) => Object.keys(label).length > 0));
}

/** Returns the labels after a change to some runs; null if no label is left. */
export function setLabels(labels: Labels, keys: string[], change: { name?: string; archived?: boolean }): Labels | null {
  const next: Record<string, unknown> = { ...labels };
  for (const key of keys) next[key] = { ...labels[key], ...change };
  const clean = parseLabels(next);
  return Object.keys(clean).length > 0 ? clean : null;
}

/** Returns a run under the name that the user gave it. */
export const named = (run: RunRow, labels: Labels): RunRow => (labels[run.key]?.name === undefined ? run : { ...run, name: labels[run.key]!.name! });

export function useLabels() {
  const { value, change, error } = useDocument<unknown>("labels");
  return useMemo(() => {
    const labels = parseLabels(value);
    return {
      labels,
      error,
      isArchived: (run: RunRow): boolean => labels[run.key]?.archived ?? false,
      /** An empty name restores the run's own. */
      rename: (run: RunRow, name: string) => change((old) => setLabels(parseLabels(old), [run.key], { name: name.trim() })),
      archive: (runs: RunRow[], archived: boolean) => change((old) => setLabels(parseLabels(old), runs.map((run) => run.key), { archived })),
    };
    // `change` is a new function at every render, but does the same.
  }, [value, error]);
}

type OwnTags = Record<string, string[]>;

/** Returns the tags with one added to runs, or taken from them. Runs without tags have no entry. */
export function setTag(tags: OwnTags, keys: string[], tag: string, on: boolean): OwnTags {
  const next = { ...tags };
  for (const key of keys) {
    const rest = (next[key] ?? []).filter((other) => other !== tag);
    if (on) next[key] = [...rest, tag].sort();
    else if (rest.length > 0) next[key] = rest;
    else delete next[key];
  }
  return next;
}

export function useTags() {
  const { value, change, error } = useDocument<OwnTags>("tags");
  return useMemo(() => {
    const own = value ?? {};
    return {
      error,
      own: (run: RunRow): string[] => own[run.key] ?? [],
      of: (run: RunRow): string[] => [...new Set([...run.tags, ...(own[run.key] ?? [])])],
      set: (keys: string[], tag: string, on: boolean) => change((old) => setTag(old ?? {}, keys, tag, on)),
    };
    // `change` is a new function on every call, and always the same one.
  }, [value, error]);
}
