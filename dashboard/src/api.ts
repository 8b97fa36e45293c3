/** Typed requests, and server-sent events that reconnect. A cookie carries the token, where the server wants one. */

import { canonical, embedded } from "./embedded";
import type { RemoteCopy } from "./types";

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

type Scalar = string | number | boolean | null | undefined;
/** Parameters; a list is repeated. */
export type Query = Record<string, Scalar | string[]>;

/** Returns the path with the parameters that are set. */
export function address(path: string, query: Query = {}): string {
  const pairs = Object.entries(query).flatMap(([name, value]) => (Array.isArray(value) ? value : [value]).map((one): [string, Scalar] => [name, one]));
  const set = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(set.map(([name, value]) => [name, String(value)])).toString();
  return text ? `${path}?${text}` : path;
}

/** Returns the path of a run's resource; ids may contain slashes. */
export function runPath(run: string, ...rest: (string | number)[]): string {
  return ["/api/runs", encodeURIComponent(run), ...rest.map((part) => encodeURIComponent(part))].join("/");
}

export const get = <T>(path: string, query: Query = {}, signal?: AbortSignal): Promise<T> =>
  ask<T>(address(path, query), { signal, headers: { accept: "application/json" } });

const RETRY_MS = 1000;
const RELOADED = "reloaded-at";

/** Loads code of the pages. A browser keeps a failed import: the address is opened again when the server answers. */
export async function loaded<T>(load: () => Promise<T>): Promise<T> {
  try {
    return await load();
  } catch (error) {
    // Code that a new opening does not bring is missing.
    if (Date.now() - Number(sessionStorage.getItem(RELOADED)) < 10 * RETRY_MS) throw error;
    const answers = () => fetch(location.pathname).then(({ ok }) => ok, () => false);
    while (!(await answers())) await new Promise((done) => setTimeout(done, RETRY_MS));
    sessionStorage.setItem(RELOADED, String(Date.now()));
    location.reload();
    return new Promise(() => {});
  }
}

/** Characters that a browser surely sends for a page that is being closed: 64 KiB. */
const SENT_AT_END = 16_000;

/** Replaces a document that the user keeps. */
export function put<T>(path: string, document: unknown): Promise<T> {
  const body = JSON.stringify(document);
  const headers = { accept: "application/json", "content-type": "application/json" };
  return ask<T>(path, { method: "PUT", keepalive: body.length < SENT_AT_END, headers, body });
}

/** Answers from the file that these pages are. What the user changes stays until the page is closed. */
function fromFile<T>(path: string, { method, body }: RequestInit): T {
  const { answers } = embedded!;
  const key = canonical(path);
  if (method === "PUT") answers[key] = JSON.parse(String(body));
  if (key.startsWith("/api/user/")) answers[key] ??= { value: null, version: "" };
  if (key in answers) return answers[key] as T;
  throw new ApiError(404, "This file has a part of the run, without that.");
}

async function ask<T>(path: string, request: RequestInit): Promise<T> {
  if (embedded) return fromFile<T>(path, request);
  const answer = await fetch(path, request);
  if (answer.ok) return (await answer.json()) as T;
  let message = `${answer.status} ${answer.statusText}`;
  try {
    const body = (await answer.json()) as { detail?: unknown };
    if (typeof body.detail === "string") message = body.detail;
  } catch {
    // Not JSON: the status says enough.
  }
  throw new ApiError(answer.status, message);
}

interface RunEvents {
  /** Called with the tables that grew. The first time, these are all tables. */
  onTables(run: string, tables: Record<string, number>): void;
  onStatus(run: string, status: string): void;
  /** Called when more of a copy of a run on W&B has come. */
  onRemote(run: string, remote: RemoteCopy): void;
  onConnected(connected: boolean): void;
  /** Called with the server's words when it asks for the secret of a later start. */
  onRefused(message: string): void;
}

const FIRST_RETRY_MS = 1000;
const LAST_RETRY_MS = 15000;
/** The server sends an event every ten seconds. A stream without one for this long is lost, also before its first, for example in a tunnel that hangs. */
const SILENT_MS = 25_000;

/** Follows the events of some runs; returns a function that ends it. */
export function follow(runs: string[], events: RunEvents): () => void {
  if (embedded) return () => {};
  let source: EventSource | null = null;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let wait = FIRST_RETRY_MS;
  const connect = () => {
    const opened = new EventSource(address("/api/events", { run: runs }));
    source = opened;
    const expectSoon = () => {
      clearTimeout(timer);
      timer = setTimeout(() => {
        opened.close();
        events.onConnected(false);
        connect();
      }, SILENT_MS);
    };
    const heard = () => {
      expectSoon();
      events.onConnected(true);
    };
    expectSoon();
    opened.onopen = () => {
      wait = FIRST_RETRY_MS;
      heard();
    };
    opened.addEventListener("alive", heard);
    const on = <T>(name: string, handle: (run: string, value: T) => void) =>
      opened.addEventListener(name, (event: MessageEvent<string>) => {
        heard();
        const { run, [name]: value } = JSON.parse(event.data) as { run: string } & Record<string, unknown>;
        handle(run, value as T);
      });
    on("tables", events.onTables);
    on("status", events.onStatus);
    on("remote", events.onRemote);
    opened.onerror = () => {
      events.onConnected(false);
      if (opened.readyState !== EventSource.CLOSED) return expectSoon(); // the browser reconnects, with Last-Event-ID
      clearTimeout(timer);
      // The stream does not tell why it was closed.
      get("/api/projects").catch((error) => error instanceof ApiError && error.status === 401 && events.onRefused(error.message));
      timer = setTimeout(connect, wait);
      wait = Math.min(2 * wait, LAST_RETRY_MS);
    };
  };
  connect();
  return () => {
    clearTimeout(timer);
    source?.close();
  };
}
