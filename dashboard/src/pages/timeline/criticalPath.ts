/** What a step waited for: a partition of its time into named parts whose seconds add up to the step. */

import type { Kind } from "./spans";

export interface Interval {
  start: number;
  end: number;
  kind: Kind;
  label: string;
  /** Of two that cover the same time, the one of higher priority gets it. */
  priority: number;
}

export interface Part {
  label: string;
  kind: Kind;
  seconds: number;
  /** Where it begins first. */
  start: number;
  end: number;
}

/** Cuts [from, to] into parts. Time that no interval covers gets `rest`. */
export function partition(from: number, to: number, intervals: readonly Interval[], rest: { kind: Kind; label: string }): Part[] {
  const inside = intervals.filter((interval) => interval.end > from && interval.start < to);
  const cuts = [...new Set([from, to, ...inside.flatMap((i) => [Math.max(from, i.start), Math.min(to, i.end)])])].sort((a, b) => a - b);
  const parts: Part[] = [];
  for (let i = 0; i + 1 < cuts.length; i++) {
    const [a, b] = [cuts[i]!, cuts[i + 1]!];
    let owner: Interval | null = null;
    for (const interval of inside) {
      if (interval.start <= a && interval.end >= b && (!owner || interval.priority > owner.priority)) owner = interval;
    }
    const { kind, label } = owner ?? rest;
    const last = parts.at(-1);
    if (last && last.label === label) {
      last.end = b;
      last.seconds += b - a;
    } else parts.push({ label, kind, seconds: b - a, start: a, end: b });
  }
  return parts;
}

/** Joins parts of one label, in the order in which they first occur. */
export function total(parts: readonly Part[]): Part[] {
  const byLabel = new Map<string, Part>();
  for (const part of parts) {
    const known = byLabel.get(part.label);
    if (!known) byLabel.set(part.label, { ...part });
    else {
      known.seconds += part.seconds;
      known.end = part.end;
    }
  }
  return [...byLabel.values()];
}

/** Parts below this share of a step get no row of their own. */
const SMALL = 0.01;

/** Rows of the table: parts by label, the small ones and the gaps together in a last row. Their seconds add up to the step. */
export function tableRows(path: CriticalPath): Part[] {
  const rows = total(path.parts).filter((row) => row.seconds > 0);
  const small = rows.filter((row) => row.seconds < SMALL * (path.end - path.start) || row.label === REST);
  if (small.length < 2 && small[0]?.label !== REST) return rows;
  const seconds = small.reduce((sum, row) => sum + row.seconds, 0);
  const rest: Part = { label: small.length === 1 ? REST : "All else", kind: "other", seconds, start: path.end, end: path.end };
  return [...rows.filter((row) => !small.includes(row)), rest];
}

const REST = "Between phases";

export interface StepSpan {
  component: string;
  name: string;
  rank: number | null;
  server: number | null;
  lane: number | null;
  step: number | null;
  sample_id: string | null;
  start: number;
  end: number;
}

export interface StepSample {
  sample_id: string;
  group_id: number;
  finished_at: number | null;
  server: number | null;
  lane: number | null;
}

export interface CriticalPath {
  step: number;
  start: number;
  end: number;
  /** When the trainer's slowest rank had its batch. */
  ready: number;
  rank: number | null;
  /** The sample that completed the batch; null when it was complete before the step began. */
  last: StepSample | null;
  lane: { server: number; lane: number } | null;
  parts: Part[];
  /** Of the groups of the batch, those ready earlier than the last, and by how many seconds. */
  groupsReady: { earlier: number; of: number; seconds: number } | null;
}

type Phase = Pick<Interval, "label" | "kind" | "priority">;

/** Phases of the request of the last sample. A whole request gives way to its phases. */
const REQUEST_PHASES: Record<string, Phase> = {
  generate: { label: "Its request, outside the engine", kind: "request", priority: 4 },
  queue: { label: "Its queue", kind: "queue", priority: 5 },
  prefill: { label: "Its prefill", kind: "prefill", priority: 5 },
  decode: { label: "Its decode", kind: "decode", priority: 5 },
  tool: { label: "Its tools", kind: "environment", priority: 6 },
  reward: { label: "Its reward", kind: "reward", priority: 6 },
};
const ENVIRONMENT_PHASE: Phase = { label: "Its environment", kind: "environment", priority: 5 };

const TRAINER_PHASES: Record<string, Phase> = {
  prepare_tensors: { label: "Batch to the device", kind: "other", priority: 2 },
  data_to_device: { label: "Batch to the device", kind: "other", priority: 2 },
  compile: { label: "Compile", kind: "other", priority: 2 },
  reference_logprobs: { label: "Reference logprobs", kind: "forward", priority: 2 },
  forward: { label: "Forward", kind: "forward", priority: 2 },
  compute_entropy: { label: "Forward", kind: "forward", priority: 2 },
  loss_computation: { label: "Forward", kind: "forward", priority: 2 },
  compute_kl: { label: "Forward", kind: "forward", priority: 2 },
  backward: { label: "Backward", kind: "backward", priority: 3 },
  gradient_reduction: { label: "Reduce", kind: "reduction", priority: 1 },
  gradient_norm: { label: "Optimizer", kind: "optimizer", priority: 2 },
  optimizer: { label: "Optimizer", kind: "optimizer", priority: 2 },
  checkpoint: { label: "Checkpoint", kind: "checkpoint", priority: 2 },
};

/** Computes the critical path of a step from the spans around it and the samples that it trained. */
export function criticalPath(
  step: number,
  start: number,
  end: number,
  spans: readonly StepSpan[],
  samples: readonly StepSample[],
): CriticalPath {
  const trainer = spans.filter((span) => span.component === "trainer" && span.end > start && span.start < end);
  const steps = trainer.filter((span) => span.name === "step" && span.step === step);
  const slowest = steps.reduce<StepSpan | null>((best, span) => (!best || span.end > best.end ? span : best), null);
  const ready = slowest ? Math.min(Math.max(slowest.start, start), end) : end;
  const done = slowest ? Math.min(slowest.end, end) : end;

  const finished = samples.filter((sample) => sample.finished_at !== null && sample.finished_at <= ready + 1e-3);
  const newest = finished.reduce<StepSample | null>((best, sample) => (!best || sample.finished_at! > best.finished_at! ? sample : best), null);
  const last = newest && newest.finished_at! > start ? newest : null;

  const intervals: Interval[] = [];
  let lane: CriticalPath["lane"] = null;
  if (last) {
    for (const span of spans) {
      if (span.sample_id !== last.sample_id) continue;
      if (span.server !== null && span.lane !== null) lane = { server: span.server, lane: span.lane };
      const clipped = { start: span.start, end: Math.min(span.end, ready) };
      const phase = REQUEST_PHASES[span.name] ?? ENVIRONMENT_PHASE;
      const label = span.name === "decode" ? `Decode of ${last.sample_id}` : phase.label;
      intervals.push({ ...clipped, ...phase, label });
    }
    lane ??= last.server !== null && last.lane !== null ? { server: last.server, lane: last.lane } : null;
    const begun = Math.min(...intervals.map((interval) => interval.start), last.finished_at!);
    if (begun > start) intervals.push({ start, end: begun, kind: "wait", label: `Before ${last.sample_id} was sent`, priority: 0 });
    intervals.push({ start: last.finished_at!, end: ready, kind: "other", label: "Batch packed", priority: 3 });
  }
  for (const span of trainer) {
    if (slowest && span.rank !== slowest.rank) continue;
    const phase = TRAINER_PHASES[span.name];
    if (!phase || (span.name === "checkpoint" && span.step === null)) continue;
    intervals.push({ start: Math.max(span.start, ready), end: span.end, ...phase });
  }
  for (const span of spans) {
    if (span.component === "weights" || (span.component === "trainer" && span.name === "weight_sync")) {
      intervals.push({ start: Math.max(span.start, done), end: span.end, kind: "weight sync", label: "Weight sync", priority: 1 });
    }
  }
  const before = partition(start, ready, intervals, { kind: "wait", label: last ? "Waits" : "Hands over the batch" });
  const after = partition(ready, end, intervals.filter((interval) => interval.end > ready), { kind: "other", label: REST });

  return { step, start, end, ready, rank: slowest?.rank ?? null, last, lane, parts: [...before, ...after], groupsReady: groupsReady(finished, last) };
}

function groupsReady(samples: readonly StepSample[], last: StepSample | null): CriticalPath["groupsReady"] {
  if (!last) return null;
  const readyAt = new Map<number, number>();
  for (const sample of samples) readyAt.set(sample.group_id, Math.max(readyAt.get(sample.group_id) ?? 0, sample.finished_at ?? 0));
  const others = [...readyAt].filter(([group]) => group !== last.group_id).map(([, time]) => time);
  if (others.length === 0) return null;
  return { earlier: others.length, of: readyAt.size, seconds: last.finished_at! - Math.max(...others) };
}

/** An answer is alone when the other groups were ready this share of the wait earlier. */
const ALONE = 0.3;

/** A step that waits for longer than this share of itself could be shorter with other settings. */
const WAITS = 0.25;

/** Returns what the batch of a step waited for: a kind of time, and whether of one answer alone. Null if it hardly waited. */
function causeOf(path: CriticalPath): { kind: Kind; alone: boolean } | null {
  const waited = path.ready - path.start;
  if (!path.last || waited <= WAITS * (path.end - path.start)) return null;
  const longest = total(path.parts).filter((row) => row.start < path.ready).sort((a, b) => b.seconds - a.seconds)[0];
  return { kind: longest?.kind ?? "wait", alone: path.groupsReady !== null && path.groupsReady.seconds > ALONE * waited };
}

const FOR: Partial<Record<Kind, string>> = {
  decode: "for its answers to be generated",
  queue: "for a request in the queue",
  prefill: "for a prompt to be read",
  reward: "for a slow reward",
  environment: "for a slow environment",
  request: "for a request outside the engine",
  wait: "for a prompt that was sent late",
  other: "for its batch to be packed",
};

/** What the step waited for or spent its time on, in one sentence. */
export function verdict(path: CriticalPath): string {
  const waited = path.ready - path.start;
  const whole = path.end - path.start;
  const seconds = (value: number) => `${value < 10 ? value.toFixed(value < 1 ? 2 : 1) : value.toFixed(0)} s`;
  const cause = causeOf(path);
  if (cause) return `It waited ${seconds(waited)} ${cause.kind === "decode" && cause.alone ? "for one long answer" : (FOR[cause.kind] ?? "for its batch")}.`;
  const most = total(path.parts).filter((row) => row.start >= path.ready).sort((a, b) => b.seconds - a.seconds)[0];
  if (!most || whole <= 0) return "Nothing of this step was traced.";
  const share = Math.round((100 * most.seconds) / whole);
  const wait = waited / whole < 0.05 ? "Its batch was ready. " : "";
  return `${wait}${most.label} took ${seconds(most.seconds)}, ${share}\u2009% of it.`;
}

/** What would shorten the wait, in the words of the overview; null if the step hardly waited. */
export function advice(path: CriticalPath): string | null {
  const cause = causeOf(path);
  if (!cause) return null;
  if (cause.kind === "decode" && cause.alone) return `Raise max_async_rollout: group ${path.last!.group_id} would join a later step. Or lower max_tokens.`;
  if (cause.kind === "reward" || cause.kind === "environment" || cause.kind === "request") return `Make the ${cause.kind === "request" ? "environment" : cause.kind} faster, or raise max_async_rollout.`;
  if (cause.kind === "other") return null;
  return "Add inference servers, raise max_async_rollout, or give the trainer fewer GPUs.";
}
