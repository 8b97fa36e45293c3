/** Finds and merges the spans of a track, for drawing and for the pointer. */

import { KINDS, type SpanColumns, type Track } from "./spans";

/** Index of the first of the rising times at or after a time. */
export function firstFrom(times: ArrayLike<number>, time: number): number {
  let low = 0;
  let high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle]! < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

export interface Box {
  from: number;
  to: number;
  kind: number;
  /** Index in the track, or -1 when the box stands for several spans. */
  index: number;
}

/**
 * Returns the boxes to draw for [from, to). `narrow` is the seconds of one pixel.
 *
 * A span of a pixel or more is its own box. Narrower ones share the boxes of their pixels, with the kind that fills most
 * of it, so that the number of boxes is bounded by the width, not by the number of spans.
 */
export function visibleBoxes(track: Track, from: number, to: number, narrow: number): Box[] {
  const boxes: Box[] = [];
  const filled = new Float64Array(KINDS.length);
  let pixel = -1;
  let only = -1;
  let merged = 0;
  const flush = () => {
    if (merged === 0) return;
    let best = 0;
    for (let kind = 1; kind < filled.length; kind++) if (filled[kind]! > filled[best]!) best = kind;
    const start = from + pixel * narrow;
    if (merged === 1) boxes.push({ from: track.start[only]!, to: Math.max(track.end[only]!, track.start[only]! + narrow / 2), kind: track.kind[only]!, index: only });
    else {
      const before = boxes.at(-1);
      // Neighbors of one kind are one box: thousands of pixels are drawn more slowly.
      if (before && before.index < 0 && before.kind === best && Math.abs(start - before.to) < narrow / 2) before.to = start + narrow;
      else boxes.push({ from: start, to: start + narrow, kind: best, index: -1 });
    }
    filled.fill(0);
    merged = 0;
  };
  const end = firstFrom(track.start, to);
  for (let i = firstFrom(track.start, from - track.longest); i < end; i++) {
    const start = track.start[i]!;
    const stop = track.end[i]!;
    if (stop < from) continue;
    if (stop - start >= narrow) {
      flush();
      pixel = -1;
      boxes.push({ from: start, to: stop, kind: track.kind[i]!, index: i });
      continue;
    }
    const at = Math.floor((start - from) / narrow);
    if (at !== pixel) flush();
    pixel = at;
    only = i;
    merged++;
    filled[track.kind[i]!]! += Math.max(stop - start, 1e-9);
  }
  flush();
  return boxes;
}

/** Index of the span at a time, within a tolerance; the shortest one when several cover it. -1 if there is none. */
export function spanAt(track: Track, time: number, tolerance: number): number {
  let best = -1;
  let bestDistance = Infinity;
  let bestLength = Infinity;
  const end = firstFrom(track.start, time + tolerance);
  for (let i = firstFrom(track.start, time - track.longest - tolerance); i < end; i++) {
    const start = track.start[i]!;
    const stop = track.end[i]!;
    const distance = time < start ? start - time : time > stop ? time - stop : 0;
    if (distance > tolerance) continue;
    if (distance < bestDistance || (distance === bestDistance && stop - start < bestLength)) {
      best = i;
      bestDistance = distance;
      bestLength = stop - start;
    }
  }
  return best;
}

/** The request after a sample, or before it, among those of engines in [from, to), by their start; the first one without a sample there. */
export function nextRequest({ sample_id, server, start, end }: SpanColumns, from: number, to: number, sample: string, by: 1 | -1): string | null {
  const first = new Map<string, number>();
  sample_id.forEach((id, row) => {
    if (id === null || server[row] === null || end[row]! < from || start[row]! >= to) return;
    first.set(id, Math.min(first.get(id) ?? Infinity, start[row]!));
  });
  const ordered = [...first].sort((a, b) => a[1] - b[1]).map(([id]) => id);
  const at = ordered.indexOf(sample);
  return ordered[at < 0 ? 0 : Math.min(Math.max(at + by, 0), ordered.length - 1)] ?? null;
}
