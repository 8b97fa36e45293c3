/** Checkpoints on the ruler of steps. */

import type { StepColumns } from "../types";

/** Training stood still to copy a checkpoint: a metric of the step after it. */
const COPY = "timing_checkpoint";

interface CheckpointMark {
  /** Finished steps. */
  step: number;
  /** Whether its files are in the run directory. */
  kept: boolean;
}

/** Returns the checkpoints that were written, or are there, in the order of their steps. */
export function checkpointMarks(steps: StepColumns | null, kept: number[]): CheckpointMark[] {
  const written = (steps?.metrics[COPY] ?? []).flatMap((seconds, row) => (seconds !== null && seconds > 0 ? [steps!.step[row]!] : []));
  return [...new Set([...written, ...kept])].sort((a, b) => a - b).map((step) => ({ step, kept: kept.includes(step) }));
}
