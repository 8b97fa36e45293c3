import { expect, test } from "vitest";
import type { Alert, InFlight } from "../../types";
import { alertMarks, outages } from "./alerts";
import { advice, criticalPath, type CriticalPath, meanPath, partition, tableRows, total, verdict, type StepSpan } from "./criticalPath";
import type { Brush } from "./brush";
import { plotLine } from "./draw";
import { boxesWithin, pixelBoxes } from "./pixels";
import { nextRequest, spanAt } from "./layout";
import type { Scene } from "./scene";
import { KINDS, buildLanes, kindOf, OUTCOMES, type SpanColumns, type Track, withRunning } from "./spans";
import { sandboxRows } from "./StepPanel";
import { traceEvents } from "./trace";
import { NARROWEST, bound, follow, timeLabel, timeTicks, zoom } from "./viewport";

type Row = [string, string, Partial<StepSpan> & { start: number; end: number }];

function columns(rows: Row[]): SpanColumns {
  const of = <T>(read: (row: Row) => T) => rows.map(read);
  return {
    component: of((r) => r[0]), name: of((r) => r[1]), rank: of((r) => r[2].rank ?? null), server: of((r) => r[2].server ?? null),
    lane: of((r) => r[2].lane ?? null), step: of((r) => r[2].step ?? null), micro_batch: of(() => null),
    sample_id: of((r) => r[2].sample_id ?? null), start: of((r) => r[2].start), end: of((r) => r[2].end),
  };
}

function spans(rows: Row[]): StepSpan[] {
  return rows.map(([component, name, rest]) => ({ component, name, rank: null, server: null, lane: null, step: null, sample_id: null, ...rest }));
}

const ALONE = { outages: [], evals: [] };

const REQUEST: Row[] = [
  ["rollout", "generate", { server: 0, lane: 3, sample_id: "7-1", start: 0, end: 5 }],
  ["inference", "decode", { server: 0, lane: 3, sample_id: "7-1", start: 2, end: 5 }],
  ["inference", "queue", { server: 0, lane: 3, sample_id: "7-1", start: 1, end: 2 }],
  ["rollout", "reward", { server: 0, lane: 3, sample_id: "7-1", start: 5, end: 6 }],
  ["trainer", "step", { rank: 0, step: 4, start: 6.5, end: 9 }],
  ["trainer", "forward", { rank: 0, step: 4, start: 6.5, end: 7 }],
  ["trainer", "backward", { rank: 0, step: 4, start: 7, end: 8.5 }],
  ["trainer", "gradient_reduction", { rank: 0, step: 4, start: 8, end: 8.75 }],
  ["weights", "weight_sync", { server: 0, step: 4, start: 9, end: 9.5 }],
];

test("a slot shows the engine, then tools and rewards, then the rest of its request", () => {
  const lanes = buildLanes(columns([...REQUEST, ["rollout", "reward", { server: 0, lane: 3, sample_id: "6-0", start: 4, end: 5.5 }]]));
  expect(lanes.engines).toHaveLength(1);
  const [lane] = lanes.engines[0]!.lanes;
  const shown = [...lane!.main.start].map((start, i) => [start, lane!.main.end[i], KINDS[lane!.main.kind[i]!]]);
  expect(lane!.slot).toBe(3);
  expect(shown).toEqual([[0, 1, "request"], [1, 2, "queue"], [2, 5, "decode"], [5, 5.5, "reward"], [5.5, 6, "reward"]]);
  expect(lanes.engines[0]!.syncs.start.length).toBe(1);
  expect(lanes.trainer[0]!.stripe.start.length).toBe(1);
});

test("every slot of the run has a lane, whatever is in view", () => {
  const { engines } = buildLanes({ ...columns(REQUEST), slots: { "0": 4, "1": 2 } });
  expect(engines.map((engine) => engine.lanes.map((lane) => lane.slot))).toEqual([[0, 1, 2, 3], [0, 1]]);
});

test("merged spans of several kinds are drawn one after the other, as long as they are together", () => {
  const merged: Row[] = [
    ["trainer", "forward", { rank: 0, start: 0, end: 3 }],
    ["trainer", "backward", { rank: 0, start: 0.1, end: 4.1 }],
    ["trainer", "optimizer", { rank: 0, start: 0.2, end: 0.7 }],
    ["trainer", "forward", { rank: 0, start: 8, end: 9 }],
  ];
  const { start, end } = buildLanes({ ...columns(merged), count: [30, 30, 5, 1] }).trainer[0]!.main;
  expect([...start]).toEqual([0, 3, 7, 8]);
  expect([...end].map((at, i) => at - start[i]!)).toEqual([3, 4, expect.closeTo(0.5), 1]);
});

test("every known name has a kind", () => {
  expect(kindOf("trainer", "weight_broadcast_wait")).toBe("weight sync");
  expect(kindOf("environment", "turn")).toBe("environment");
});

/** Returns the pixels of each kind. */
function pixelsOf(track: Track, origin: number, narrow: number): Record<string, number> {
  const found: Record<string, number> = {};
  for (const box of pixelBoxes(track, origin, narrow)) found[KINDS[box.kind]!] = (found[KINDS[box.kind]!] ?? 0) + box.to - box.from;
  return found;
}

test("each kind has the pixels of its time at every zoom, however short its spans are", () => {
  const parts = [["queue", 0.0007], ["prefill", 0.0011], ["decode", 0.0052]] as const;
  let time = 0;
  const rows = Array.from({ length: 3000 }, (_, i): Row => {
    const [kind, length] = parts[i % 3]!;
    const start = time + (i % 7 ? 0 : 0.0041);
    time = start + length * (1 + (i % 5) / 3);
    return ["inference", kind, { server: 0, lane: 0, start, end: time }];
  });
  const track = buildLanes(columns(rows)).engines[0]!.lanes[0]!.main;
  for (const narrow of [0.05, 0.01, 0.003, 0.0008]) {
    const drawn = pixelsOf(track, 0, narrow);
    for (const [kind] of parts) {
      const recorded = rows.filter((row) => row[1] === kind).reduce((sum, row) => sum + row[2].end - row[2].start, 0);
      expect(Math.abs(drawn[kind]! - recorded / narrow)).toBeLessThanOrEqual(1);
    }
    const boxes = pixelBoxes(track, 0, narrow);
    expect(boxes.every((box, i) => i === 0 || boxes[i - 1]!.to <= box.from)).toBe(true);
  }
});

test("outcomes are boxes of their own", () => {
  const rows = Array.from({ length: 40 }, (_, i): Row => ["inference", "decode", { server: 0, lane: 0, start: i, end: i + 1 }]);
  const status = rows.map((_, i) => ["kept", "masked", "cancelled", "eval"][i % 4]!);
  const boxes = pixelBoxes(buildLanes({ ...columns(rows), status }).engines[0]!.lanes[0]!.main, 0, 0.5);
  expect(boxes.slice(0, 4).map((box) => OUTCOMES[box.outcome])).toEqual(["kept", "discarded", "cancelled", "eval"]);
});

test("a long span that began before the view is drawn", () => {
  const track = buildLanes(columns([["inference", "decode", { server: 0, lane: 0, start: 0, end: 100 }]])).engines[0]!.lanes[0]!.main;
  expect(boxesWithin(pixelBoxes(track, 0, 0.01), 5000, 6000)).toHaveLength(1);
});

test("the pointer finds the shortest span under it, and near ones within the tolerance", () => {
  const track = buildLanes(columns(REQUEST.slice(1))).engines[0]!.lanes[0]!.main;
  expect(track.start[spanAt(track, 1.5, 0)]).toBe(1);
  expect(track.start[spanAt(track, 0.95, 0.1)]).toBe(1);
  expect(spanAt(track, 0.5, 0.1)).toBe(-1);
});

test("a zoom keeps the time under the pointer", () => {
  const view = zoom({ from: 0, to: 100 }, 25, 0.5);
  expect(view).toEqual({ from: 12.5, to: 62.5 });
  const narrow = zoom({ from: 0, to: NARROWEST }, 0, 0.1);
  expect(narrow.to - narrow.from).toBeCloseTo(NARROWEST);
});

test("a view stays at the run, and following shows its end", () => {
  expect(bound({ from: 500, to: 510 }, 0, 100)).toEqual({ from: 95, to: 105 });
  expect(follow({ from: 0, to: 12 }, 100)).toEqual({ from: 89, to: 101 });
});

test("ticks are round in the time of the run", () => {
  expect(timeTicks({ from: 1003, to: 1043 }, 1000, 9)).toEqual({ times: [1005, 1010, 1015, 1020, 1025, 1030, 1035, 1040], step: 5 });
  expect([timeLabel(2465, 5), timeLabel(3750, 60), timeLabel(5.25, 0.05), timeLabel(-2, 1)]).toEqual(["41:05", "1:02:30", "0:05.25", "−0:02"]);
});

test("the parts of a partition add up to its time", () => {
  const parts = partition(0, 10, [
    { start: -5, end: 4, kind: "decode", label: "a", priority: 1 },
    { start: 3, end: 6, kind: "reward", label: "b", priority: 2 },
  ], { kind: "other", label: "rest" });
  expect(parts.map((p) => [p.label, p.seconds])).toEqual([["a", 3], ["b", 3], ["rest", 4]]);
});

test("the critical path goes through the last sample to the end of the step", () => {
  const samples = [
    { sample_id: "7-1", group_id: 7, finished_at: 6, server: 0, lane: 3 },
    { sample_id: "6-0", group_id: 6, finished_at: 2, server: 0, lane: 1 },
  ];
  const path = criticalPath(4, 1, 10, spans(REQUEST), samples);
  expect(path.last?.sample_id).toBe("7-1");
  expect(path.groupsReady).toEqual({ earlier: 1, of: 2, seconds: 4 });
  const rows = total(path.parts);
  expect(rows.map((row) => [row.label, row.seconds])).toEqual([
    ["Its queue", 1], ["Decode of 7-1", 3], ["Its reward", 1], ["Batch packed", 0.5],
    ["Forward", 0.5], ["Backward", 1.5], ["Reduce", 0.25], ["Between phases", 0.75], ["Weight sync", 0.5],
  ]);
  expect(rows.reduce((sum, row) => sum + row.seconds, 0)).toBeCloseTo(9);
  expect(verdict([path], ALONE)).toBe("It waited 5.5 s for one long answer.");
  expect(advice([path], ALONE)[0]).toBe("Raise max_async_rollout: group 7 would join a later step. Or lower max_tokens.");
});

test("a wait for all answers gets the advice of the overview, and a short wait none", () => {
  const samples = [
    { sample_id: "7-1", group_id: 7, finished_at: 6, server: 0, lane: 3 },
    { sample_id: "6-0", group_id: 6, finished_at: 5.9, server: 0, lane: 1 },
  ];
  expect(advice([criticalPath(4, 1, 10, spans(REQUEST), samples)], ALONE)).toEqual(["Raise inference_num_workers or max_async_rollout, or lower trainer_num_workers."]);
  expect(advice([criticalPath(4, 1, 10, spans(REQUEST), samples)], { ...ALONE, ranks: 1 })).toEqual(["Raise inference_num_workers or max_async_rollout."]);
  expect(advice([criticalPath(4, 5.95, 10, spans(REQUEST), samples)], ALONE)).toEqual([]);
});

function stepOf(rows: Row[], end = 10): CriticalPath {
  return criticalPath(4, 1, end, spans(rows), [
    { sample_id: "7-1", group_id: 7, finished_at: 6, server: 0, lane: 3 },
    { sample_id: "6-0", group_id: 6, finished_at: 5.9, server: 0, lane: 1 },
  ]);
}

test.each([
  ["a dead engine", REQUEST, { outages: [{ server: 1, from: 0, to: 20 }], evals: [] }, "while engine 1 was down.", "Engine 1 was down for 20 s"],
  ["an eval on its engines", REQUEST, { outages: [], evals: [{ from: 0, to: 6, servers: [0] }] }, "while an eval ran", "raise eval_every"],
  ["not an eval elsewhere", REQUEST, { outages: [], evals: [{ from: 0, to: 6, servers: [2] }] }, "to be generated.", "Raise inference_num_workers"],
  ["a weight sync", [...REQUEST, ["weights", "weight_sync", { server: 1, start: 9, end: 20 }]] as Row[], ALONE, "for weight syncs.", "weight_broadcast_bucket_mb"],
  ["a checkpoint", [...REQUEST, ["trainer", "checkpoint", { rank: 0, step: 4, start: 9, end: 20 }]] as Row[], ALONE, "for a checkpoint.", "raise checkpoint_every"],
  ["a wait for a sandbox", [...REQUEST, ["sandbox", "queue", { sample_id: "7-1", start: 0, end: 5 }]] as Row[], ALONE, "for a sandbox.", "Raise pool_size"],
  ["a prompt that sandboxes held back", [...REQUEST.map(([component, name, rest]): Row => [component, name, { ...rest, start: rest.start + (rest.sample_id ? 4.5 : 0), end: Math.max(rest.end, 5) }]), ["sandbox", "exec", { sample_id: "7-1", start: 4, end: 6 }]] as Row[], ALONE, "sent late.", "Raise pool_size"],
  ["a stopped rank", [...REQUEST, ["trainer", "step", { rank: 1, step: 4, start: 18, end: 19.5 }]] as Row[], ALONE, "for its last rank to begin.", "Rank 1 began late"],
])("advice names %s", (_, rows, around, said, tip) => {
  const path = stepOf(rows, rows.length > REQUEST.length ? 20 : 10);
  expect(verdict([path], around)).toContain(said);
  expect(advice([path], around)[0]).toContain(tip);
});

test("an agent in a sandbox has the phases of its requests, and the rest of its time is the sandbox's", () => {
  const path = stepOf([...REQUEST.filter(([, name]) => name !== "reward"), ["sandbox", "exec", { sample_id: "7-1", start: 0, end: 6 }]]);
  expect(total(path.parts).slice(0, 3).map((part) => [part.label, part.seconds])).toEqual([["Its queue", 1], ["Decode of 7-1", 3], ["Its sandbox", 1]]);
});

test("the mean path has the mean seconds of each part, which add up to the mean step", () => {
  const paths = [stepOf(REQUEST), stepOf([...REQUEST, ["weights", "weight_sync", { server: 1, start: 9.5, end: 14 }]], 14)];
  const rows = tableRows(meanPath(paths));
  expect(rows.map((row) => [row.label, row.seconds])).toContainEqual(["Its decode", 3]);
  expect(rows.find((row) => row.label === "Weight sync")!.seconds).toBeCloseTo((0.5 + 5) / 2);
  expect(rows.reduce((sum, row) => sum + row.seconds, 0)).toBeCloseTo((9 + 13) / 2);
  expect(verdict(paths, ALONE)).toBe("The mean step waited 5.5 s of 11 s for its answers to be generated.");
});

test("waits of several causes are one wait for answers", () => {
  const scored = REQUEST.map(([component, name, rest]): Row => [component, name, name === "decode" ? { ...rest, end: 3 } : name === "reward" ? { ...rest, start: 3 } : rest]);
  const paths = [stepOf(REQUEST, 16), stepOf(scored, 16), stepOf(REQUEST, 16), stepOf(scored, 18)];
  expect(verdict(paths, ALONE)).toBe("The mean step waited 5.5 s of 16 s for answers, 2.8 s of it for its answers to be generated.");
  expect(advice(paths, ALONE)).toEqual(["Raise inference_num_workers or max_async_rollout, or lower trainer_num_workers.", "Make the reward faster, or raise max_async_rollout."]);
});

test("requests that run lie in their slots, also where nothing has ended", () => {
  const request = (server: number | null, lane: number | null) => ({ sample_id: `9-${lane}`, server, lane, started_at: 4 }) as InFlight;
  const { engines } = withRunning(buildLanes(columns(REQUEST)), [request(0, 3), request(0, 5), request(1, 0), request(null, null)]);
  expect(engines.map((engine) => [engine.server, engine.busy])).toEqual([[0, 2], [1, 1]]);
  expect(engines[0]!.lanes.map((lane) => [lane.slot, lane.running?.sample])).toEqual([[3, "9-3"], [5, "9-5"]]);
});

test("keys go through the requests of a view by their start", () => {
  const of = (sample_id: string, start: number): Row => ["inference", "decode", { server: 0, lane: 0, sample_id, start, end: start + 1 }];
  const all = columns([of("c", 3), of("a", 1), of("b", 2), of("gone", 50), ["rollout", "reward", { sample_id: "x", start: 0, end: 9 }]]);
  expect(nextRequest(all, 0, 10, "", 1)).toBe("a");
  expect([nextRequest(all, 0, 10, "a", 1), nextRequest(all, 0, 10, "c", 1), nextRequest(all, 0, 10, "c", -1)]).toEqual(["b", "c", "b"]);
  expect(nextRequest(all, 60, 70, "a", 1)).toBeNull();
});

test("a server is down from its report until it is back, the next attempt, or the end", () => {
  const alert = (title: string, time: number, level = "warning", kind = "server") => ({ title, text: "", time, first_time: null, step: 1, first_step: 1, level, kind }) as Alert;
  const alerts = [alert("server 2 is back with the current weights", 9, "info"), alert("server 2 is down: killed", 5), alert("gsm8k at version 3", 6, "info", "eval"), alert("server 0 failed permanently: no GPU", 7)];
  const marks = alertMarks(alerts);
  expect(marks.map((mark) => [mark.time, mark.quiet])).toEqual([[5, false], [7, false], [9, true]]);
  expect(outages(marks, [1], 20)).toEqual([{ server: 2, from: 5, to: 9 }, { server: 0, from: 7, to: 20 }]);
  expect(outages(marks, [1, 8, 15], 20)).toEqual([{ server: 2, from: 5, to: 8 }, { server: 0, from: 7, to: 8 }]);
});

test("small parts share a last row, and the rows still add up", () => {
  const path = criticalPath(4, 1, 10, spans([...REQUEST, ["trainer", "optimizer", { rank: 0, step: 4, start: 8.9, end: 8.95 }]]), []);
  const rows = tableRows(path);
  expect(rows.at(-1)!.label).toBe("All else");
  expect(rows.some((row) => row.label === "Optimizer")).toBe(false);
  expect(rows.reduce((sum, row) => sum + row.seconds, 0)).toBeCloseTo(9);
});

test("a step whose batch was ready names its longest phase", () => {
  const samples = [{ sample_id: "7-1", group_id: 7, finished_at: 6, server: 0, lane: 3 }];
  const path = criticalPath(4, 6.45, 10, spans(REQUEST), samples);
  expect(path.last).toBeNull();
  expect(verdict([path], ALONE)).toBe("Its batch was ready. Backward took 1.5 s, 42\u2009% of it.");
});

test("the trace has processes, threads and microseconds", () => {
  const events = traceEvents(columns(REQUEST), 0, 10);
  expect(events.filter((event) => event.ph === "X")).toHaveLength(REQUEST.length);
  expect(events.find((event) => event.name === "backward")).toMatchObject({ ts: 7e6, dur: 1.5e6, cat: "trainer" });
  expect(events.filter((event) => event.name === "process_name").map((event) => event.args.name)).toEqual(["engine 0", "trainer"]);
});

test("calls of a sandbox are a stripe in the slot of its sample, whatever they are named, and others are in none", () => {
  const rows: Row[] = [
    ...REQUEST,
    ["rollout", "generate", { server: 0, lane: 1, sample_id: "7-1", start: 7, end: 8 }],
    ["sandbox", "queue", { sample_id: "7-1", start: 5.1, end: 5.2 }],
    ["sandbox", "exec", { sample_id: "7-1", start: 5.2, end: 5.8 }],
    ["sandbox", "exec", { sample_id: "7-1", start: 8.1, end: 8.2 }],
    ["sandbox", "create", { start: 0, end: 1 }],
  ];
  const { engines, orchestrator } = buildLanes(columns(rows));
  const stripes = engines.map((engine) => engine.lanes.map((lane) => [lane.slot, [...lane.stripe.start], [...lane.stripe.kind].map((kind) => KINDS[kind])]));
  expect(stripes).toEqual([[[1, [8.1], ["sandbox"]], [3, [5.1, 5.2], ["sandbox", "sandbox"]]]]);
  expect(orchestrator).toEqual([]);
  expect(traceEvents(columns(rows.slice(-2)), 0, 10).filter((event) => event.ph === "M").map((event) => event.args.name)).toEqual(["sandboxes", "7-1", "pool"]);
});

test("the panel has the calls of each sandbox, and how they failed", () => {
  const span = (name: string, sandbox: string | null, seconds: number, error: string | null = null) => ({ name, sandbox, start: 0, end: seconds, error });
  expect(sandboxRows([span("create", null, 1, "SandboxBusyError"), span("queue", "a", 0.5), span("exec", "a", 0.25), span("exec", "a", 2, "SandboxCommandTimeoutError")])).toEqual([
    ["not created", [["create", "1.000 s, Busy"]]],
    ["a", [["queue", "0.500 s"], ["exec, 2 calls", "2.250 s, CommandTimeout"]]],
  ]);
});

test("the line of a gauge has a gap where one attempt ended and the next had no reading yet", () => {
  const path: string[] = [];
  const note = (name: string) => (...at: number[]) => path.push([name, ...at].join(" "));
  const context = { save() {}, restore() {}, beginPath() {}, rect() {}, clip() {}, fill: note("fill"), stroke: note("stroke"), moveTo: note("move"), lineTo: note("line") };
  const brush = { context, X: (time: number) => 200 + time, right: 400, plot: 200 } as unknown as Brush;
  const scene = { end: 60, layout: { height: 100 } } as Scene;
  plotLine(brush, scene, { time: [0, 10, 20, 50], mean: [1, 2, null, 3] }, (value) => 10 * value, 0, "", "", 1);
  expect(path.slice(path.indexOf("fill") + 1)).toEqual([
    "move 200 10", "line 200 10", "line 210 10", "line 210 20", "line 220 20", "move 250 30", "line 250 30", "line 260 30", "stroke",
  ]);
});
