/** What a step waited for: a partition of its time into named parts whose seconds add up to the step. */

import { greatest, groups, max, mean, rollup, sum } from "d3-array";
import { duration } from "../../format";
import type { Outage } from "./alerts";
import type { PathAnswer, PathSpan } from "../../types";
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
  return groups(parts, (part) => part.label).map(([, own]) => ({ ...own[0]!, seconds: sum(own, (part) => part.seconds), end: own.at(-1)!.end }));
}

/** Parts below this share of a step get no row of their own. */
const SMALL = 0.01;

/** Rows of the table: parts by label, the small ones and the gaps together in a last row. Their seconds add up to the step. */
export function tableRows(path: CriticalPath): Part[] {
  const rows = total(path.parts).filter((row) => row.seconds > 0);
  const small = rows.filter((row) => row.seconds < SMALL * (path.end - path.start) || row.label === REST);
  if (small.length < 2 && small[0]?.label !== REST) return rows;
  const rest: Part = { label: small.length === 1 ? REST : "All else", kind: "other", seconds: sum(small, (row) => row.seconds), start: path.end, end: path.end };
  return [...rows.filter((row) => !small.includes(row)), rest];
}

const REST = "Between phases";

export type StepSpan = Omit<PathSpan, "of_step">;
type StepSample = Omit<PathAnswer, "step">;

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
  /** Servers that generated its answers. */
  servers: number[];
}

type Phase = Pick<Interval, "label" | "kind" | "priority">;

/** Phases of the request of the last sample. A whole request gives way to its phases. */
const REQUEST_PHASES: Record<string, Phase> = {
  generate: { label: "Outside the engine", kind: "request", priority: 4 },
  queue: { label: "Its queue", kind: "queue", priority: 5 },
  prefill: { label: "Its prefill", kind: "prefill", priority: 5 },
  decode: { label: "Its decode", kind: "decode", priority: 5 },
  tool: { label: "Its tools", kind: "environment", priority: 6 },
  reward: { label: "Its reward", kind: "reward", priority: 6 },
};
const ENVIRONMENT_PHASE: Phase = { label: "Its environment", kind: "environment", priority: 5 };

/** Tools and rewards wait for sandboxes, and an agent inside one makes its requests there. */
function phaseOf({ component, name }: StepSpan): Phase {
  if (component !== "sandbox") return REQUEST_PHASES[name] ?? ENVIRONMENT_PHASE;
  const [label, priority] = name === "queue" ? (["Its wait for a sandbox", 7] as const) : (["Its sandbox", 3] as const);
  return { label, kind: "sandbox", priority };
}

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

/** A rank is late if it begins after the first one by more than this share of the step. */
const LATE = 0.1;

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
  // All ranks end together: the slowest is the one that began last.
  const slowest = greatest(steps, (span) => span.start + span.end) ?? null;
  const ready = slowest ? Math.min(Math.max(slowest.start, start), end) : end;
  const done = slowest ? Math.min(slowest.end, end) : end;

  const finished = samples.filter((sample) => sample.finished_at !== null && sample.finished_at <= ready + 1e-3);
  const newest = greatest(finished, (sample) => sample.finished_at!);
  const last = newest && newest.finished_at! > start ? newest : null;

  const intervals: Interval[] = [];
  let lane: CriticalPath["lane"] = null;
  if (last) {
    for (const span of spans) {
      if (span.sample_id !== last.sample_id) continue;
      if (span.server !== null && span.lane !== null) lane = { server: span.server, lane: span.lane };
      const clipped = { start: span.start, end: Math.min(span.end, ready) };
      const phase = phaseOf(span);
      const label = span.name === "decode" ? `Decode of ${last.sample_id}` : phase.label;
      intervals.push({ ...clipped, ...phase, label });
    }
    lane ??= last.server !== null && last.lane !== null ? { server: last.server, lane: last.lane } : null;
    const begun = Math.min(...intervals.map((interval) => interval.start), last.finished_at!);
    if (begun > start) intervals.push({ start, end: begun, kind: "wait", label: `Before ${last.sample_id} was sent`, priority: 0 });
    intervals.push({ start: last.finished_at!, end: ready, kind: "other", label: "Batch packed", priority: 3 });
  }
  const first = Math.max(start, Math.min(ready, ...steps.map((span) => span.start)));
  if (slowest && ready - first > LATE * (end - start)) intervals.push({ start: first, end: ready, kind: "wait", label: `Rank ${slowest.rank} began late`, priority: 8 });
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

  const servers = [...new Set(samples.flatMap((sample) => sample.server ?? []))];
  return { step, start, end, ready, rank: slowest?.rank ?? null, last, lane, parts: [...before, ...after], groupsReady: groupsReady(finished, last), servers };
}

function groupsReady(samples: readonly StepSample[], last: StepSample | null): CriticalPath["groupsReady"] {
  if (!last) return null;
  const readyAt = rollup(samples, (own) => max(own, (sample) => sample.finished_at)!, (sample) => sample.group_id);
  const others = [...readyAt].filter(([group]) => group !== last.group_id).map(([, time]) => time);
  if (others.length === 0) return null;
  return { earlier: others.length, of: readyAt.size, seconds: last.finished_at! - Math.max(...others) };
}

/** Returns the path of the mean step: the seconds of each part divided by the number of steps. */
export function meanPath(paths: readonly CriticalPath[]): CriticalPath {
  const [end, ready] = [wholeOf(paths), mean(paths, (path) => path.ready - path.start)!];
  const parts = paths.flatMap((path) =>
    path.parts.map((part): Part => {
      const early = part.end <= path.ready + 1e-9;
      const id = path.last?.sample_id;
      const label = part.label === `Decode of ${id}` ? "Its decode" : part.label === `Before ${id} was sent` ? "Before it was sent" : part.label;
      return { label, kind: part.kind, seconds: part.seconds / paths.length, start: early ? 0 : ready, end: early ? ready : end };
    }),
  );
  const ordered = [...parts.filter((part) => part.end === ready), ...parts.filter((part) => part.end !== ready)];
  return { step: paths[0]!.step, start: 0, end, ready, rank: null, last: null, lane: null, parts: ordered, groupsReady: null, servers: [...new Set(paths.flatMap((path) => path.servers))] };
}

/** Other events of the time: server outages and evals. */
export interface Around {
  outages: readonly Outage[];
  evals: readonly { from: number; to: number; servers: readonly number[] }[];
  /** Trainer ranks of the run, if known. */
  ranks?: number;
}

interface Cause {
  name: "rank" | "engine" | "checkpoint" | "eval" | "answer" | "weight sync" | Kind;
  /** Seconds per step. */
  seconds: number;
}

/** An answer is alone when the other groups were ready this share of the wait earlier. */
const ALONE = 0.3;

/** If one part takes more than this share of a step, other settings could shorten the step. */
const WAITS = 0.25;

const overlap = (from: number, to: number, one: { from: number; to: number }) => Math.max(0, Math.min(to, one.to) - Math.max(from, one.from));

/** Returns what the steps waited for, longest first. A wait for answers has one cause: whatever took most of it. */
function causesOf(paths: readonly CriticalPath[], { outages, evals }: Around): Cause[] {
  const found = new Map<Cause["name"], number>();
  const add = (name: Cause["name"], seconds: number) => found.set(name, (found.get(name) ?? 0) + seconds / paths.length);
  for (const path of paths) {
    const rows = total(path.parts);
    let waited = path.ready - path.start;
    for (const row of rows) {
      if (row.label.endsWith("began late")) {
        add("rank", row.seconds);
        waited -= row.seconds;
      } else if (row.kind === "checkpoint" || row.kind === "weight sync") add(row.kind, row.seconds);
    }
    if (!path.last || waited <= 0) continue;
    const most = (all: readonly { from: number; to: number }[]) => Math.max(0, ...all.map((one) => overlap(path.start, path.ready, one)));
    const longest = greatest(rows.filter((row) => row.start < path.ready && !row.label.endsWith("began late")), (row) => row.seconds);
    const shared = evals.filter((one) => one.servers.some((server) => path.servers.includes(server)));
    const half = (path.ready - path.start) / 2;
    if (most(outages) > half) add("engine", waited);
    else if (most(shared) > half) add("eval", waited);
    else if (longest?.kind === "decode" && path.groupsReady && path.groupsReady.seconds > ALONE * waited) add("answer", waited);
    else add(longest?.kind ?? "wait", waited);
  }
  return [...found].map(([name, seconds]) => ({ name, seconds })).sort((a, b) => b.seconds - a.seconds);
}

const wholeOf = (paths: readonly CriticalPath[]) => mean(paths, (path) => path.end - path.start)!;

const FOR: Partial<Record<Cause["name"], string>> = {
  rank: "for its last rank to begin",
  checkpoint: "for a checkpoint",
  "weight sync": "for weight syncs",
  eval: "while an eval ran on its engines",
  answer: "for one long answer",
  decode: "for its answers to be generated",
  queue: "for a request in the queue",
  prefill: "for a prompt to be read",
  reward: "for a slow reward",
  environment: "for a slow environment",
  sandbox: "for a sandbox",
  request: "for a request outside the engine",
  wait: "for a prompt that was sent late",
  other: "for its batch to be packed",
};

/** Names the servers that were down during an interval: "engine 1", "engines 0 and 2". */
function downIn(paths: readonly CriticalPath[], outages: readonly Outage[]): { text: string; seconds: number } {
  const [from, to] = [paths[0]!.start, paths.at(-1)!.end];
  const seen = outages.filter((one) => overlap(from, to, one) > 0);
  const servers = [...new Set(seen.map((one) => one.server))].sort((a, b) => a - b);
  return { text: `engine${servers.length > 1 ? "s" : ""} ${servers.join(" and ")}`, seconds: Math.max(0, ...seen.map((one) => one.to - one.from)) };
}

const seconds = (value: number) => `${value < 10 ? value.toFixed(value < 1 ? 2 : 1) : value.toFixed(0)} s`;

/** Causes that are no wait for answers. */
const OWN: readonly Cause["name"][] = ["rank", "checkpoint", "weight sync"];

/** Returns the seconds that a step waited for answers, whatever the causes. */
const waitOf = (causes: readonly Cause[]) => sum(causes, ({ name, seconds }) => (OWN.includes(name) ? 0 : seconds));

/** Returns one sentence about what the steps waited for or spent their time on. */
export function verdict(paths: readonly CriticalPath[], around: Around): string {
  const path = paths.length === 1 ? paths[0]! : meanPath(paths);
  const it = paths.length === 1 ? "It" : "The mean step";
  const whole = wholeOf(paths);
  const causes = causesOf(paths, around);
  const [cause] = causes;
  const isMain = cause && cause.seconds > WAITS * whole;
  if (isMain || waitOf(causes) > WAITS * whole) {
    const named = isMain ? cause : causes.find(({ name }) => !OWN.includes(name))!;
    const down = downIn(paths, around.outages).text;
    const what = named.name === "engine" ? `while ${down} ${down.startsWith("engines") ? "were" : "was"} down` : (FOR[named.name] ?? "for its batch");
    const waited = `${it} waited ${seconds(isMain ? named.seconds : waitOf(causes))}${paths.length > 1 ? ` of ${seconds(whole)}` : ""}`;
    return isMain ? `${waited} ${what}.` : `${waited} for answers, ${seconds(named.seconds)} of it ${what}.`;
  }
  const most = greatest(total(path.parts).filter((row) => row.start >= path.ready), (row) => row.seconds);
  if (!most || whole <= 0) return "Nothing of this step was traced.";
  const share = Math.round((100 * most.seconds) / whole);
  const wait = paths.length === 1 && (path.ready - path.start) / whole < 0.05 ? "Its batch was ready. " : "";
  return `${wait}${most.label} took ${seconds(most.seconds)}, ${share}\u2009% of ${paths.length === 1 ? "it" : "the mean step"}.`;
}

/** Returns the rank that delayed the steps most: "Rank 1 began late". */
function late(paths: readonly CriticalPath[]): string {
  const rows = total(paths.flatMap((path) => path.parts)).filter((row) => row.label.endsWith("began late"));
  return greatest(rows, (row) => row.seconds)?.label ?? "A rank began late";
}

/** A second cause is named if it takes at least this share of a step. */
const ALSO = 0.1;

/** Returns what would shorten the steps, for the main cause and a second one if it matters. Empty if they hardly waited. */
export function advice(paths: readonly CriticalPath[], around: Around): string[] {
  const whole = wholeOf(paths);
  const causes = causesOf(paths, around).filter((cause) => cause.seconds > ALSO * whole);
  if (causes.length === 0 || Math.max(causes[0]!.seconds, waitOf(causes)) <= WAITS * whole) return [];
  const down = downIn(paths, around.outages);
  const textOf = ({ name, seconds: spent }: Cause): string | null => {
    switch (name) {
      case "engine":
        return `${down.text[0]!.toUpperCase()}${down.text.slice(1)} ${down.text.startsWith("engines") ? "were" : "was"} down for ${duration(down.seconds)}, so the others answered for it: the log says why it ended. A spare server keeps the speed.`;
      case "rank":
        return `${late(paths)}, after the others: was its process stopped, or is its node slow? Look at its log.`;
      case "checkpoint":
        return `Checkpoints took ${seconds(spent)} a step: raise checkpoint_every.`;
      case "weight sync":
        return `Weight syncs took ${seconds(spent)} a step: raise weight_broadcast_bucket_mb, or set weight_transfer: background.`;
      case "eval":
        return "An eval occupied the engines: raise eval_every, evaluate fewer num_samples, or set eval_num_servers.";
      case "answer":
        return paths.length === 1
          ? `Raise max_async_rollout: group ${paths[0]!.last!.group_id} would join a later step. Or lower max_tokens.`
          : "One long answer held up most of these steps: raise max_async_rollout, so that its group joins a later step, or lower max_tokens.";
      case "reward":
      case "environment":
      case "request":
        return `Make the ${name === "request" ? "environment" : name} faster, or raise max_async_rollout.`;
      case "sandbox":
        return "Raise pool_size if the machine has room for more sandboxes, make their commands faster, or raise max_async_rollout.";
      case "other":
        return null;
      case "wait": {
        // Earlier samples held its place; their longest phase is probably this sample's.
        const own = paths.flatMap((path) => path.parts.filter((part) => part.end <= path.ready + 1e-9 && part.kind !== "wait" && part.kind !== "other"));
        return textOf({ name: greatest(total(own), (part) => part.seconds)?.kind ?? "decode", seconds: spent });
      }
      default:
        return `Raise inference_num_workers or max_async_rollout${around.ranks === 1 ? "" : ", or lower trainer_num_workers"}.`;
    }
  };
  return [...new Set(causes.slice(0, 2).flatMap((cause) => textOf(cause) ?? []))];
}
