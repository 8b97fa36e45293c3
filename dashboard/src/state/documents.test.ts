import { afterEach, expect, test, vi } from "vitest";
import { ApiError } from "../api";
import type { Document } from "../types";
import { KeptDocument, type Server } from "./documents";
import { RETRY_MS } from "./resource";

afterEach(() => void vi.useRealTimers());

/** A server with one document. */
class Kept implements Server {
  puts = 0;
  constructor(public value: unknown = null, public version = "") {}
  async get(): Promise<Document> {
    return { value: this.value, version: this.version };
  }
  async put(_: string, document: Document): Promise<Document> {
    this.puts += 1;
    if (document.version !== this.version) throw new ApiError(409, "It was changed elsewhere.");
    this.value = document.value;
    this.version += "+";
    return this.get();
  }
}

const add = (item: string) => (old: unknown) => [...((old as string[] | null) ?? []), item];

test("a change is shown before the server has it", async () => {
  const kept = new KeptDocument("notes", new Kept(["a"]));
  await kept.load();
  const done = kept.change(add("b"));
  expect(kept.state).toEqual({ value: ["a", "b"], error: null, saving: true });
  await done;
  expect(kept.state.saving).toBe(false);
});

test("a change before the first read is made to what is read", async () => {
  const server = new Kept(["a"], "1");
  await new KeptDocument("notes", server).change(add("b"));
  expect(server.value).toEqual(["a", "b"]);
});

test("changes of two pages are both kept", async () => {
  const server = new Kept(["a"]);
  const [one, two] = [new KeptDocument("notes", server), new KeptDocument("notes", server)];
  await Promise.all([one.load(), two.load()]);
  await one.change(add("b"));
  await two.change(add("c"));
  expect(server.value).toEqual(["a", "b", "c"]);
});

test("changes while one is sent go together", async () => {
  const server = new Kept([]);
  const kept = new KeptDocument("notes", server);
  await kept.load();
  await Promise.all([kept.change(add("a")), kept.change(add("b")), kept.change(add("c"))]);
  expect(server.value).toEqual(["a", "b", "c"]);
  expect(server.puts).toBe(2);
});

test("a change that the server refuses is taken back and says why", async () => {
  const server = new Kept(["a"]);
  const kept = new KeptDocument("notes", server);
  await kept.load();
  server.put = async () => Promise.reject(new ApiError(413, "too large"));
  await kept.change(add("b"));
  expect(kept.state).toMatchObject({ value: ["a"], saving: false });
  expect(kept.state.error?.message).toBe("too large");
});

test("what the server could not read or keep is tried again", async () => {
  vi.useFakeTimers();
  const server = new Kept(["a"]);
  const [get, put] = [server.get.bind(server), server.put.bind(server)];
  server.get = async () => Promise.reject(new TypeError("Failed to fetch"));
  const kept = new KeptDocument("notes", server);
  await kept.load();
  expect(kept.state.error?.message).toBe("Failed to fetch");
  server.get = get;
  await vi.advanceTimersByTimeAsync(RETRY_MS);
  expect(kept.state).toEqual({ value: ["a"], error: null, saving: false });
  server.put = async () => Promise.reject(new ApiError(503, "The server starts."));
  await kept.change(add("b"));
  expect(kept.state).toMatchObject({ value: ["a", "b"], saving: true });
  server.put = put;
  await vi.advanceTimersByTimeAsync(RETRY_MS);
  expect(server.value).toEqual(["a", "b"]);
  expect(kept.state).toEqual({ value: ["a", "b"], error: null, saving: false });
});

test("a change without a connection goes with the next one", async () => {
  const server = new Kept(["a"]);
  const kept = new KeptDocument("notes", server);
  await kept.load();
  const put = server.put.bind(server);
  server.put = async () => Promise.reject(new TypeError("Failed to fetch"));
  await kept.change(add("b"));
  expect(kept.state).toMatchObject({ value: ["a", "b"], saving: true });
  server.put = put;
  await kept.change(add("c"));
  expect(server.value).toEqual(["a", "b", "c"]);
});

test("what another page writes during a read is read too", async () => {
  const server = new Kept(["a"], "1");
  const kept = new KeptDocument("notes", server);
  const old = await server.get();
  let answer = (_: Document) => {};
  server.get = () => new Promise((done) => (answer = done));
  const loaded = kept.load();
  void kept.read(); // as its message asks for
  server.get = async () => ({ value: ["a", "b"], version: "2" });
  answer(old);
  await loaded;
  expect(kept.state.value).toEqual(["a", "b"]);
});
