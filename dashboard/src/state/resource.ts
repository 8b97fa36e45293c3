/** Reads of the API that stay fresh: kept by address, read again when a table of the run grew. */

import { useEffect, useSyncExternalStore } from "react";
import { address, ApiError, get, type Query } from "../api";

export interface Resource<T> {
  data: T | undefined;
  error: ApiError | Error | null;
  loading: boolean;
}

interface Entry {
  state: Resource<unknown>;
  listeners: Set<() => void>;
  version: string;
  running: boolean;
}

const EMPTY: Resource<never> = { data: undefined, error: null, loading: true };
const KEPT = 60;
const entries = new Map<string, Entry>();

function entryOf(key: string): Entry {
  let entry = entries.get(key);
  if (!entry) {
    entry = { state: EMPTY, listeners: new Set(), version: "", running: false };
    entries.set(key, entry);
    if (entries.size > KEPT) {
      for (const [other, { listeners }] of entries) {
        if (entries.size <= KEPT) break;
        if (listeners.size === 0 && other !== key) entries.delete(other);
      }
    }
  }
  return entry;
}

async function load(key: string, entry: Entry, version: string): Promise<void> {
  if (entry.running) return;
  entry.running = true;
  entry.version = version;
  try {
    entry.state = { data: await get(key), error: null, loading: false };
  } catch (error) {
    entry.state = { data: entry.state.data, error: error as Error, loading: false };
  }
  entry.running = false;
  for (const listener of entry.listeners) listener();
}

/** Returns what the API answers; a path of null reads nothing. A new `version` reads again and keeps the old data meanwhile. */
export function useResource<T>(path: string | null, query: Query = {}, version: string | number = ""): Resource<T> {
  const key = path === null ? null : address(path, query);
  const state = useSyncExternalStore(
    (listener) => {
      if (key === null) return () => {};
      const entry = entryOf(key);
      entry.listeners.add(listener);
      return () => entry.listeners.delete(listener);
    },
    () => (key === null ? EMPTY : (entries.get(key)?.state ?? EMPTY)),
  );
  useEffect(() => {
    if (key === null) return;
    const entry = entryOf(key);
    if (entry.state.loading || entry.version !== String(version)) void load(key, entry, String(version));
  }, [key, version, state]);
  return state as Resource<T>;
}
