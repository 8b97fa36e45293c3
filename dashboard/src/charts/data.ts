/** From columns of runs to the lines of a chart, with their bands. */

import { extent } from "d3-array";
import type { Distribution, Value } from "../types";
import type { Band, Line } from "./props";
import type { Heat } from "./heat";
import { rollingMedian, smooth, stdBand, windowOf } from "./math";
import { type Column, columnBy, type DrawnRun, leafColumn } from "./runs";
import { type DeclaredRange, isSparse, type Statistic } from "./sources";

/** How the samples of a step spread around the line: as bands, or as a heat map. */
const BANDS = ["none", "std", "percentiles", "range", "heat"] as const;
export type BandKind = (typeof BANDS)[number];

/** Share of the largest possible variance from which on values lie nearly all at the ends. */
const AT_ENDS = 0.8;

/**
 * Returns whether nearly all values lie at the ends (right or wrong): percentiles and deviations then add nothing to the mean.
 * Values between two ends have the variance (mean - low)(high - mean) at most, and only two values reach it.
 */
export function isTwoValued({ step, mean, std, min, max }: Distribution): boolean {
  const [low = 0] = extent(min, (value) => value);
  const [, high = 0] = extent(max, (value) => value);
  let [variance, most] = [0, 0];
  step.forEach((_, row) => {
    if (mean[row] == null || std[row] == null) return;
    variance += std[row]! ** 2;
    most += (mean[row]! - low) * (high - mean[row]!);
  });
  return high > low && variance >= AT_ENDS * most;
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
  // Percentiles of few samples jump: an average of jumps would be saw teeth.
  const at = (values: Value[]) => smooth(keep > 0 ? rollingMedian(column(values), windowOf(keep)) : column(values), keep);
  const band = (names: [string, string], low: Value[], high: Value[], opacity: number): Band => ({ low: at(low), high: at(high), opacity, measured: { names, low: column(low), high: column(high) } });
  const { mean, std, min, max, p5, p25, p75, p95 } = distribution;
  if (kind === "range") return [band(["min", "max"], min, max, 0.14)];
  if (kind === "std") {
    const { low, high } = stdBand(mean, std, min, max);
    return [band(["mean - std", "mean + std"], low, high, 0.16)];
  }
  return [band(["p5", "p95"], p5, p95, 0.1), band(["p25", "p75"], p25, p75, 0.17)];
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
export const statisticColumn = (run: DrawnRun, distribution: Distribution | undefined, statistic: Statistic): Column | undefined =>
  distribution && { at: run.steps.step, x: run.x, values: onSteps(run, distribution)(distribution[statistic]) };

/**
 * Returns one line a run; runs without values have none. A group is the mean of its smoothed runs with its interval. A `sparse` metric is one that many
 * steps do not have, such as those of an environment: its line goes on to the next value, where others have a gap.
 */
export function drawnLines(runs: DrawnRun[], of: (run: DrawnRun) => Column | undefined, keep: number, bands: Band[] = [], sparse = false): Line[] {
  return runs.flatMap((run, order) => {
    const column = columnBy(run, of);
    if (!column?.values.some((value) => value !== null)) return [];
    const drawn = columnBy(run, (leaf) => {
      const own = of(leaf);
      const values = own && smooth(own.values, keep);
      // A mean of the runs that happen to have a value would jump.
      return own && { ...own, values: run.members && sparse ? carried(values!) : values! };
    })!;
    const { x, values, low, high } = drawn;
    const line: Line = { label: run.name, color: run.color, dash: run.dash, x, values, width: order === 0 ? 2 : 1.5, last: lastOf(column, run.until), baseline: run.baseline };
    if (keep > 0) line.raw = column.values;
    if (low && high) line.bands = [{ low, high, opacity: 0.16, measured: { names: ["95 % low", "95 % high"], low: column.low!, high: column.high! } }];
    else if (order === 0 && bands.length > 0) line.bands = bands;
    return [sparse ? withoutGaps(line, column.values) : line];
  });
}

/** Returns the value at the last step that has one, up to a step. */
function lastOf({ at, values }: Column, until = Infinity): Value {
  let last = -1;
  at.forEach((step, row) => {
    if (values[row] != null && step <= until && (last < 0 || step >= at[last]!)) last = row;
  });
  return values[last] ?? null;
}

/** Returns values with gaps filled by the last one before them. */
function carried(values: Value[]): Value[] {
  let last: Value = null;
  return values.map((value) => (last = value ?? last));
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
    ...(line.bands ? { bands: line.bands.map((band) => ({ ...band, low: pick(band.low), high: pick(band.high), measured: band.measured && { ...band.measured, low: pick(band.measured.low), high: pick(band.measured.high) } })) } : {}),
  };
}

/** Whether a metric is the result of an eval: it has a value at few steps, and is not smoothed. */
export const isEval = (metric: string): boolean => metric.startsWith("eval/");

/** Returns one line a run for a metric. */
export function linesOf(runs: DrawnRun[], metric: string, keep: number, bands: Band[] = []): Line[] {
  if (!isEval(metric)) return drawnLines(runs, (run) => leafColumn(run, metric), keep, bands, isSparse(metric));
  // An eval is at the number of finished steps.
  const finished = runs.map((run) => (run.until === undefined ? run : { ...run, until: run.until + 1 }));
  return drawnLines(finished, (run) => leafColumn(run, metric), 0, bands).map((line) => ({ ...line, dots: true, whiskers: line.bands?.[0] }));
}

/** Returns a declared range as far as the values keep to it; an end that they cross is free. */
export function reached({ low, high }: DeclaredRange, lines: Line[]): DeclaredRange {
  const within = (inside: (value: number) => boolean) =>
    lines.every((line) => [line.raw ?? line.values, ...(line.bands ?? []).flatMap((one) => [one.low, one.high])].every((values: Value[]) => values.every((value) => value === null || inside(value))));
  return {
    ...(low !== undefined && within((value) => value >= low) ? { low } : {}),
    ...(high !== undefined && within((value) => value <= high) ? { high } : {}),
  };
}

/** Returns seconds as `m:ss` or `h:mm` for an axis, as `h:mm:ss` if its ticks are less than a minute apart. */
export function clock(seconds: number, step = 60): string {
  const whole = Math.round(seconds);
  const two = (value: number) => String(value).padStart(2, "0");
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60), two(whole % 60)];
  return hours > 0 ? `${hours}:${two(minutes % 60)}${step < 60 ? `:${rest}` : ""} h` : `${minutes}:${rest}`;
}

/** Returns where the step axis of a live run ends: at its planned end, but at least half of the axis has data. */
export function axisEnd(done: number, planned: number | null): number {
  return Math.max(done - 1, Math.min(planned ?? 0, 2 * done) - 1, 0);
}
