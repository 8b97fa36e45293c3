import { expect, test } from "vitest";
import type { StepColumns } from "../types";
import { checkpointMarks } from "./marks";

const steps = { step: [8, 9, 10, 11], metrics: { timing_checkpoint: [0.2, null, 0.3, 0] } } as unknown as StepColumns;

test("a checkpoint was written before the step that waited for its copy", () => {
  expect(checkpointMarks(steps, [10, 14])).toEqual([
    { step: 8, kept: false },
    { step: 10, kept: true },
    { step: 14, kept: true },
  ]);
});

test("a run without checkpoints has no marks", () => {
  expect(checkpointMarks(null, [])).toEqual([]);
});
