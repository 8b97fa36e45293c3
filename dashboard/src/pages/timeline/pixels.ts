/** Rasterizes the spans of a track, so that each kind gets as many pixels as its share of the time. */

import { bisector } from "d3-array";
import { KINDS, OUTCOMES, type Track } from "./spans";

export interface Box {
  /** Columns of pixels [from, to), counted from the start of the loaded spans. */
  from: number;
  to: number;
  kind: number;
  outcome: number;
  /** Index in the track of the first span. Several narrow spans may share a box. */
  index: number;
}

const IDLE = KINDS.length * OUTCOMES.length;
/** Smaller shares of a pixel are rounding errors. */
const NOTHING = 1e-6;

// For each kind and outcome: its share of the current pixel, the time that it still lacks, and its first span there.
const cover = new Float64Array(IDLE + 1);
const owed = new Float64Array(IDLE + 1);
const spans = new Int32Array(IDLE + 1);
const owedKind = new Float64Array(KINDS.length + 1);
const kindOf = Uint8Array.from({ length: IDLE + 1 }, (_, one) => Math.floor(one / OUTCOMES.length));
/** Kinds and outcomes in the current pixel. */
const present = new Uint8Array(IDLE + 1);

const drawn = new WeakMap<Track, { origin: number; narrow: number; boxes: Box[] }>();

/**
 * Returns the boxes of a track, in their order. `narrow` is the seconds of one pixel.
 *
 * A pixel has one color. Where several kinds share it, the one that is furthest behind its recorded time gets it, and the
 * difference is carried on: over any stretch, a kind has its recorded time within about a pixel. They are kept for the
 * next frame, so a view that moves does not flicker.
 */
export function pixelBoxes(track: Track, origin: number, narrow: number): Box[] {
  const kept = drawn.get(track);
  if (kept && kept.origin === origin && kept.narrow === narrow) return kept.boxes;
  const boxes: Box[] = [];
  owed.fill(0);
  owedKind.fill(0);
  let last: Box | null = null;
  let column = 0;
  let used = 0;
  let filled = 0;
  const emit = (from: number, to: number, index: number) => {
    const [kind, outcome] = [track.kind[index]!, track.outcome[index]!];
    // Adjacent pixels of one kind are one box, but two spans that are long enough to be seen stay two.
    if (last !== null && last.to === from && last.kind === kind && last.outcome === outcome && (last.index === index || to - from < 2)) last.to = to;
    else boxes.push((last = { from, to, kind, outcome, index }));
  };
  const add = (own: number, share: number, index: number) => {
    if (share <= NOTHING) return;
    filled += share;
    let place = 0;
    while (place < used && present[place] !== own) place++;
    if (place === used) {
      present[used++] = own;
      spans[own] = index;
      cover[own] = share;
    } else cover[own]! += share;
  };
  const flush = () => {
    if (used === 0) return;
    if (filled < 1 - NOTHING) {
      cover[IDLE] = 1 - filled;
      present[used++] = IDLE;
    }
    for (let place = 0; place < used; place++) {
      const one = present[place]!;
      owed[one]! += cover[one]!;
      owedKind[kindOf[one]!]! += cover[one]!;
    }
    // First choose the kind, then the outcome.
    let best = present[0]!;
    for (let place = 1; place < used; place++) {
      const one = present[place]!;
      const further = owedKind[kindOf[one]!]! - owedKind[kindOf[best]!]!;
      if (further > 0 || (kindOf[one] === kindOf[best] && owed[one]! > owed[best]!)) best = one;
    }
    owed[best]! -= 1;
    owedKind[kindOf[best]!]! -= 1;
    if (best !== IDLE) emit(column, column + 1, spans[best]!);
    used = filled = 0;
  };
  for (let index = 0; index < track.start.length; index++) {
    const to = (track.end[index]! - origin) / narrow;
    const from = (track.start[index]! - origin) / narrow;
    const own = track.kind[index]! * OUTCOMES.length + track.outcome[index]!;
    const first = Math.floor(from);
    if (first !== column) flush();
    column = first;
    if (from > column) {
      add(own, Math.min(to, column + 1) - from, index);
      if (to < column + 1) continue;
      flush();
      column += 1;
    }
    const whole = Math.floor(to + NOTHING);
    if (whole > column) {
      flush();
      emit(column, whole, index);
      column = whole;
    }
    add(own, to - column, index);
  }
  flush();
  drawn.set(track, { origin, narrow, boxes });
  return boxes;
}

const firstAfter = bisector((box: Box) => box.to).right;
const firstBeyond = bisector((box: Box) => box.from).left;

/** Returns the boxes that overlap the columns [from, to). */
export const boxesWithin = (boxes: readonly Box[], from: number, to: number): Box[] => boxes.slice(firstAfter(boxes, from), firstBeyond(boxes, to));
