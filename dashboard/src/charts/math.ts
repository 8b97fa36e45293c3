/** What charts compute: ticks, smoothing, ranges, stacks. No drawing here. */

import { bisectCenter, bisectLeft, deviation, mean, quantileSorted, range, ticks as roundTicks } from "d3-array";
import type { Value } from "../types";

/** Returns round numbers between two ends, about `wanted` of them. */
export function ticks(low: number, high: number, wanted: number): number[] {
  // Ends that differ by rounding alone have no ticks between them.
  const apart = high - low > 1e-12 * wanted * Math.max(Math.abs(low), Math.abs(high));
  return Number.isFinite(high - low) && apart ? roundTicks(low, high, wanted) : [low];
}

const CLOCK_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400];

/** Returns seconds that a clock would mark, about `wanted` of them. */
export function clockTicks(low: number, high: number, wanted: number): number[] {
  const step = CLOCK_STEPS.find((size) => (high - low) / size <= 1.4 * wanted);
  if (step === undefined) return ticks(low / 86400, high / 86400, wanted).map((days) => days * 86400);
  return range(Math.ceil(low / step) * step, high + 1e-9, step);
}

/** Returns powers of ten between two positive ends; round numbers between them when there are fewer than two. */
export function logTicks(low: number, high: number): number[] {
  const out: number[] = [];
  for (let power = Math.ceil(Math.log10(low)); power <= Math.log10(high) + 1e-9; power += 1) out.push(10 ** power);
  if (out.length < 2) return ticks(low, high, 3).filter((value) => value > 0);
  const every = Math.ceil(out.length / 5);
  return out.filter((_, i) => i % every === 0);
}

/** Returns whole ticks for steps. */
export const stepTicks = (low: number, high: number, wanted: number): number[] =>
  ticks(low, high, wanted).filter((value) => Number.isInteger(value));

/**
 * Returns the exponential moving average with weight `keep` for the past, corrected for its start, so that the first value is
 * the first measured one. Gaps stay gaps.
 */
export function smooth(values: Value[], keep: number): Value[] {
  if (keep <= 0) return values;
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * keep + value * (1 - keep);
    weight = weight * keep + (1 - keep);
    return sum / weight;
  });
}

/** Returns the steps over which a moving average with this weight of the past looks back, about; odd. */
export const windowOf = (keep: number): number => 2 * Math.round(1 / (1 - keep)) + 1;

/** Returns the median of the known values in a window around each; gaps stay gaps. */
export function rollingMedian(values: Value[], window: number): Value[] {
  const half = Math.floor(window / 2);
  const sorted: number[] = [];
  const add = (value: Value | undefined) => {
    if (value != null) sorted.splice(bisectLeft(sorted, value), 0, value);
  };
  const remove = (value: Value | undefined) => {
    if (value != null) sorted.splice(bisectLeft(sorted, value), 1);
  };
  values.slice(0, half).forEach(add);
  return values.map((value, i) => {
    add(values[i + half]);
    remove(values[i - half - 1]);
    return value === null ? null : quantileSorted(sorted, 0.5)!;
  });
}

const KEEP = 0.6;

/** Returns the smoothing of a line that was not chosen: up to 100 steps a little, then so that it bends as often. */
export const smoothingFor = (steps: number): number => Math.min(0.98, 1 - (1 - KEEP) * Math.min(1, 100 / Math.max(1, steps)));

interface RangeOptions {
  low?: number;
  high?: number;
  log?: boolean;
  /** Leaves the outermost 2 % on each side out of the range. */
  withoutOutliers?: boolean;
}

/** Returns the ends of the y axis for lines; [0, 1] without a value. */
export function valueRange(lines: Value[][], options: RangeOptions = {}): [number, number] {
  const above = options.log ? 0 : -Infinity;
  const all: number[] = [];
  for (const line of lines) for (const value of line) if (value !== null && value > above && value < Infinity) all.push(value);
  // All values may lie beyond the one end that was chosen.
  const rising = (from: number, to: number): [number, number] => (from < to ? [from, to] : options.low === undefined ? [to - 1, to] : [from, from + 1]);
  if (all.length === 0) return options.log ? [0.1, 1] : rising(options.low ?? 0, options.high ?? 1);
  const cut = options.withoutOutliers && all.length >= 20;
  const sorted = cut ? [...Float64Array.from(all).sort()] : null;
  const first = sorted ? quantileSorted(sorted, 0.02)! : all.reduce((least, value) => Math.min(least, value));
  const last = sorted ? quantileSorted(sorted, 0.98)! : all.reduce((most, value) => Math.max(most, value));
  let [low, high] = [options.low ?? first, options.high ?? last];
  if (options.log) {
    // Zero has no place on a log scale.
    if (low <= 0) low = first;
    if (high <= low) high = 10 * low;
    const span = Math.max(Math.log10(high / low), 0.2);
    return [low / 10 ** (0.06 * span), high * 10 ** (0.06 * span)];
  }
  if (last - first <= 1e-9 * Math.abs(last) && options.low === undefined && options.high === undefined) {
    return last === 0 ? [0, 1] : last > 0 ? [0, 1.5 * last] : [1.5 * last, 0];
  }
  const span = high - low || Math.abs(high) || 1;
  // An axis that nearly reaches zero starts there.
  if (options.low === undefined) low = first >= 0 && first < 0.4 * last ? 0 : first - 0.06 * span;
  if (options.high === undefined) high = last <= 0 && low < 0 && last > 0.4 * low ? 0 : last + 0.06 * span;
  return rising(low, high);
}

/**
 * Puts columns on one axis. Returns its places, each as often as the column that has it most often: several steps may lie at one
 * place of an axis of tokens or of a metric. `rows` has the row of each column at each place; undefined where it has none.
 */
export function joinPlaces(columns: number[][]): { x: number[]; rows: (number | undefined)[][] } {
  const most = new Map<number, number>();
  for (const column of new Set(columns)) {
    const times = new Map<number, number>();
    for (const place of column) times.set(place, (times.get(place) ?? 0) + 1);
    for (const [place, number] of times) most.set(place, Math.max(most.get(place) ?? 0, number));
  }
  const x = [...most].sort(([a], [b]) => a - b).flatMap(([place, number]) => new Array<number>(number).fill(place));
  const first = new Map(x.map((place, at) => [place, at] as const).reverse());
  const rowsOf = (column: number[]) => {
    const rows = new Array<number | undefined>(x.length).fill(undefined);
    const next = new Map(first);
    column.forEach((place, row) => {
      const at = next.get(place)!;
      rows[at] = row;
      next.set(place, at + 1);
    });
    return rows;
  };
  const known = new Map([...new Set(columns)].map((column) => [column, rowsOf(column)]));
  return { x, rows: columns.map((column) => known.get(column)!) };
}

/** Returns the sums of the lines up to and with each: the upper edges of a stack. */
export function stack(lines: Value[][]): Value[][] {
  const sums: Value[][] = [];
  lines.forEach((line, i) => {
    const below = sums[i - 1];
    sums.push(line.map((value, row) => (value === null && below?.[row] == null ? null : (below?.[row] ?? 0) + (value ?? 0))));
  });
  return sums;
}

/** Returns mean minus and plus the standard deviation, within the measured ends. */
export function stdBand(mean: Value[], std: Value[], min?: Value[], max?: Value[]): { low: Value[]; high: Value[] } {
  const edge = (sign: 1 | -1) =>
    mean.map((value, i) => {
      const spread = std[i];
      if (value === null || spread == null) return null;
      const out = value + sign * spread;
      const end = sign < 0 ? min?.[i] : max?.[i];
      return end == null ? out : sign < 0 ? Math.max(out, end) : Math.min(out, end);
    });
  return { low: edge(-1), high: edge(1) };
}

/** Returns the row whose x is nearest; -1 without rows. x rises. */
export const nearest = (xs: number[], x: number): number => (xs.length === 0 ? -1 : bisectCenter(xs, x));

/** Returns the value at the row nearest to a place on the axis; null before the first row and after the last. */
export const valueAt = (xs: number[], values: (Value | undefined)[], x: number): Value => (x < xs[0]! || x > xs.at(-1)! ? null : (values[nearest(xs, x)] ?? null));

/** Returns the last row with a value; -1 without one. */
export function lastRow(values: (Value | undefined)[]): number {
  for (let row = values.length - 1; row >= 0; row -= 1) if (values[row] != null) return row;
  return -1;
}

/** Returns the 95 % Wilson interval of a share of `n`. */
export function wilson(share: number, n: number): [number, number] {
  if (n === 0) return [0, 1];
  const z = 1.959964;
  const denominator = 1 + (z * z) / n;
  const center = (share + (z * z) / (2 * n)) / denominator;
  const half = (z * Math.sqrt((share * (1 - share)) / n + (z * z) / (4 * n * n))) / denominator;
  return [Math.max(0, center - half), Math.min(1, center + half)];
}

/** Returns pass@k of an item: the chance that one of k answers, drawn without repetition, of n with c right, is right. */
export function passAtK(n: number, c: number, k: number): number {
  if (n - c < k) return 1;
  let miss = 1;
  for (let i = 0; i < k; i += 1) miss *= (n - c - i) / (n - i);
  return 1 - miss;
}

export interface Mean {
  n: number;
  mean: number;
  /** Half of the 95 % interval (Student's t); null for one value. */
  half: number | null;
}

/** 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom. */
const T = [
  12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131,
  2.12, 2.11, 2.101, 2.093, 2.086, 2.08, 2.074, 2.069, 2.064, 2.06, 2.056, 2.052, 2.048, 2.045, 2.042,
];

/** Returns mean and interval of the values that were measured; null without any. */
export function meanOf(values: (number | null)[]): Mean | null {
  const known = values.filter((value): value is number => value !== null && Number.isFinite(value));
  const n = known.length;
  if (n === 0) return null;
  // Above 30 degrees of freedom, an expansion of the quantile around the normal one is right to three digits.
  const t = T[n - 2] ?? 1.96 + 2.4 / (n - 1);
  return { n, mean: mean(known)!, half: n === 1 ? null : (t * deviation(known)!) / Math.sqrt(n) };
}
