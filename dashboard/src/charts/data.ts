/** From the steps of runs to the lines of a chart. */

import { useMemo } from "react";
import { useSelected } from "../state/cursor";
import { useRuns } from "../state/run";
import { trainedTokens, trainingSeconds, useStepsOf } from "../state/steps";
import { NUM_COLORS, runColor } from "../state/theme";
import { place, setParams, useOthers, usePlace, useRange } from "../state/url";
import type { Distribution, RunInfo, StepColumns, Value } from "../types";
import type { Band, ChartProps, Line } from "./Chart";
import type { Heat } from "./heat";
import { nearest, smooth, stdBand } from "./math";
import type { Statistic } from "./sources";
import { visible } from "../text/hostile";

export type XAxis = "step" | "time" | "tokens";
/** How the samples of a step spread around the line: as bands, or as a heat map. */
export const BANDS = ["none", "std", "percentiles", "range", "heat"] as const;
export type BandKind = (typeof BANDS)[number];

/** A run as charts draw it. */
export interface DrawnRun {
  id: string;
  name: string;
  color: string;
  /** Dashes, where there are more runs than colors. */
  dash?: number[];
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

const DASHES: (number[] | undefined)[] = [undefined, [6, 3], [2, 3]];

function drawnRun(id: string, name: string, order: number, steps: StepColumns, axis: XAxis): DrawnRun {
  return { id, name: visible(name), color: runColor(order), dash: DASHES[Math.floor(order / NUM_COLORS) % DASHES.length], steps, x: placesOf(steps, axis) };
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

/** Ties charts over the steps of a run to the address: its range is their zoom, and its step is marked on them. */
export function useStepAxis(run: DrawnRun | undefined, axis: XAxis): Pick<ChartProps, "zoom" | "onZoom" | "onPick"> {
  const [range, setRange] = useRange();
  const chosen = usePlace().params.step;
  const steps = run?.steps.step ?? [];
  const xOf = (step: number): number | null => (axis === "step" ? step : (run?.x[nearest(steps, step)] ?? null));
  const stepOf = (x: number): number => (axis === "step" ? Math.max(0, Math.round(x)) : (steps[nearest(run?.x ?? [], x)] ?? 0));
  useSelected(axis, chosen !== undefined && /^\d+$/.test(chosen) ? xOf(Number(chosen)) : null);
  const [from, to] = range ? [xOf(range.from), xOf(range.to)] : [null, null];
  const zoom = useMemo(() => (from === null || to === null ? null : { from, to }), [from, to]);
  return {
    zoom,
    onZoom: (next) => setRange(next && { from: stepOf(next.from), to: stepOf(next.to) }),
    onPick: (x) => {
      const step = String(stepOf(x));
      setParams({ step: place().params.step === step ? null : step });
    },
  };
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

/** Returns a column of a distribution on the run's steps. */
function onSteps(run: DrawnRun, distribution: Distribution): (values: Value[]) => Value[] {
  const rows = new Map(distribution.step.map((step, row) => [step, row]));
  return (values) => run.steps.step.map((step) => values[rows.get(step) ?? -1] ?? null);
}

/** Returns the bands of a distribution on the run's steps; smoothed as its line is. */
export function bandsOf(run: DrawnRun, distribution: Distribution | undefined, kind: BandKind, keep: number): Band[] {
  if (!distribution || kind === "none" || kind === "heat") return [];
  if (kind !== "range" && isTwoValued(distribution)) return [];
  const column = onSteps(run, distribution);
  const at = (values: Value[]) => smooth(column(values), keep);
  if (kind === "range") return [{ low: at(distribution.min), high: at(distribution.max), opacity: 0.14 }];
  if (kind === "std") {
    const band = stdBand(distribution.mean, distribution.std, distribution.min, distribution.max);
    return [{ low: at(band.low), high: at(band.high), opacity: 0.16 }];
  }
  return [
    { low: at(distribution.p5), high: at(distribution.p95), opacity: 0.1 },
    { low: at(distribution.p25), high: at(distribution.p75), opacity: 0.17 },
  ];
}

/** Returns the histograms of a distribution at the run's places on the axis; null without any. */
export function heatOf(run: DrawnRun, distribution: Distribution | undefined): Heat | null {
  if (!distribution?.histogram.some((counts) => counts !== null)) return null;
  const place = new Map(run.steps.step.map((step, row) => [step, run.x[row]!]));
  const rows = distribution.step.map((_, row) => row).filter((row) => place.has(distribution.step[row]!));
  // The bins of equal values are widened around them; those of others begin and end with the values.
  const same = (row: number) => distribution.min[row] === distribution.max[row];
  return {
    x: rows.map((row) => place.get(distribution.step[row]!)!),
    low: rows.map((row) => (same(row) ? distribution.min : distribution.low)[row]!),
    high: rows.map((row) => (same(row) ? distribution.max : distribution.high)[row]!),
    counts: rows.map((row) => distribution.histogram[row]!),
  };
}

/** Returns a statistic of a distribution as a column over the run's steps. */
export const statisticColumn = (run: DrawnRun, distribution: Distribution | undefined, statistic: Statistic): Value[] | undefined =>
  distribution && onSteps(run, distribution)(distribution[statistic]);

/**
 * Returns one line a run; runs without values have none. `valuesOf` gets a run and its order. A `sparse` metric is one that many
 * steps do not have, such as those of an environment: its line goes on to the next value, where others have a gap.
 */
export function drawnLines(runs: DrawnRun[], valuesOf: (run: DrawnRun, order: number) => Value[] | undefined, keep: number, bands: Band[] = [], sparse = false): Line[] {
  return runs.flatMap((run, order) => {
    const values = valuesOf(run, order);
    if (!values?.some((value) => value !== null)) return [];
    const line: Line = { label: run.name, color: run.color, dash: run.dash, x: run.x, values: smooth(values, keep), width: order === 0 ? 2 : 1.5 };
    if (keep > 0) line.raw = values;
    if (order === 0 && bands.length > 0) line.bands = bands;
    return [sparse ? withoutGaps(line, values) : line];
  });
}

/** Returns a line with its measured places only. */
function withoutGaps(line: Line, values: Value[]): Line {
  const rows = values.map((_, row) => row).filter((row) => values[row] !== null);
  const pick = <T>(column: T[]): T[] => rows.map((row) => column[row]!);
  return {
    ...line,
    x: pick(line.x!),
    values: pick(line.values),
    ...(line.raw ? { raw: pick(line.raw) } : {}),
    ...(line.bands ? { bands: line.bands.map((band) => ({ ...band, low: pick(band.low), high: pick(band.high) })) } : {}),
  };
}

/** Returns one line a run for a step metric. */
export const linesOf = (runs: DrawnRun[], metric: string, keep: number): Line[] => drawnLines(runs, (run) => run.steps.metrics[metric], keep);

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
