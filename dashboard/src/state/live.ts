/**
 * The events of the runs on the page: how many rows each table has, and whether the connection stands. One connection serves
 * all runs, because a browser opens six to a server at most. A page in the background has none.
 */

import { useEffect, useSyncExternalStore } from "react";
import { follow } from "../api";
import type { RemoteCopy } from "../types";
import { Listeners } from "./listeners";

interface RunState {
  versions: Record<string, number>;
  status: string | null;
  /** How often the status changed; what a page reads before the first event is that of an ended run already. */
  changes: number;
  /** The tables of a run that had ended when it was opened. */
  ended: Record<string, number> | null;
  /** How much of a run on W&B is here; null for other runs. */
  remote: RemoteCopy | null;
}

interface Connection {
  connected: boolean | null;
  /** The time until which the page was up to date, in milliseconds; null while it is. */
  behindSince: number | null;
  /** Why the server refuses this page; null unless it was started again with another secret. */
  refusal: string | null;
  /** How often the connection came back: what was read meanwhile may have failed. */
  reconnects: number;
}

const NOTHING: RunState = { versions: {}, status: null, changes: 0, ended: null, remote: null };
/** How long a page in the background stays connected. */
export const HIDDEN_MS = 30_000;

const states = new Map<string, RunState>();
const users = new Map<string, number>();
const { subscribe, notify: changed } = new Listeners();
let connection: Connection = { connected: null, behindSince: null, refusal: null, reconnects: 0 };
/** Time of the last response: to a read, or at the start of the stream. */
let answeredAt = Date.now();
let failedReads = false;
let followed = "";
let stop: (() => void) | null = null;
let hidden = false;
let timer: ReturnType<typeof setTimeout> | undefined;

function update(run: string, change: Partial<RunState>): void {
  states.set(run, { ...stateOf(run), ...change });
  changed();
}

const events = {
  onTables: (run: string, tables: Record<string, number>) => {
    const { versions, status, ended, remote } = stateOf(run);
    const first = Object.keys(versions).length === 0;
    const isEnded = status !== null && status !== "live" && remote === null; // a copy may have grown since the page read it
    update(run, { versions: { ...versions, ...tables }, ended: first && isEnded ? tables : ended });
  },
  onStatus: (run: string, status: string) => {
    const { status: before, changes } = stateOf(run);
    // Each stream begins with the status.
    if (status !== before) update(run, { status, changes: before === null && status !== "live" ? changes : changes + 1 });
  },
  onRemote: (run: string, remote: RemoteCopy) => update(run, { remote }),
  onConnected: (connected: boolean) => {
    const back = connected && connection.connected === false;
    connection = { ...connection, connected, refusal: connected ? null : connection.refusal, reconnects: connection.reconnects + (back ? 1 : 0) };
    judge(connected);
  },
  onRefused: (refusal: string) => {
    connection = { ...connection, refusal };
    changed();
  },
};

/** Updates whether the page is outdated: its stream is lost, or the server does not respond to reads. */
function judge(answered: boolean): void {
  if (answered) answeredAt = Date.now();
  const isBehind = connection.connected === false || failedReads;
  connection = { ...connection, behindSince: isBehind ? (connection.behindSince ?? answeredAt) : null };
  changed();
}

/** Notes whether the server responded to a read. */
export function onRead(answered: boolean): void {
  const before = failedReads;
  failedReads = !answered;
  if (answered && !before) answeredAt = Date.now();
  else judge(answered);
}

/** Connects to the events of the runs that are in use. The first events of a connection tell all that was missed. */
function connect(): void {
  const runs = hidden ? [] : [...users.keys()].sort();
  const key = runs.join("\n");
  if (key === followed) return;
  followed = key;
  stop?.();
  stop = runs.length ? follow(runs, events) : null;
}

if (typeof document !== "undefined") {
  document.addEventListener("visibilitychange", () => pageHidden(document.hidden));
}

/** Ends the connection of a page that stays in the background, and brings it back. */
export function pageHidden(now: boolean): void {
  clearTimeout(timer);
  if (now) {
    timer = setTimeout(() => {
      hidden = true;
      connect();
    }, HIDDEN_MS);
  } else {
    hidden = false;
    connect();
  }
}

export const stateOf = (run: string): RunState => states.get(run) ?? NOTHING;

/** Follows a run until the returned function is called. */
export function watch(run: string): () => void {
  users.set(run, (users.get(run) ?? 0) + 1);
  queueMicrotask(connect); // components that come and go together change the connection once
  return () => {
    const left = (users.get(run) ?? 1) - 1;
    if (left > 0) users.set(run, left);
    else users.delete(run);
    queueMicrotask(connect);
  };
}

/** Follows runs while a component needs them. */
export function useEvents(runs: readonly string[]): void {
  const key = runs.join("\n");
  useEffect(() => {
    const stops = key === "" ? [] : key.split("\n").map(watch);
    return () => stops.forEach((end) => end());
  }, [key]);
}

/** Returns a text that changes when one of the tables grew: the `version` of useResource. */
export function versionOf(run: string, ...tables: string[]): string {
  const { versions, changes, ended } = stateOf(run);
  return [changes, connection.reconnects, ...tables.map((table) => (versions[table] ?? 0) - (ended?.[table] ?? 0))].join("/");
}

export function useVersion(run: string | null, ...tables: string[]): string {
  return useSyncExternalStore(subscribe, () => (run === null ? "" : versionOf(run, ...tables)));
}

/** Returns the versions of several runs. */
export function useVersions(runs: readonly string[], ...tables: string[]): string[] {
  const all = useSyncExternalStore(subscribe, () => runs.map((run) => versionOf(run, ...tables)).join("\n"));
  return runs.length ? all.split("\n") : [];
}

/** Returns how much of a run on W&B is here, as the newest event tells, and whether its steps are. */
export function useRemote(run: string | null): { remote: RemoteCopy | null; hasSteps: boolean } {
  const remote = useSyncExternalStore(subscribe, () => (run === null ? null : stateOf(run).remote));
  const hasSteps = useSyncExternalStore(subscribe, () => run !== null && (stateOf(run).versions.steps ?? 0) > 0);
  return { remote, hasSteps };
}

/** Returns the time until which the page was up to date, in milliseconds; null while it is. */
export const behindSince = (): number | null => connection.behindSince;

export const useBehind = (): number | null => useSyncExternalStore(subscribe, behindSince);

/** Returns why the server refuses the page, in its words; null while it does not. */
export const useRefusal = (): string | null => useSyncExternalStore(subscribe, () => connection.refusal);

/** Returns the newest status that an event brought, and whether the page is connected (null: not yet). */
export function useConnection(run: string | null): { status: string | null; connected: boolean | null } {
  const status = useSyncExternalStore(subscribe, () => (run === null ? null : stateOf(run).status));
  const connected = useSyncExternalStore(subscribe, () => connection.connected);
  return { status, connected };
}
