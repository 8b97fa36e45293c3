/** The events of the runs on the page: how many rows each table has, and whether the connection stands. */

import { useEffect, useSyncExternalStore } from "react";
import { follow } from "../api";

interface Live {
  versions: Record<string, number>;
  status: string | null;
  connected: boolean | null;
  /** How often the connection came back: what was read meanwhile may have failed. */
  reconnects: number;
}

interface Entry {
  state: Live;
  users: number;
  stop: (() => void) | null;
  listeners: Set<() => void>;
}

const NOTHING: Live = { versions: {}, status: null, connected: null, reconnects: 0 };
const entries = new Map<string, Entry>();

function entryOf(run: string): Entry {
  let entry = entries.get(run);
  if (!entry) {
    entry = { state: NOTHING, users: 0, stop: null, listeners: new Set() };
    entries.set(run, entry);
  }
  return entry;
}

function update(entry: Entry, change: Partial<Live>): void {
  entry.state = { ...entry.state, ...change };
  for (const listener of entry.listeners) listener();
}

/** Keeps a connection to the events of a run while a component needs it. */
export function useEvents(run: string | null): void {
  useEffect(() => {
    if (run === null) return;
    const entry = entryOf(run);
    entry.users += 1;
    entry.stop ??= follow(run, {
      onTables: (tables) => update(entry, { versions: { ...entry.state.versions, ...tables } }),
      onStatus: (status) => update(entry, { status }),
      onConnected: (connected) => {
        const back = connected && entry.state.connected === false;
        update(entry, { connected, reconnects: entry.state.reconnects + (back ? 1 : 0) });
      },
    });
    return () => {
      entry.users -= 1;
      if (entry.users > 0) return;
      entry.stop?.();
      entry.stop = null;
      if (entry.listeners.size === 0) entries.delete(run);
    };
  }, [run]);
}

function useLive(run: string | null): Live {
  return useSyncExternalStore(
    (listener) => {
      if (run === null) return () => {};
      const entry = entryOf(run);
      entry.listeners.add(listener);
      return () => entry.listeners.delete(listener);
    },
    () => (run === null ? NOTHING : (entries.get(run)?.state ?? NOTHING)),
  );
}

/** Returns a text that changes when one of the tables grew: the `version` of useResource. */
export function useVersion(run: string | null, ...tables: string[]): string {
  const { versions, status, reconnects } = useLive(run);
  return [status ?? "", reconnects, ...tables.map((table) => versions[table] ?? 0)].join("/");
}

/** Returns the newest status that an event brought, and whether the page is connected (null: not yet). */
export function useConnection(run: string | null): { status: string | null; connected: boolean | null } {
  const { status, connected } = useLive(run);
  return { status, connected };
}
