/** Assigns colors to runs. A run keeps its color in every view: the one that the user chose, else the first that it was given. */

import { least } from "d3-array";
import { useEffect, useMemo } from "react";
import { embedded } from "../embedded";
import type { RunRow } from "../types";
import { useDocument } from "./documents";
import { useRuns } from "./run";

/** Color tokens of runs by their names in the menu. */
export const COLORS: Record<string, string> = { blue: "--c1", orange: "--c2", green: "--c3", violet: "--c4", olive: "--c5", pink: "--c6" };
const TOKENS = Object.values(COLORS);

/**
 * Returns the color token of each run by its id. `kept` has those that runs were given before, by the run's key: runs that come
 * or go change no color. The others get the color that the fewest runs have, in the order of their starts.
 */
export function colorsOf(runs: RunRow[], kept: Record<string, unknown>): Map<string, string> {
  const byStart = [...runs].sort((a, b) => (a.started_at ?? 0) - (b.started_at ?? 0) || (a.id < b.id ? -1 : 1));
  const colors = new Map<string, string>();
  const uses = new Map(TOKENS.map((token) => [token, 0]));
  const give = (run: RunRow, token: string) => void (colors.set(run.id, token), uses.set(token, uses.get(token)! + 1));
  const known = (run: RunRow) => TOKENS.find((token) => token === kept[run.key]);
  for (const run of byStart) if (known(run)) give(run, known(run)!);
  for (const run of byStart) if (!known(run)) give(run, least(TOKENS, (token) => uses.get(token))!);
  return colors;
}

/** Most colors that are saved, because a document has at most 256 KiB. */
const MOST_KEPT = 5000;

/** Runs whose colors this page has saved. Each is tried once, even if the folder cannot be written. */
const asked = new Set<string>();

/** Returns the colors of all runs and a function that chooses one; null until they are known. Each run keeps its first color. */
export function useRunColors() {
  const { data, error } = useRuns();
  const { value, error: failure, change } = useDocument<Record<string, unknown>>("colors");
  const kept = value && typeof value === "object" ? value : {};
  const isKnown = (data !== undefined || error !== null) && (value !== undefined || failure !== null);
  const colors = useMemo(() => colorsOf(data?.runs ?? [], kept), [data, value]);
  useEffect(() => {
    if (embedded || !isKnown || failure) return;
    const fresh = (data?.runs ?? []).filter((run) => kept[run.key] === undefined && !asked.has(run.key));
    if (fresh.length === 0) return;
    for (const run of fresh) asked.add(run.key);
    change((old) => {
      const known = Object.entries(old ?? {});
      const added = fresh.filter((run) => !(run.key in (old ?? {}))).map((run): [string, unknown] => [run.key, colors.get(run.id)]);
      return Object.fromEntries([...known, ...added].slice(-MOST_KEPT));
    });
  }, [colors, isKnown]);
  return useMemo(
    () => ({
      isKnown,
      of: (id: string): string => colors.get(id) ?? TOKENS[0]!,
      choose: (id: string, token: string) => {
        const key = data?.runs.find((run) => run.id === id)?.key;
        if (key !== undefined) change((old) => ({ ...old, [key]: token }));
      },
    }),
    // `change` is a new function on every call, and always the same one.
    [colors, isKnown],
  );
}
