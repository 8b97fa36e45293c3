/** Colors of runs. A run has the same color in every view: the one that the user chose, else by its place in the order of starts. */

import { useMemo } from "react";
import { embedded } from "../embedded";
import type { RunRow } from "../types";
import { useDocument } from "./documents";
import { useRuns } from "./run";

/** Color tokens of runs, by the names that a menu shows. Neighbors in the order of starts differ. */
export const COLORS: Record<string, string> = { blue: "--c1", orange: "--c2", green: "--c3", violet: "--c4", olive: "--c5", pink: "--c6" };
const TOKENS = Object.values(COLORS);

/** Returns the color token of each run by its id. `chosen` has those of the user by the run's key. */
export function colorsOf(runs: RunRow[], chosen: Record<string, unknown>): Map<string, string> {
  const byStart = [...runs].sort((a, b) => (a.started_at ?? 0) - (b.started_at ?? 0) || (a.id < b.id ? -1 : 1));
  return new Map(byStart.map((run, i) => [run.id, TOKENS.find((token) => token === chosen[run.key]) ?? TOKENS[i % TOKENS.length]!]));
}

/** Returns the colors of all runs and how to choose one; null until they are known. */
export function useRunColors() {
  const { data, error } = useRuns();
  const kept = useDocument<Record<string, unknown>>("colors");
  const chosen = kept.value && typeof kept.value === "object" ? kept.value : {};
  const isKnown = embedded !== null || ((data !== undefined || error !== null) && (kept.value !== undefined || kept.error !== null));
  return useMemo(() => {
    const colors = colorsOf(data?.runs ?? [], chosen);
    return {
      isKnown,
      of: (id: string): string => colors.get(id) ?? TOKENS[0]!,
      choose: (id: string, token: string) => {
        const key = data?.runs.find((run) => run.id === id)?.key;
        if (key !== undefined) kept.change((old) => ({ ...old, [key]: token }));
      },
    };
    // `change` is a new function on every call, and always the same one.
  }, [data, kept.value, isKnown]);
}
