/** Spans as the API sends them, and the lanes that they lie in. */

import type { InFlight, Spans } from "../../types";

/** Spans as columns; what a test leaves out is as if nothing was merged. */
export type SpanColumns = Omit<Spans, "attempt" | "count" | "merged" | "part_seconds" | "slots" | "status"> & Partial<Spans>;

export const KINDS = [
  "queue", "prefill", "decode", "environment", "sandbox", "reward", "request",
  "forward", "backward", "reduction", "optimizer", "weight sync", "checkpoint", "wait", "other", "eval",
] as const;
export type Kind = (typeof KINDS)[number];

/** The color token of each kind. */
export const COLOR: Record<Kind, string> = {
  queue: "q", prefill: "pf", decode: "dc", environment: "env", sandbox: "c6", reward: "rw", request: "line2",
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
  if (component === "sandbox") return "sandbox";
  if (name.startsWith("weight_broadcast")) return "weight sync";
  return BY_NAME[name] ?? (component === "environment" ? "environment" : component === "rollout" ? "environment" : "other");
}

/** Outcomes of a request. Spans without a sample, or of a running sample, are drawn as kept. */
export const OUTCOMES = ["kept", "discarded", "cancelled", "eval"] as const;
export type Outcome = (typeof OUTCOMES)[number];

function outcomeOf(status: string | null | undefined): number {
  // A masked answer was left out of the loss.
  return Math.max(0, OUTCOMES.indexOf((status === "masked" ? "discarded" : status) as Outcome));
}

/** Which span a slot shows if several overlap, as in the server's `AFTER_ENGINE`. */
const LEVEL: Partial<Record<Kind, number>> = { environment: 1, reward: 2, request: 3 };
const LEVELS = 4;

/** The spans that a lane shows, which do not overlap, sorted by start. */
export interface Track {
  start: Float64Array;
  end: Float64Array;
  kind: Uint8Array;
  /** Index in `OUTCOMES`. */
  outcome: Uint8Array;
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
  main: Track;
  /** Drawn under `main`: waits of the trainer. */
  back: Track;
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
    const { start, end, component, name, count, status, part_seconds = 0 } = this.columns;
    const rows = this.rows.sort((a, b) => start[a]! - start[b]! || end[b]! - end[a]!);
    const kinds = rows.map((row) => KINDS.indexOf(kindOf(component[row]!, name[row]!)));
    // Merged spans are drawn one after the other, each kind with its share of the interval.
    let stacked = -Infinity;
    const shifts = rows.map((row) => {
      if ((count?.[row] ?? 1) === 1 && end[row]! - start[row]! >= part_seconds) return 0;
      const shift = Math.max(0, stacked - start[row]!);
      stacked = end[row]! + shift;
      return shift;
    });
    const pieces: { start: number; end: number; at: number }[] = [];
    let covered: { start: number; end: number }[] = [];
    for (let level = 0; level < LEVELS; level++) {
      const before = pieces.length;
      let next = 0;
      let reached = -Infinity;
      rows.forEach((row, at) => {
        if ((LEVEL[KINDS[kinds[at]!]!] ?? 0) !== level) return;
        const stop = end[row]! + shifts[at]!;
        let time = Math.max(start[row]! + shifts[at]!, reached);
        reached = Math.max(reached, stop);
        while (next < covered.length && covered[next]!.end <= time) next++;
        for (let i = next; time < stop; i++) {
          const free = Math.min(stop, covered[i]?.start ?? Infinity);
          if (free > time) pieces.push({ start: time, end: free, at });
          time = Math.max(free, covered[i]?.end ?? free);
        }
      });
      if (pieces.length > before) covered = pieces.map((piece) => piece).sort((a, b) => a.start - b.start);
    }
    return {
      start: Float64Array.from(covered, (piece) => piece.start),
      end: Float64Array.from(covered, (piece) => piece.end),
      kind: Uint8Array.from(covered as typeof pieces, ({ at }) => kinds[at]!),
      outcome: Uint8Array.from(covered as typeof pieces, ({ at }) => outcomeOf(status?.[rows[at]!])),
      row: Int32Array.from(covered as typeof pieces, ({ at }) => rows[at]!),
      longest: covered.reduce((most, piece) => Math.max(most, piece.end - piece.start), 0),
    };
  }
}

/** Where a span is drawn; null leaves it to its parent. */
function placeOf(component: string, name: string): Place | null {
  if (component === "trainer") {
    if (name === "step") return null;
    if (name === "gradient_reduction" || name.startsWith("weight_broadcast")) return "stripe";
    return name === "waiting_for_data" ? "back" : "main";
  }
  return "main";
}

/** Sorts spans into lanes: one per request slot of an engine, trainer rank, and kind of orchestrator event. */
export function buildLanes(columns: SpanColumns): Lanes {
  const lanes = new Map<string, { area: Area; owner: number; slot: number; tracks: Record<Place, Builder> }>();
  const weights = new Map<number, { syncs: Builder; transfers: Builder }>();
  const sandboxes = columns.component.flatMap((component, row) => (component === "sandbox" ? [row] : []));
  const sandboxed = new Set(sandboxes.map((row) => columns.sample_id[row]));
  const slotsOfSample = new Map<string, { start: number; lane: string }[]>();
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
    if (component === "sandbox") continue;
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
    const sample = columns.sample_id[row];
    if (sample && sandboxed.has(sample)) slotsOfSample.set(sample, [...(slotsOfSample.get(sample) ?? []), { start: columns.start[row]!, lane: key }]);
  }
  for (const row of sandboxes) {
    // A call of a sandbox lies in the slot that its sample had last.
    const own = slotsOfSample.get(columns.sample_id[row] ?? "") ?? [];
    const slot = own.findLast((one) => one.start <= columns.start[row]!) ?? own[0];
    if (slot) lanes.get(slot.lane)!.tracks.stripe.rows.push(row);
  }
  const built = [...lanes].map(([key, lane]): Lane => ({
    key, area: lane.area, owner: lane.owner, slot: lane.slot,
    back: lane.tracks.back.build(), main: lane.tracks.main.build(), stripe: lane.tracks.stripe.build(),
  }));
  built.sort((a, b) => a.owner - b.owner || a.slot - b.slot);
  const slots = new Map(Object.entries(columns.slots ?? {}).map(([server, number]) => [Number(server), number]));
  const servers = new Set([...slots.keys(), ...built.filter((lane) => lane.area === "engine").map((lane) => lane.owner), ...weights.keys()]);
  const none = new Builder(columns).build();
  return {
    columns,
    orchestrator: built.filter((lane) => lane.area === "orchestrator"),
    trainer: built.filter((lane) => lane.area === "trainer"),
    // Every slot of the run has a lane, even if it is empty, so lanes do not move.
    engines: [...servers].sort((a, b) => a - b).map((server) => ({
      server,
      lanes: withSlots(server, built.filter((lane) => lane.area === "engine" && lane.owner === server), Array.from({ length: slots.get(server) ?? 0 }, (_, slot) => slot)),
      syncs: weights.get(server)?.syncs.build() ?? none,
      transfers: weights.get(server)?.transfers.build() ?? none,
      busy: null,
    })),
    start: first,
    end: last,
  };
}

const NOTHING: Track = { start: new Float64Array(), end: new Float64Array(), kind: new Uint8Array(), outcome: new Uint8Array(), row: new Int32Array(), longest: 0 };

function withSlots(server: number, lanes: readonly Lane[], slots: readonly number[]): Lane[] {
  const known = new Set(lanes.map((lane) => lane.slot));
  const empty = slots.filter((slot) => !known.has(slot)).map((slot): Lane => ({ key: `engine/${server}/${slot}`, area: "engine", owner: server, slot, back: NOTHING, main: NOTHING, stripe: NOTHING }));
  return [...lanes, ...empty].sort((a, b) => a.slot - b.slot);
}

/** Adds the requests that run now: a span is written when it ends, so these have none. */
export function withRunning(lanes: Lanes, requests: readonly InFlight[]): Lanes {
  const open = requests.filter((request) => request.server !== null && request.lane !== null && request.started_at !== null);
  const servers = new Set([...lanes.engines.map((engine) => engine.server), ...open.map((request) => request.server!)]);
  const engines = [...servers].sort((a, b) => a - b).map((server): Engine => {
    const known = lanes.engines.find((engine) => engine.server === server) ?? { server, lanes: [], syncs: NOTHING, transfers: NOTHING };
    const mine = new Map(open.filter((request) => request.server === server).map((request) => [request.lane!, request]));
    const running = (request: InFlight | undefined): Running | undefined => request && { sample: request.sample_id, start: request.started_at! };
    return { ...known, busy: mine.size, lanes: withSlots(server, known.lanes, [...mine.keys()]).map((lane) => ({ ...lane, running: running(mine.get(lane.slot)) })) };
  });
  return { ...lanes, engines };
}
