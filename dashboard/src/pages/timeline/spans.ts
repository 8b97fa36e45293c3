/** Spans as the API sends them, and the lanes that they lie in. */

import type { InFlight, Spans } from "../../types";

/** Spans as columns; what a test leaves out is as if nothing was merged. */
export type SpanColumns = Omit<Spans, "attempt" | "count" | "merged"> & Partial<Spans>;

export const KINDS = [
  "queue", "prefill", "decode", "environment", "reward", "request",
  "forward", "backward", "reduction", "optimizer", "weight sync", "checkpoint", "wait", "other", "eval",
] as const;
export type Kind = (typeof KINDS)[number];

/** The color token of each kind. */
export const COLOR: Record<Kind, string> = {
  queue: "q", prefill: "pf", decode: "dc", environment: "env", reward: "rw", request: "wait",
  forward: "fw", backward: "bw", reduction: "red", optimizer: "opt", "weight sync": "sync",
  checkpoint: "ink3", wait: "wait", other: "line2", eval: "c3",
};

const BY_NAME: Record<string, Kind> = {
  queue: "queue", prefill: "prefill", decode: "decode", generate: "request", reward: "reward",
  forward: "forward", compute_entropy: "forward", reference_logprobs: "forward", loss_computation: "forward", compute_kl: "forward",
  backward: "backward", gradient_reduction: "reduction", gradient_norm: "optimizer", optimizer: "optimizer",
  weight_sync: "weight sync", weight_transfer: "weight sync", checkpoint: "checkpoint", waiting_for_data: "wait", eval: "eval",
};

export function kindOf(component: string, name: string): Kind {
  if (name.startsWith("weight_broadcast")) return "weight sync";
  return BY_NAME[name] ?? (component === "environment" ? "environment" : component === "rollout" ? "environment" : "other");
}

/** Spans that do not overlap much, sorted by their start. */
export interface Track {
  start: Float64Array;
  end: Float64Array;
  kind: Uint8Array;
  /** Row of the columns. */
  row: Int32Array;
  /** The longest span, so that a search knows how far to look back. */
  longest: number;
}

type Area = "orchestrator" | "engine" | "trainer";

export interface Lane {
  key: string;
  area: Area;
  /** Server or rank. */
  owner: number;
  /** Request slot of an engine; 0 elsewhere. */
  slot: number;
  /** Drawn under `main`: whole requests, waits. */
  back: Track;
  main: Track;
  /** Drawn as a stripe over `main`: what runs beside it. */
  stripe: Track;
  /** The request that has not ended, in a slot of a live run. */
  running?: Running;
}

interface Running {
  sample: string;
  start: number;
}

interface Engine {
  server: number;
  lanes: Lane[];
  syncs: Track;
  transfers: Track;
  /** Requests that run now; null when the run has ended. */
  busy: number | null;
}

export interface Lanes {
  columns: SpanColumns;
  orchestrator: Lane[];
  engines: Engine[];
  trainer: Lane[];
  start: number;
  end: number;
}

type Place = "back" | "main" | "stripe";

class Builder {
  readonly rows: number[] = [];
  constructor(private readonly columns: SpanColumns) {}
  build(): Track {
    const { start, end, component, name, count } = this.columns;
    const rows = this.rows.sort((a, b) => start[a]! - start[b]! || end[b]! - end[a]!);
    const track: Track = {
      start: Float64Array.from(rows, (row) => start[row]!),
      end: Float64Array.from(rows, (row) => end[row]!),
      kind: Uint8Array.from(rows, (row) => KINDS.indexOf(kindOf(component[row]!, name[row]!))),
      row: Int32Array.from(rows),
      longest: 0,
    };
    let stacked = -Infinity; // merged spans of several kinds took turns: each has its share, one after the other
    for (let i = 0; i < rows.length; i++) {
      if ((count?.[rows[i]!] ?? 1) > 1) {
        const shift = Math.max(0, stacked - track.start[i]!);
        track.start[i]! += shift;
        stacked = track.end[i]! += shift;
      }
      track.longest = Math.max(track.longest, track.end[i]! - track.start[i]!);
    }
    return track;
  }
}

/** Where a span is drawn; null leaves it to its parent. */
function placeOf(component: string, name: string): Place | null {
  if (component === "trainer") {
    if (name === "step") return null;
    if (name === "gradient_reduction" || name.startsWith("weight_broadcast")) return "stripe";
    return name === "waiting_for_data" ? "back" : "main";
  }
  return name === "generate" ? "back" : "main";
}

/** Sorts spans into lanes: one per request slot of an engine, trainer rank, and kind of orchestrator event. */
export function buildLanes(columns: SpanColumns): Lanes {
  const lanes = new Map<string, { area: Area; owner: number; slot: number; tracks: Record<Place, Builder> }>();
  const weights = new Map<number, { syncs: Builder; transfers: Builder }>();
  let first = Infinity;
  let last = -Infinity;
  for (let row = 0; row < columns.start.length; row++) {
    first = Math.min(first, columns.start[row]!);
    last = Math.max(last, columns.end[row]!);
    const component = columns.component[row]!;
    const name = columns.name[row]!;
    const server = columns.server[row] ?? 0;
    if (component === "weights") {
      if (!weights.has(server)) weights.set(server, { syncs: new Builder(columns), transfers: new Builder(columns) });
      weights.get(server)![name === "weight_sync" ? "syncs" : "transfers"].rows.push(row);
      continue;
    }
    const place = placeOf(component, name);
    if (!place) continue;
    const area: Area = component === "trainer" ? "trainer" : columns.server[row] === null && component === "orchestrator" ? "orchestrator" : "engine";
    const owner = area === "trainer" ? (columns.rank[row] ?? 0) : area === "engine" ? server : name === "eval" ? 0 : 1;
    const slot = area === "engine" ? (columns.lane[row] ?? 0) : 0;
    const key = `${area}/${owner}/${slot}`;
    let lane = lanes.get(key);
    if (!lane) {
      lane = { area, owner, slot, tracks: { back: new Builder(columns), main: new Builder(columns), stripe: new Builder(columns) } };
      lanes.set(key, lane);
    }
    lane.tracks[place].rows.push(row);
  }
  const built = [...lanes].map(([key, lane]): Lane => ({
    key, area: lane.area, owner: lane.owner, slot: lane.slot,
    back: lane.tracks.back.build(), main: lane.tracks.main.build(), stripe: lane.tracks.stripe.build(),
  }));
  built.sort((a, b) => a.owner - b.owner || a.slot - b.slot);
  const servers = new Set([...built.filter((lane) => lane.area === "engine").map((lane) => lane.owner), ...weights.keys()]);
  const none = new Builder(columns).build();
  return {
    columns,
    orchestrator: built.filter((lane) => lane.area === "orchestrator"),
    trainer: built.filter((lane) => lane.area === "trainer"),
    engines: [...servers].sort((a, b) => a - b).map((server) => ({
      server,
      lanes: built.filter((lane) => lane.area === "engine" && lane.owner === server),
      syncs: weights.get(server)?.syncs.build() ?? none,
      transfers: weights.get(server)?.transfers.build() ?? none,
      busy: null,
    })),
    start: first,
    end: last,
  };
}

const NOTHING: Track = { start: new Float64Array(), end: new Float64Array(), kind: new Uint8Array(), row: new Int32Array(), longest: 0 };

/** Adds the requests that run now: a span is written when it ends, so these have none. */
export function withRunning(lanes: Lanes, requests: readonly InFlight[]): Lanes {
  const open = requests.filter((request) => request.server !== null && request.lane !== null && request.started_at !== null);
  const servers = new Set([...lanes.engines.map((engine) => engine.server), ...open.map((request) => request.server!)]);
  const engines = [...servers].sort((a, b) => a - b).map((server): Engine => {
    const known = lanes.engines.find((engine) => engine.server === server) ?? { server, lanes: [], syncs: NOTHING, transfers: NOTHING };
    const mine = new Map(open.filter((request) => request.server === server).map((request) => [request.lane!, request]));
    const empty = [...mine.keys()].filter((slot) => !known.lanes.some((lane) => lane.slot === slot));
    const all = [...known.lanes, ...empty.map((slot): Lane => ({ key: `engine/${server}/${slot}`, area: "engine", owner: server, slot, back: NOTHING, main: NOTHING, stripe: NOTHING }))];
    const running = (request: InFlight | undefined): Running | undefined => request && { sample: request.sample_id, start: request.started_at! };
    return { ...known, busy: mine.size, lanes: all.sort((a, b) => a.slot - b.slot).map((lane) => ({ ...lane, running: running(mine.get(lane.slot)) })) };
  });
  return { ...lanes, engines };
}
