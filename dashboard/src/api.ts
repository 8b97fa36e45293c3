/** Typed requests, and server-sent events that reconnect. A cookie carries the token, where the server wants one. */

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

export type Query = Record<string, string | number | boolean | null | undefined>;

/** Returns the path with the parameters that are set. */
export function address(path: string, query: Query = {}): string {
  const set = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(set.map(([name, value]) => [name, String(value)])).toString();
  return text ? `${path}?${text}` : path;
}

/** Returns the path of a run's resource; ids may contain slashes. */
export function runPath(run: string, ...rest: (string | number)[]): string {
  return ["/api/runs", encodeURIComponent(run), ...rest.map((part) => encodeURIComponent(part))].join("/");
}

export const get = <T>(path: string, query: Query = {}, signal?: AbortSignal): Promise<T> =>
  ask<T>(address(path, query), { signal, headers: { accept: "application/json" } });

/** Replaces a document that the user keeps. */
export const put = <T>(path: string, body: unknown): Promise<T> =>
  ask<T>(path, { method: "PUT", headers: { accept: "application/json", "content-type": "application/json" }, body: JSON.stringify(body) });

async function ask<T>(path: string, request: RequestInit): Promise<T> {
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

export interface RunEvents {
  /** Called with the tables that grew. */
  onTables(tables: Record<string, number>): void;
  onStatus(status: string): void;
  onConnected(connected: boolean): void;
}

const FIRST_RETRY_MS = 1000;
const LAST_RETRY_MS = 15000;

/** Follows the events of a run; returns a function that ends it. */
export function follow(run: string, events: RunEvents): () => void {
  let source: EventSource | null = null;
  let timer: ReturnType<typeof setTimeout> | undefined;
  let wait = FIRST_RETRY_MS;
  const connect = () => {
    source = new EventSource(address("/api/events", { run }));
    source.onopen = () => {
      wait = FIRST_RETRY_MS;
      events.onConnected(true);
    };
    source.addEventListener("tables", (event: MessageEvent<string>) => events.onTables(JSON.parse(event.data).tables));
    source.addEventListener("status", (event: MessageEvent<string>) => events.onStatus(JSON.parse(event.data).status));
    source.onerror = () => {
      events.onConnected(false);
      if (source?.readyState !== EventSource.CLOSED) return; // the browser reconnects, with Last-Event-ID
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
