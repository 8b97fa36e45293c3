/** Reads of the API that stay fresh: kept by address, read again when a table of the run grew. */

import { useCallback, useEffect, useMemo, useRef, useSyncExternalStore } from "react";
import { address, ApiError, get, type Query } from "../api";
import { Listeners } from "./listeners";
import { onRead } from "./live";

/** Time between two reads of what the server could not answer. */
export const RETRY_MS = 5_000;

/** Returns whether the same request may be answered later. */
export const mayPass = (error: unknown): boolean => !(error instanceof ApiError) || error.status >= 500;

/** Reads again when a newer version is wanted, one read at a time. */
export class Reader {
  private wanted: string | null = null;
  private running = false;

  /**
   * `read` handles its own errors, and returns whether it is to be repeated later: while `isUsed`, or when it is wanted again. It
   * gets called once for each version that is the newest when a read begins.
   */
  constructor(
    private readonly read: () => Promise<boolean | void>,
    private readonly isUsed = () => true,
  ) {}

  /** Reads, unless this version is the last one that was asked for. */
  async want(version: string): Promise<void> {
    if (this.wanted === version) return;
    this.wanted = version;
    if (this.running) return;
    this.running = true;
    let again: boolean | void = false;
    for (let done: string | null = null; done !== this.wanted; ) {
      done = this.wanted;
      again = await this.read();
    }
    this.running = false;
    if (again) setTimeout(this.repeat, RETRY_MS, this.wanted);
  }

  private repeat = (version: string): void => {
    if (this.wanted !== version) return;
    this.wanted = null;
    if (this.isUsed()) void this.want(version);
  };
}

export interface Resource<T> {
  data: T | undefined;
  error: ApiError | Error | null;
  loading: boolean;
}

interface Entry<T> {
  state: Resource<T>;
  listeners: Listeners;
  reader: Reader;
}

const EMPTY: Resource<never> = { data: undefined, error: null, loading: true };

/** What was read, by key. Beyond `most` entries, the oldest go that no component listens to. */
export class Store<T> {
  private readonly entries = new Map<string, Entry<T>>();

  /** `fetch` gets the newest data of a key, and what was read of it before. */
  constructor(
    private readonly most: number,
    private readonly fetch: (key: string, old: T | undefined) => Promise<T>,
  ) {}

  /** Reads a key, unless this version of it was read; keeps the old data meanwhile. */
  read = (key: string, version: string): Promise<void> => this.entryOf(key).reader.want(version);

  /** Returns what is known of a key. */
  known = (key: string): Resource<T> => this.entries.get(key)?.state ?? EMPTY;

  /** Calls the listener when one of the keys was read; returns a function that ends it. */
  listen(keys: readonly string[], listener: () => void): () => void {
    const stops = keys.map((key) => this.entryOf(key).listeners.subscribe(listener));
    return () => stops.forEach((stop) => stop());
  }

  private entryOf(key: string): Entry<T> {
    const known = this.entries.get(key);
    if (known) return known;
    const made: Entry<T> = { state: EMPTY, listeners: new Listeners(), reader: new Reader(() => this.load(key, made), () => made.listeners.size > 0) };
    this.entries.set(key, made);
    for (const [other, { listeners }] of this.entries) {
      if (this.entries.size <= this.most) break;
      if (listeners.size === 0 && other !== key) this.entries.delete(other);
    }
    return made;
  }

  private async load(key: string, entry: Entry<T>): Promise<boolean> {
    const { data } = entry.state;
    try {
      entry.state = { data: await this.fetch(key, data), error: null, loading: false };
      onRead(true);
    } catch (error) {
      onRead(error instanceof ApiError && error.status < 502); // 502 and above are a gateway's responses for a server that is unreachable
      entry.state = { data, error: error as Error, loading: false };
    }
    entry.listeners.notify();
    return entry.state.error !== null && mayPass(entry.state.error);
  }
}

const KEPT = 60;
/** Responses of the API by their addresses. */
export const responses = new Store<unknown>(KEPT, (key) => get(key));

/** Returns what the API answers; a path of null reads nothing. A new `version` reads again and keeps the old data meanwhile. */
export function useResource<T>(path: string | null, query: Query = {}, version: string | number = ""): Resource<T> {
  const key = path === null ? null : address(path, query);
  // A subscription that is renewed at each render would leave its entry without listeners for a moment.
  const subscribe = useCallback((listener: () => void) => (key === null ? () => {} : responses.listen([key], listener)), [key]);
  const state = useSyncExternalStore(subscribe, () => (key === null ? EMPTY : (responses.known(key) as Resource<T>)));
  const ask = () => void (key !== null && responses.read(key, String(version)));
  useMemo(ask, [key, version]); // the server answers while the page is drawn
  useEffect(ask, [key, version]); // reads again what was dropped before it had a listener
  return state;
}

/** Returns what is known of several keys, whose number may change, and reads their versions. */
export function useStored<T>(store: Store<T>, keys: readonly string[], versions: readonly string[]): Resource<T>[] {
  const all = keys.join("\n");
  const subscribe = useCallback((listener: () => void) => store.listen(keys, listener), [all]);
  useSyncExternalStore(subscribe, () => keys.map((key) => stamp(store.known(key))).join());
  useEffect(() => keys.forEach((key, i) => void store.read(key, versions[i] ?? "")), [all, versions.join("\n")]);
  return keys.map(store.known);
}

/** Returns what the API answers for several addresses. */
export const useResources = <T>(keys: readonly string[], versions: readonly string[]): Resource<T>[] => useStored(responses as Store<T>, keys, versions);

/** Returns the value, or the last known one while it is undefined. */
export function useKept<T>(value: T | undefined): T | undefined {
  const kept = useRef<T>(undefined);
  if (value !== undefined) kept.current = value;
  return kept.current;
}

const stamps = new WeakMap<object, number>();
let stamped = 0;

/** Returns a number that differs for each state. */
function stamp(state: object): number {
  let number = stamps.get(state);
  if (number === undefined) stamps.set(state, (number = stamped += 1));
  return number;
}
