import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { follow } from "../api";
import { fakeEvents, type FakeEventSource } from "../testing/server";
import { behindSince, HIDDEN_MS, onRead, pageHidden, stateOf, versionOf, watch } from "./live";

let sources: typeof FakeEventSource;
const stops: (() => void)[] = [];

beforeEach(() => {
  vi.useFakeTimers();
  sources = fakeEvents();
});

afterEach(async () => {
  for (const stop of stops.splice(0)) stop();
  pageHidden(false);
  await vi.advanceTimersByTimeAsync(0);
  vi.unstubAllGlobals();
});

async function watched(...runs: string[]): Promise<FakeEventSource> {
  for (const run of runs) stops.push(watch(run));
  await vi.advanceTimersByTimeAsync(0);
  return sources.open.at(-1)!;
}

const quiet = { onTables: () => {}, onStatus: () => {}, onRemote: () => {}, onConnected: () => {}, onRefused: () => {} };

test("a stream that is closed because the server has another secret passes on why", async () => {
  vi.stubGlobal("fetch", async () => new Response(JSON.stringify({ detail: "The token is from another start." }), { status: 401 }));
  const said: string[] = [];
  stops.push(follow(["a"], { ...quiet, onRefused: (message) => said.push(message) }));
  sources.all[0]!.fail(true);
  await vi.advanceTimersByTimeAsync(1000);
  expect([said, sources.all.length]).toEqual([["The token is from another start."], 2]);
});

test("a connection that the browser gives up is opened again, later after each failure", async () => {
  const states: boolean[] = [];
  stops.push(follow(["a b"], { ...quiet, onConnected: (on) => states.push(on) }));
  expect(sources.all[0]!.url).toBe("/api/events?run=a+b");
  sources.all[0]!.fail(true);
  await vi.advanceTimersByTimeAsync(1000);
  expect(sources.all.length).toBe(2);
  sources.all[1]!.fail(true);
  await vi.advanceTimersByTimeAsync(1999);
  expect(sources.all.length).toBe(2);
  await vi.advanceTimersByTimeAsync(1);
  sources.all[2]!.open();
  expect(states).toEqual([false, false, true]);
  sources.all[2]!.fail(true);
  await vi.advanceTimersByTimeAsync(1000);
  expect(sources.all.length).toBe(4);
});

test("a connection that the browser restores by itself is not opened twice", async () => {
  stops.push(follow(["a"], quiet));
  sources.all[0]!.fail(false);
  await vi.advanceTimersByTimeAsync(20_000);
  sources.all[0]!.open();
  await vi.advanceTimersByTimeAsync(20_000);
  expect(sources.all.length).toBe(1);
});

test("a connection that hangs before it is open is opened again", async () => {
  const states: boolean[] = [];
  stops.push(follow(["a"], { ...quiet, onConnected: (on) => states.push(on) }));
  await vi.advanceTimersByTimeAsync(25_000);
  expect(states).toEqual([false]);
  expect(sources.open.length).toBe(1);
  sources.open[0]!.fail(false);
  await vi.advanceTimersByTimeAsync(25_000);
  expect(sources.all.length).toBe(3);
});

test("an ended connection is not opened again", async () => {
  const stop = follow(["a"], quiet);
  sources.all[0]!.fail(true);
  stop();
  await vi.advanceTimersByTimeAsync(60_000);
  expect(sources.all.length).toBe(1);
});

test("runs share one connection, which ends with the last of them", async () => {
  const source = await watched("first", "second", "first");
  expect(sources.open.map((one) => one.url)).toEqual(["/api/events?run=first&run=second"]);
  source.send("tables", { run: "second", tables: { steps: 3 } });
  expect(versionOf("second", "steps", "logs")).toBe("0/0/3/0");
  expect(versionOf("first", "steps")).toBe("0/0/0");
  stops.splice(0).forEach((stop) => stop());
  await vi.advanceTimersByTimeAsync(0);
  expect(sources.open).toEqual([]);
});

test("a status changes what is read", async () => {
  const source = await watched("run");
  const versions = [versionOf("run", "samples")];
  for (const status of ["live", "finished", "live"]) {
    source.send("status", { run: "run", status });
    versions.push(versionOf("run", "samples"));
  }
  expect(new Set(versions).size).toBe(4);
});

test("a run that is added to the page reads nothing of the others again", async () => {
  const source = await watched("a");
  for (const one of [source, await watched("b")]) {
    one.send("status", { run: "a", status: "live" });
    one.send("tables", { run: "a", tables: { steps: 3 } });
    expect(versionOf("a", "steps")).toBe("1/0/3");
  }
});

test("the first events of an ended run read nothing again, and those of a resume do", async () => {
  const source = await watched("ended");
  const before = versionOf("ended", "steps");
  source.send("status", { run: "ended", status: "finished" });
  source.send("tables", { run: "ended", tables: { steps: 3 } });
  expect(versionOf("ended", "steps")).toBe(before);
  source.send("tables", { run: "ended", tables: { steps: 4 } });
  expect(versionOf("ended", "steps")).not.toBe(before);
});

test("a lost connection that comes back reads everything again", async () => {
  const source = await watched("lost");
  source.open();
  source.send("tables", { run: "lost", tables: { steps: 3 } });
  const before = versionOf("lost", "steps");
  source.fail(false);
  source.open();
  expect(versionOf("lost", "steps")).not.toBe(before);
});

test("a page in the background has no connection, and learns what it missed when it is back", async () => {
  const source = await watched("asleep");
  source.send("tables", { run: "asleep", tables: { steps: 3 } });
  pageHidden(true);
  await vi.advanceTimersByTimeAsync(HIDDEN_MS - 1);
  expect(sources.open.length).toBe(1);
  await vi.advanceTimersByTimeAsync(1);
  expect(sources.open.length).toBe(0);
  pageHidden(false);
  sources.open[0]!.send("tables", { run: "asleep", tables: { steps: 9 } });
  expect(versionOf("asleep", "steps").endsWith("/9")).toBe(true);
});

test("how much of a run on W&B is here is shown with its run", async () => {
  const source = await watched("a");
  const remote = { phase: "syncing", source: "W&B me/p", done_bytes: 1, total_bytes: 2, message: null };
  source.send("remote", { run: "a", remote });
  expect(stateOf("a").remote).toEqual(remote);
});

test("a page whose stream breaks or falls silent, or whose reads fail, says until when it was up to date", async () => {
  vi.setSystemTime(1_000_000);
  const source = await watched("a");
  source.open();
  await vi.advanceTimersByTimeAsync(20_000);
  source.send("alive", 0);
  expect(behindSince()).toBe(null);
  await vi.advanceTimersByTimeAsync(30_000);
  expect(behindSince()).toBe(1_020_000);
  expect(sources.open.length).toBe(1);
  sources.open[0]!.open();
  expect(behindSince()).toBe(null);
  await vi.advanceTimersByTimeAsync(5_000);
  onRead(false);
  expect(behindSince()).toBe(1_050_000);
  sources.open[0]!.send("alive", 0);
  expect(behindSince()).toBe(1_050_000);
  onRead(true);
  expect(behindSince()).toBe(null);
});
