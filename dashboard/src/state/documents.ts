/**
 * Documents that the server keeps in the user's config folder: layouts, columns, tags, notes.
 *
 * A change is a function of the newest value, so that two pages that change one document lose nothing: when the server has a
 * newer version, it is read and the change is made again. The page shows a change at once.
 */

import { useEffect, useSyncExternalStore } from "react";
import { address, ApiError, get, put } from "../api";
import type { Document } from "../types";
import { Listeners } from "./listeners";
import { mayPass, RETRY_MS } from "./resource";

type Change = (old: unknown) => unknown;

interface State<T> {
  /** Undefined while it is read for the first time, null if nothing is kept. */
  value: T | null | undefined;
  /** Why it could not be read or kept. */
  error: Error | null;
  saving: boolean;
}

export interface Server {
  get(path: string): Promise<Document>;
  put(path: string, document: Document): Promise<Document>;
}

const CONFLICT = 409;

/** One document as this page knows it. */
export class KeptDocument {
  state: State<unknown> = { value: undefined, error: null, saving: false };
  private kept: Document = { value: undefined, version: "" };
  /** Changes that the server has not confirmed. */
  private pending: Change[] = [];
  private busy = false;
  private loaded = false;
  /** Whether another page wrote while this one was busy. */
  private stale = false;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private readonly listeners = new Listeners();

  constructor(
    readonly path: string,
    private readonly server: Server,
    private readonly onWritten: () => void = () => {},
  ) {}

  subscribe = this.listeners.subscribe;

  /** Reads it once. */
  async load(): Promise<void> {
    if (!this.loaded) await this.read();
  }

  async change(change: Change): Promise<void> {
    this.pending.push(change);
    this.show(null);
    // The first change waits for the first read: it needs the version.
    if (this.loaded) await this.write();
    else await this.read();
  }

  async read(): Promise<void> {
    this.stale = this.busy;
    if (this.busy) return;
    this.busy = true;
    this.loaded = true;
    let failure: Error | null = null;
    try {
      this.kept = await this.server.get(this.path);
    } catch (error) {
      failure = error as Error;
    }
    this.busy = false;
    this.show(failure);
    if (this.stale) return this.read();
    if (!failure) await this.write();
  }

  private async write(): Promise<void> {
    if (this.busy || this.pending.length === 0) return;
    this.busy = true;
    const changes = [...this.pending];
    let failure: Error | null = null;
    try {
      this.kept = await this.server.put(this.path, { value: this.applied(changes) ?? null, version: this.kept.version });
      this.pending.splice(0, changes.length);
      this.onWritten();
    } catch (error) {
      failure = error as Error;
    }
    this.busy = false;
    if (this.stale || (failure instanceof ApiError && failure.status === CONFLICT)) return this.read();
    // The server would refuse the same again.
    if (failure && !mayPass(failure)) this.pending.splice(0, changes.length);
    this.show(failure);
    if (!failure) await this.write();
  }

  private applied(changes: Change[]): unknown {
    return changes.reduce((value, change) => change(value), this.kept.value);
  }

  private show(error: Error | null): void {
    clearTimeout(this.timer);
    if (error && mayPass(error)) this.timer = setTimeout(() => void this.read(), RETRY_MS);
    this.state = { value: this.applied(this.pending), error, saving: this.pending.length > 0 };
    this.listeners.notify();
  }
}

const documents = new Map<string, KeptDocument>();
const channel = typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel("telescope.documents");
if (channel) channel.onmessage = (event: MessageEvent<string>) => void documents.get(event.data)?.read();

function documentOf(path: string): KeptDocument {
  let found = documents.get(path);
  if (!found) {
    found = new KeptDocument(path, { get, put }, () => channel?.postMessage(path));
    documents.set(path, found);
  }
  return found;
}

/** Returns a document of the user, or of a run, and how to change it. */
export function useDocument<T>(name: string, run: string | null = null): State<T> & { change: (change: (old: T | null) => T | null) => void } {
  const kept = documentOf(address(`/api/user/${name}`, { run }));
  const state = useSyncExternalStore(kept.subscribe, () => kept.state) as State<T>;
  useEffect(() => void kept.load(), [kept]);
  return { ...state, change: (change) => void kept.change((old) => change((old ?? null) as T | null)) };
}
