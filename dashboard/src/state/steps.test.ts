import { expect, test } from "vitest";
import type { StepColumns } from "../types";
import { checkpointMarks, column, mergeSteps, NO_STEPS, timesOf, trainedTokens, trainingSeconds } from "./steps";

function rows(attempt: number, steps: number[], metrics: Record<string, number[]>, next: number): StepColumns {
  return {
    next,
    attempt: steps.map(() => attempt),
    step: steps,
    started_at: steps.map((step) => 100 * attempt + step),
    ended_at: steps.map((step) => 100 * attempt + step + 1),
    num_tokens_trained: steps.map(() => 10),
    metrics,
  };
}

test("new steps go behind the old ones", () => {
  const merged = mergeSteps(rows(1, [0, 1], { a: [1, 2] }, 2), rows(1, [2], { a: [3] }, 3));
  expect(merged.step).toEqual([0, 1, 2]);
  expect(merged.metrics.a).toEqual([1, 2, 3]);
  expect(merged.next).toBe(3);
});

test("a metric that comes later has gaps before, one that stops has gaps after", () => {
  const merged = mergeSteps(rows(1, [0], { a: [1] }, 1), rows(1, [1], { b: [2] }, 2));
  expect(merged.metrics).toEqual({ a: [1, null], b: [null, 2] });
});

test("steps that a resumed run trains again replace the old ones", () => {
  const merged = mergeSteps(rows(1, [0, 1, 2, 3], { a: [1, 2, 3, 4] }, 4), rows(2, [2], { a: [30] }, 5));
  expect(merged.step).toEqual([0, 1, 2]);
  expect(merged.metrics.a).toEqual([1, 2, 30]);
});

test("rows that come twice are there once", () => {
  const merged = mergeSteps(rows(1, [0, 1], { a: [1, 2] }, 2), rows(1, [1, 2], { a: [2, 3] }, 3));
  expect(merged.step).toEqual([0, 1, 2]);
  expect(merged.metrics.a).toEqual([1, 2, 3]);
});

test("nothing new changes nothing", () => {
  const old = rows(1, [0], { a: [1] }, 1);
  expect(mergeSteps(old, { ...NO_STEPS, next: 1 })).toBe(old);
});

test("training time leaves out the pause before a resume", () => {
  const merged = mergeSteps(rows(1, [0, 1], {}, 2), rows(2, [2, 3], {}, 4));
  expect(trainingSeconds(merged)).toEqual([1, 2, 3, 4]);
  expect(trainedTokens(merged)).toEqual([10, 20, 30, 40]);
});

test("a metric that the run does not have is all gaps", () => {
  expect(column(rows(1, [0, 1], {}, 2), "none")).toEqual([null, null]);
});

const copied = { step: [8, 9, 10, 11], metrics: { timing_checkpoint: [0.2, null, 0.3, 0] } } as unknown as StepColumns;

test("a checkpoint was written before the step that waited for its copy", () => {
  expect(checkpointMarks(copied, [10, 14])).toEqual([
    { step: 8, kept: false },
    { step: 10, kept: true },
    { step: 14, kept: true },
  ]);
});

test("the record of an ended run has its last checkpoint, and not one that failed", () => {
  expect(checkpointMarks(copied, [], [8, 12]).map(({ step }) => step)).toEqual([8, 12]);
});

test("a run without checkpoints has no marks", () => {
  expect(checkpointMarks(null, [])).toEqual([]);
});

test("a range of steps has the times of its first and last step", () => {
  const steps = rows(1, [0, 1, 2, 3], {}, 4);
  expect(timesOf(steps, { from: 1, to: 2 })).toEqual({ start: 101, end: 103 });
  expect(timesOf(steps, null)).toEqual({ start: null, end: null });
});
