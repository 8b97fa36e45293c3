/** Finds the spans of a track. */

import { bisectLeft } from "d3-array";
import { neighbor } from "../../lists";
import type { SpanColumns, Track } from "./spans";

/** Index of the span at a time, within a tolerance; the shortest one when several cover it. -1 if there is none. */
export function spanAt(track: Track, time: number, tolerance: number): number {
  let best = -1;
  let bestDistance = Infinity;
  let bestLength = Infinity;
  const end = bisectLeft(track.start, time + tolerance);
  for (let i = bisectLeft(track.start, time - track.longest - tolerance); i < end; i++) {
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
  return neighbor(ordered, at, at < 0 ? 1 : by) ?? null;
}
