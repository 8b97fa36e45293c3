import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { ApiError } from "../api";
import { fakeFetch } from "../testing/server";
import { Reader, responses, RETRY_MS } from "./resource";
import { NO_STEPS, steps } from "./steps";

const { known, read } = responses;

let asked: ReturnType<typeof fakeFetch>;

beforeEach(() => {
  vi.useFakeTimers();
  asked = fakeFetch();
});

afterEach(() => void vi.unstubAllGlobals());

test("versions that pass during a read lead to one more read", async () => {
  let reads = 0;
  let finish = () => {};
  const reader = new Reader(() => new Promise((done) => ((reads += 1), (finish = done))));
  void reader.want("1");
  void reader.want("2");
  void reader.want("3");
  expect(reads).toBe(1);
  finish();
  await vi.advanceTimersByTimeAsync(0);
  expect(reads).toBe(2);
  finish();
  await vi.advanceTimersByTimeAsync(0);
  await reader.want("3");
  expect(reads).toBe(2);
});

test("an address is read once for all that need it, and old data stay while it is read again", async () => {
  const heard: unknown[] = [];
  const stop = responses.listen(["/a"], () => heard.push(known("/a").data));
  void read("/a", "1");
  void read("/a", "1");
  expect(asked.map((one) => one.url)).toEqual(["/a"]);
  await asked[0]!.answer([1]);
  void read("/a", "2");
  expect(known("/a").data).toEqual([1]);
  await asked[1]!.answer([2]);
  expect(heard).toEqual([[1], [2]]);
  stop();
});

test("an error keeps the data, says why, and goes with the next read", async () => {
  void read("/b", "1");
  await asked[0]!.answer([1]);
  void read("/b", "2");
  await asked[1]!.answer({ detail: "Use a number." }, 400);
  expect(known("/b")).toMatchObject({ data: [1], error: new ApiError(400, "Use a number."), loading: false });
  void read("/b", "3");
  await asked[2]!.answer([3]);
  expect(known("/b")).toEqual({ data: [3], error: null, loading: false });
});

test("what the server could not answer is read again while somebody needs it", async () => {
  const stop = responses.listen(["/d"], () => {});
  void read("/d", "1");
  await asked[0]!.answer({ detail: "The dashboard failed here." }, 500);
  expect(known("/d").error).toEqual(new ApiError(500, "The dashboard failed here."));
  await vi.advanceTimersByTimeAsync(RETRY_MS);
  await asked[1]!.answer([1]);
  expect(known("/d")).toEqual({ data: [1], error: null, loading: false });
  await vi.advanceTimersByTimeAsync(2 * RETRY_MS);
  expect(asked).toHaveLength(2);
  stop();
  void read("/d", "2");
  await asked[2]!.answer({}, 500);
  await vi.advanceTimersByTimeAsync(RETRY_MS);
  expect(asked).toHaveLength(3);
});

test("what failed while no page needed it is read when one does", async () => {
  void read("/e", "1");
  await asked[0]!.answer({}, 503);
  await vi.advanceTimersByTimeAsync(RETRY_MS);
  const stop = responses.listen(["/e"], () => {});
  void read("/e", "1");
  await asked[1]!.answer([1]);
  expect(known("/e")).toEqual({ data: [1], error: null, loading: false });
  stop();
});

test("a version that came during a read is read again too if it fails", async () => {
  const stop = responses.listen(["/f"], () => {});
  void read("/f", "1");
  void read("/f", "2");
  await asked[0]!.answer([1]);
  await asked[1]!.answer({}, 503);
  await vi.advanceTimersByTimeAsync(RETRY_MS);
  await asked[2]!.answer([2]);
  expect(known("/f")).toEqual({ data: [2], error: null, loading: false });
  stop();
});

const rows = (next: number, step: number[]) => ({ ...NO_STEPS, next, step, attempt: step.map(() => 1) });

test("steps are read from the cursor on", async () => {
  void steps.read("run", "1");
  await asked[0]!.answer(rows(2, [0, 1]));
  void steps.read("run", "2");
  expect(asked[1]!.url).toBe("/api/runs/run/steps?since=2");
  await asked[1]!.answer(rows(3, [2]));
  expect(steps.known("run").data!.step).toEqual([0, 1, 2]);
});

test("steps of another run in the same folder replace the old ones", async () => {
  void steps.read("replaced", "1");
  await asked[0]!.answer(rows(9, [0, 1, 2]));
  void steps.read("replaced", "2");
  await asked[1]!.answer(rows(1, []));
  expect(asked[2]!.url).toBe("/api/runs/replaced/steps");
  await asked[2]!.answer(rows(1, [0]));
  expect(steps.known("replaced").data!.step).toEqual([0]);
});

test("steps of runs that no page shows any more are dropped", async () => {
  for (let i = 0; i < 20; i += 1) {
    void steps.read(`run ${i}`, "1");
    await asked[i]!.answer(rows(1, [0]));
  }
  expect([0, 19].map((i) => steps.known(`run ${i}`).data?.step ?? null)).toEqual([null, [0]]);
});
