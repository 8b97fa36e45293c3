/** From the steps of runs to the lines of a chart. */

import { useMemo } from "react";
import { useRuns } from "../state/run";
import { trainedTokens, trainingSeconds, useStepsOf } from "../state/steps";
import { NUM_COLORS, runColor } from "../state/theme";
import { useOthers } from "../state/url";
import type { Distribution, RunInfo, StepColumns, Value } from "../types";
import type { Band, Line } from "./Chart";
import { smooth, stdBand } from "./math";

export type XAxis = "step" | "time" | "tokens";
export type BandKind = "none" | "std" | "percentiles";

/** A run as charts draw it. */
export interface DrawnRun {
  id: string;
  name: string;
  color: string;
  steps: StepColumns;
  x: number[];
}

/** Returns the place of each step on an axis: its number, seconds of training, or trained tokens. */
function placesOf(steps: StepColumns, axis: XAxis): number[] {
  if (axis === "step") return steps.step;
  const places = axis === "time" ? trainingSeconds(steps) : trainedTokens(steps);
  let last = 0;
  return places.map((place) => (last = place ?? last));
}

function drawnRun(id: string, name: string, order: number, steps: StepColumns, axis: XAxis): DrawnRun {
  return { id, name, color: runColor(order), steps, x: placesOf(steps, axis) };
}

/** Returns the run of the page and, as far as they are read, those drawn over it. */
export function useDrawnRuns(info: RunInfo | undefined, steps: StepColumns | null, axis: XAxis): DrawnRun[] {
  const others = useOthers();
  const otherSteps = useStepsOf(others);
  const listed = useRuns().data?.runs;
  return useMemo(() => {
    if (!steps || !info) return [];
    const rest = others.flatMap((id, i) => {
      const theirs = otherSteps[i];
      return theirs ? [drawnRun(id, listed?.find((row) => row.id === id)?.name ?? id, i + 1, theirs, axis)] : [];
    });
    return [drawnRun(info.info.id, info.info.name, 0, steps, axis), ...rest];
    // otherSteps is a new array on every call; its parts are not.
  }, [info, steps, axis, listed, others.join(), ...otherSteps]);
}

/** Returns whether nearly all values lie at the ends (right or wrong): percentiles and deviations then add nothing to the mean. */
export function isTwoValued(distribution: Distribution): boolean {
  const low = Math.min(...distribution.min.map((value) => value ?? Infinity));
  const high = Math.max(...distribution.max.map((value) => value ?? -Infinity));
  const known = distribution.step.map((_, row) => row).filter((row) => distribution.p25[row] !== null);
  const atEnds = (value: Value | undefined) => value === low || value === high;
  const extreme = known.filter((row) => atEnds(distribution.p25[row]) && atEnds(distribution.p50[row]) && atEnds(distribution.p75[row]));
  return known.length > 0 && extreme.length >= 0.8 * known.length;
}

/** Returns the bands of a distribution on the run's steps; smoothed as its line is. */
export function bandsOf(run: DrawnRun, distribution: Distribution | undefined, kind: BandKind, keep: number): Band[] {
  if (!distribution || kind === "none" || isTwoValued(distribution)) return [];
  const rows = new Map(distribution.step.map((step, row) => [step, row]));
  const at = (values: Value[]) => smooth(run.steps.step.map((step) => values[rows.get(step) ?? -1] ?? null), keep);
  if (kind === "std") {
    const band = stdBand(distribution.mean, distribution.std, distribution.min, distribution.max);
    return [{ low: at(band.low), high: at(band.high), opacity: 0.16 }];
  }
  return [
    { low: at(distribution.p5), high: at(distribution.p95), opacity: 0.1 },
    { low: at(distribution.p25), high: at(distribution.p75), opacity: 0.17 },
  ];
}

/** Returns one line a run for a metric; runs without it have none. */
export function linesOf(runs: DrawnRun[], metric: string, keep: number, bands: Band[] = []): Line[] {
  return runs.flatMap((run, order) => {
    const values = run.steps.metrics[metric];
    if (!values?.some((value) => value !== null)) return [];
    const line: Line = { label: run.name, color: run.color, x: run.x, values: smooth(values, keep), width: order === 0 ? 2 : 1.5 };
    if (order >= NUM_COLORS) line.dash = [5, 3];
    if (keep > 0) line.raw = values;
    if (order === 0 && bands.length > 0) line.bands = bands;
    return [line];
  });
}

/** Returns the name under which the distribution of a step metric is kept, and its environment; null if it has none. */
export function distributionOf(metric: string): { metric: string; environment: string } | null {
  const known: Record<string, string> = {
    "reward/total/mean": "reward",
    "advantage/all/mean": "advantage",
    "staleness/steps/mean": "age",
    "rollouts/turns/mean": "num_turns",
    "rollouts/tokens_prompt/mean": "prompt_tokens",
    "rollouts/tokens_completion/mean": "completion_tokens",
    "rollouts/tokens_environment/mean": "environment_tokens",
    "rollouts/tokens_total/mean": "total_tokens",
  };
  const direct = known[metric];
  if (direct) return { metric: direct, environment: "" };
  const sample = /^sample_metrics\/([^/]+)\/(.+)$/.exec(metric);
  if (sample) return { metric: `sample_metrics/${sample[2]}`, environment: sample[1]! };
  const reward = /^reward\/([^/]+)\/mean$/.exec(metric);
  if (reward && !["all_groups", "overlong_penalty"].includes(reward[1]!)) return { metric: "reward", environment: reward[1]! };
  return null;
}

/** Returns seconds as `m:ss` or `h:mm` for an axis. */
export function clock(seconds: number): string {
  const whole = Math.round(seconds);
  const two = (value: number) => String(value).padStart(2, "0");
  if (whole >= 3600) return `${Math.floor(whole / 3600)}:${two(Math.floor((whole % 3600) / 60))} h`;
  return `${Math.floor(whole / 60)}:${two(whole % 60)}`;
}

/** Returns where the step axis of a live run ends: at its planned end, but at least half of the axis has data. */
export function axisEnd(done: number, planned: number | null): number {
  return Math.max(done - 1, Math.min(planned ?? 0, 2 * done) - 1, 0);
}
