/** Histograms over steps as a grid of cells. No drawing here. */

import type { Value } from "../types";
import { nearest } from "./math";

/** The histogram of each place on the x axis: samples in equal bins from low to high, which are equal for a single value. */
export interface Heat {
  x: number[];
  low: Value[];
  high: Value[];
  counts: (number[] | null)[];
}

/**
 * Returns the share of the samples in each cell, column by column, each from the bottom up. The cells of a column add up to 1,
 * or to less where samples lie outside. `place` returns where a value lies between the bottom (0) and the top (1).
 */
export function heatGrid(heat: Heat, from: number, to: number, columns: number, rows: number, place: (value: number) => number): Float64Array {
  const grid = new Float64Array(columns * rows);
  const steps: number[][] = Array.from({ length: columns }, () => []);
  const scale = columns / (to - from);
  heat.x.forEach((x, step) => {
    const column = x === to ? columns - 1 : Math.floor((x - from) * scale);
    if (heat.counts[step] && column >= 0 && column < columns) steps[column]!.push(step);
  });
  for (let column = 0; column < columns; column += 1) {
    let shown = steps[column]!;
    if (shown.length === 0) {
      const step = coveringStep(heat.x, from + (column + 0.5) / scale);
      if (step < 0 || !heat.counts[step]) continue;
      shown = [step];
    }
    for (const step of shown) addStep(grid, column * rows, rows, heat, step, place, 1 / shown.length);
  }
  return grid;
}

/** Returns the step that reaches to a place: each reaches half way to its neighbors, the outer ones as far as inwards. */
function coveringStep(xs: number[], x: number): number {
  const at = nearest(xs, x);
  if (at < 0) return -1;
  const own = xs[at]!;
  const gap = x < own ? own - (xs[at - 1] ?? 2 * own - (xs[at + 1] ?? own + 1)) : (xs[at + 1] ?? 2 * own - (xs[at - 1] ?? own - 1)) - own;
  return Math.abs(x - own) <= gap / 2 ? at : -1;
}

function addStep(grid: Float64Array, offset: number, rows: number, heat: Heat, step: number, place: (value: number) => number, weight: number): void {
  const counts = heat.counts[step]!;
  const low = heat.low[step];
  const high = heat.high[step];
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (low == null || high == null || total === 0) return;
  if (low === high) {
    // A single value lies in one row, also at the very top.
    const at = place(low);
    if (at >= 0 && at <= 1) grid[offset + Math.min(rows - 1, Math.floor(at * rows))]! += weight;
    return;
  }
  counts.forEach((count, bin) => {
    if (count === 0) return;
    const bottom = place(low + ((high - low) * bin) / counts.length) * rows;
    const top = place(low + ((high - low) * (bin + 1)) / counts.length) * rows;
    if (!Number.isFinite(bottom) || !Number.isFinite(top)) return;
    for (let row = Math.max(0, Math.floor(bottom)); row < rows && row < top; row += 1) {
      const part = (Math.min(top, row + 1) - Math.max(bottom, row)) / (top - bottom);
      grid[offset + row]! += (weight * part * count) / total;
    }
  });
}
