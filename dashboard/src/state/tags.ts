/** Tags of runs: those of the config, and the user's own, which the server keeps by the run's key. */

import { useMemo } from "react";
import type { RunRow } from "../types";
import { useDocument } from "./documents";

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
