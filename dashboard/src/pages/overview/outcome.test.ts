import { expect, test } from "vitest";
import type { Costs, EvalRow, StepColumns } from "../../types";
import { barsOf, priceOf } from "./costs";
import { bestCheckpoint, commandsOf, curvesOf, gainText, whyNone } from "./outcome";

const row = (name: string, number: number, version: number, accuracy: number | null, source = "live") =>
  ({ name, number, version, step: version - 1, accuracy, source, status: accuracy === null ? "failed" : "finished" }) as EvalRow;
const steps = { step: [], metrics: { timing_checkpoint: [] } } as unknown as StepColumns;

test("evals come in the order of the config, each from its first to its newest result", () => {
  const curves = curvesOf([row("b", 1, 10, 0.5), row("a", 0, 10, 0.2), row("b", 1, 0, 0.1), row("c", 2, 0, null)]);
  expect(curves.map(({ name, rows }) => [name, rows.map((one) => one.accuracy)])).toEqual([["a", [0.2]], ["b", [0.1, 0.5]]]);
});

test("the best checkpoint is the one with the best result, and the later of equal ones", () => {
  const [curve] = curvesOf([row("a", 0, 20, 0.6), row("a", 0, 40, 0.6), row("a", 0, 60, 0.5), row("a", 0, 50, 0.9)]);
  expect(bestCheckpoint(steps, [20, 40, 60], curve)).toEqual({ step: 40, kept: true, accuracy: 0.6 });
  expect(bestCheckpoint(steps, [20, 60], undefined)).toEqual({ step: 60, kept: true, accuracy: null });
  expect(bestCheckpoint(steps, [], curve)).toBe(null);
  const removed = { step: [40], metrics: { timing_checkpoint: [1] } } as unknown as StepColumns;
  expect(bestCheckpoint(removed, [], curve, null)).toEqual({ step: 40, kept: false, accuracy: 0.6 });
  expect(bestCheckpoint(removed, [], curve, "runs/a/model")).toBe(null);
  expect(bestCheckpoint(removed, [], undefined, null, [40, 60])).toEqual({ step: 60, kept: false, accuracy: null });
});

test("a gain has its interval if that is known, and is on every item if the interval is a point", () => {
  const gain = (low: number | null, high: number | null) => gainText(row("a", 0, 0, 0.2), { ...row("a", 0, 5, 0.3), gain: 0.1, gain_low: low, gain_high: high });
  expect([gain(0.05, 0.15), gain(0.1, 0.1), gain(null, null)]).toEqual([
    ", gain +10.0 points (5.0 to 15.0)",
    ", gain +10.0 points on every item",
    ", gain +10.0 points",
  ]);
});

test("commands name the checkpoint, and a resume of an older one its step", () => {
  const best = { step: 40, kept: true, accuracy: 0.6 };
  expect(commandsOf("runs/a", best, 60, null, false).map(({ text }) => text)).toEqual([
    "telescope chat runs/a --step 40",
    "telescope train --resume runs/a --resume_from_checkpoint 40",
    "telescope eval runs/a --step 40",
  ]);
  expect(commandsOf("runs/a", best, 40, null, false)[1]!.text).toBe("telescope train --resume runs/a");
  expect(commandsOf("runs/a", best, 40, null, true).map(({ does }) => does)).toEqual(["chat", "eval"]);
  expect(commandsOf("runs/a", null, undefined, "runs/a/model", false)[0]!.text).toBe("telescope chat runs/a/model");
  expect(commandsOf("runs/a", { ...best, kept: false }, undefined, null, false)).toEqual([]);
});

test("a run without a checkpoint says why, by checkpoint_every", () => {
  expect(whyNone(10, true)).toBe("One is written every 10 steps.");
  expect(whyNone(1, true)).toBe("One is written every step.");
  expect(whyNone(10, false)).toBe("None is in the run directory.");
  expect([Number(false), 0].map((every) => whyNone(every, false))).toEqual(["checkpoint_every was not set.", "checkpoint_every was not set."]);
  expect(whyNone(0, true)).toBe("Set checkpoint_every to keep some.");
  expect(whyNone(Number(undefined), false)).toBe("There is none here.");
});

test("the bars hold every part once, in hours, also one that this version does not know", () => {
  const costs: Costs = { unit: "GPU", tokens: { kept: 10, new: 5 }, engines: { kept: 3600, idle: 1800 }, trainer: {} };
  const bars = barsOf(costs);
  expect(bars.map(({ title, total }) => [title, total])).toEqual([["Generated", 15], ["Engines", 1.5]]);
  expect(bars[0]!.parts.map(({ name, value }) => [name, value])).toEqual([["kept", 10], ["new", 5]]);
});

test("a price is a positive number", () => {
  expect(["2.5", "2,5", " 3 ", "", "-1", "free"].map(priceOf)).toEqual([2.5, 2.5, 3, null, null, null]);
});
