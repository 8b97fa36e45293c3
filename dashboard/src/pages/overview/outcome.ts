/** Finds the outcome of a run: its evals from first to newest, its best checkpoint, and the commands that use it. */

import { greatest } from "d3-array";
import { resultFormat } from "../../format";
import { checkpointMarks } from "../../state/steps";
import { curveOf } from "../../state/run";
import type { EvalRow, StepColumns } from "../../types";
import { recordedGain } from "../evals/items";

export interface EvalCurve {
  name: string;
  rows: EvalRow[];
}

/** Returns the finished results of each eval of the config, in its order. */
export function curvesOf(evals: EvalRow[]): EvalCurve[] {
  return [...new Set(evals.map((row) => row.name))]
    .map((name) => ({ name, rows: curveOf(evals.filter((row) => row.name === name)) }))
    .filter((curve) => curve.rows.length > 0)
    .sort((a, b) => (a.rows[0]!.number ?? 0) - (b.rows[0]!.number ?? 0));
}

/** Returns the gain of an eval since its first result, with its interval if that is known. */
export function gainText(first: EvalRow, newest: EvalRow): string {
  if (first === newest || newest.gain === null) return "";
  const { bare, change, points } = resultFormat(newest.metric);
  const known = recordedGain(first, newest, first);
  const range = known && (known.low === known.high ? " on every item" : ` (${bare(known.low)} to ${bare(known.high)})`);
  return `, gain ${change(newest.gain)}${points}${range ?? ""}`;
}

export interface Best {
  /** Finished steps. */
  step: number;
  kept: boolean;
  /** Its result in the first eval; null if it was not measured. */
  accuracy: number | null;
}

/**
 * Returns the checkpoint with the best result of an eval, or the newest without any result. Checkpoints whose files exist
 * come first, then the final `model` (null).
 */
export function bestCheckpoint(steps: StepColumns | null, kept: number[], curve: EvalCurve | undefined, model: string | null = null, written?: number[] | null): Best | null {
  const accuracies = new Map(curve?.rows.map((row) => [row.version, row.accuracy]));
  const all = checkpointMarks(steps, kept, written).map((mark) => ({ ...mark, accuracy: accuracies.get(mark.step) ?? null }));
  const here = all.filter((one) => one.kept);
  if (here.length === 0 && model !== null) return null;
  const order = (one: Best) => one.accuracy ?? -Infinity;
  return greatest((here.length ? here : all).toReversed(), order) ?? null;
}

export interface Command {
  does: "chat" | "resume" | "eval";
  text: string;
}

/** Returns shell commands that use a checkpoint, or the final `model` if no checkpoint is kept. The `newest` is resumed without naming its step. */
export function commandsOf(path: string, best: Best | null, newest: number | undefined, model: string | null, live: boolean): Command[] {
  if (!best?.kept) return model === null ? [] : [{ does: "chat", text: `telescope chat ${model}` }, { does: "eval", text: `telescope eval ${model}` }];
  const resume: Command = { does: "resume", text: `telescope train --resume ${path}${best.step === newest ? "" : ` --resume_from_checkpoint ${best.step}`}` };
  return [{ does: "chat", text: `telescope chat ${path} --step ${best.step}` }, ...(live ? [] : [resume]), { does: "eval", text: `telescope eval ${path} --step ${best.step}` }];
}

/** Explains why a run has no checkpoint. `every` is its `checkpoint_every`: 0 if off, NaN if it is not recorded. */
export function whyNone(every: number, live: boolean): string {
  if (every > 0) return live ? `One is written every ${every === 1 ? "step" : `${every} steps`}.` : "None is in the run directory.";
  return every === 0 ? (live ? "Set checkpoint_every to keep some." : "checkpoint_every was not set.") : "There is none here.";
}
