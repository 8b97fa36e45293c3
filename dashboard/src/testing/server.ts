/** Stand-ins for the server in tests: an EventSource and a fetch that tests control. */

import { vi } from "vitest";

/** An EventSource whose events a test sends. */
export class FakeEventSource {
  static readonly CLOSED = 2;
  static all: FakeEventSource[] = [];
  onopen: (() => void) | null = null;
  onerror: (() => void) | null = null;
  readyState = 0;
  private readonly handlers = new Map<string, (event: { data: string }) => void>();

  constructor(readonly url: string) {
    FakeEventSource.all.push(this);
  }
  addEventListener(name: string, handler: (event: { data: string }) => void): void {
    this.handlers.set(name, handler);
  }
  close(): void {
    this.readyState = FakeEventSource.CLOSED;
  }
  open(): void {
    this.readyState = 1;
    this.onopen?.();
  }
  send(name: string, data: unknown): void {
    this.handlers.get(name)?.({ data: JSON.stringify(data) });
  }
  /** Loses the connection; `closed` when the browser does not try again by itself. */
  fail(closed: boolean): void {
    this.readyState = closed ? FakeEventSource.CLOSED : 0;
    this.onerror?.();
  }
  static get open(): FakeEventSource[] {
    return FakeEventSource.all.filter((source) => source.readyState !== FakeEventSource.CLOSED);
  }
}

/** Replaces EventSource in this test. */
export function fakeEvents(): typeof FakeEventSource {
  FakeEventSource.all = [];
  vi.stubGlobal("EventSource", FakeEventSource);
  return FakeEventSource;
}

/** Replaces fetch: each request waits until the test answers it. */
export function fakeFetch() {
  const asked: { url: string; answer: (body: unknown, status?: number) => Promise<void> }[] = [];
  vi.stubGlobal("fetch", (url: string) => {
    let resolve!: (response: Response) => void;
    asked.push({
      url,
      answer: async (body, status = 200) => {
        resolve(new Response(JSON.stringify(body), { status, headers: { "content-type": "application/json" } }));
        await vi.advanceTimersByTimeAsync(0);
      },
    });
    return new Promise<Response>((done) => (resolve = done));
  });
  return asked;
}
