/** Where each lane of the timeline lies, from top to bottom, and what lies under a pointer. */

import { bisectLeft } from "d3-array";
import { neighbor } from "../../lists";
import type { Lane, Lanes, SpanColumns, Track } from "./spans";

/** Width of the labels at the left, and the room at the right. */
export const LABEL_WIDTH = 148;
export const RIGHT = 16;
export const MINIMAP = 44;
export const AXIS = 23;
const ORCHESTRATOR = 50;
/** Middle of the marks of alerts, in the lane of the orchestrator. */
export const ALERT_Y = 26;
const TRAINER = 26;
const MIN_SLOT = 1;
const MAX_SLOT = 12;
const MIN_GAUGE = 40;
const MAX_GAUGE = 56;
const PAD = 6;
/** A lower slot has no room for the stripe of its sandboxes: only those of the selected request are drawn, over all of it. */
export const THIN = 3;
/** Where the stripe of a slot begins. */
export const stripeTop = ({ y, height }: Row): number => y + Math.round((2 * height) / 3);
/** The label of an engine has three lines: its slots may have this height. */
const LABEL = 48;

export interface Row {
  lane: Lane;
  y: number;
  height: number;
}

interface EngineBlock {
  server: number;
  y: number;
  height: number;
  slotHeight: number;
  rows: Row[];
  syncs: Track;
  transfers: Track;
  busy: number | null;
}

interface GaugeRow {
  index: number;
  y: number;
  height: number;
}

export interface Layout {
  orchestrator: { y: number; height: number };
  engines: EngineBlock[];
  trainer: Row[];
  gauges: GaugeRow[];
  height: number;
}

/** Distributes the height: slots take what is left over, between 1 and 12 pixels each, and at least that of the label. */
export function layOut(lanes: Lanes, numGauges: number, height: number): Layout {
  const slots = lanes.engines.reduce((sum, engine) => sum + slotsOf(engine.lanes), 0);
  const fixed = ORCHESTRATOR + lanes.engines.length * (2 * PAD) + lanes.trainer.length * TRAINER + 2 * PAD + numGauges * MIN_GAUGE + 20;
  const left = slots ? Math.max(MIN_SLOT, Math.floor((height - fixed) / slots)) : 0;
  let y = ORCHESTRATOR;
  const engines = lanes.engines.map((engine): EngineBlock => {
    y += PAD;
    const top = y;
    const own = slotsOf(engine.lanes);
    const slotHeight = Math.min(MAX_SLOT, Math.max(left, own ? Math.floor(LABEL / own) : 0));
    const rows = engine.lanes.map((lane) => ({ lane, y: top + lane.slot * slotHeight, height: slotHeight > 3 ? slotHeight - 1.5 : slotHeight > 2 ? slotHeight - 1 : slotHeight > 1 ? slotHeight - 0.5 : slotHeight }));
    y += Math.max(own * slotHeight, LABEL) + PAD;
    return { server: engine.server, y: top, height: y - PAD - top, slotHeight, rows, syncs: engine.syncs, transfers: engine.transfers, busy: engine.busy };
  });
  y += PAD;
  const trainer = lanes.trainer.map((lane): Row => {
    const row = { lane, y, height: TRAINER - 6 };
    y += TRAINER;
    return row;
  });
  y += PAD;
  const room = numGauges ? Math.max(MIN_GAUGE, Math.min(MAX_GAUGE, Math.floor((height - y - 20) / numGauges))) : 0;
  const gauges = Array.from({ length: numGauges }, (_, index): GaugeRow => {
    const row = { index, y, height: room };
    y += room;
    return row;
  });
  return { orchestrator: { y: 0, height: ORCHESTRATOR }, engines, trainer, gauges, height: y + 20 };
}

/** Request slots of an engine, counting those that were never used between used ones. */
export function slotsOf(lanes: readonly Lane[]): number {
  return lanes.reduce((most, lane) => Math.max(most, lane.slot + 1), 0);
}

/** The row of spans at a height, or null. */
export function rowAt(layout: Layout, y: number): Row | null {
  for (const row of layout.trainer) if (y >= row.y && y < row.y + TRAINER) return row;
  for (const engine of layout.engines) {
    if (y < engine.y || y >= engine.y + engine.height) continue;
    const slot = Math.floor((y - engine.y) / engine.slotHeight);
    return engine.rows.find((row) => row.lane.slot === slot) ?? null;
  }
  return null;
}

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
