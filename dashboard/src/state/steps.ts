/** The steps of a run as columns, read once and then only what is new. */

import { get, runPath } from "../api";
import type { StepColumns, Value } from "../types";
import { useEvents, useVersions } from "./live";
import { type Resource, Store, useStored } from "./resource";

export const NO_STEPS: StepColumns = {
  next: 0,
  attempt: [],
  step: [],
  started_at: [],
  ended_at: [],
  num_tokens_trained: [],
  metrics: {},
};

/**
 * Returns the columns with new rows behind the old ones. Rows of an earlier attempt that the new ones supersede go: a later
 * attempt trains again from its first step on.
 */
export function mergeSteps(old: StepColumns, fresh: StepColumns): StepColumns {
  if (fresh.step.length === 0) return fresh.next === old.next ? old : { ...old, next: fresh.next };
  const firsts = new Map<number, number>();
  fresh.step.forEach((step, row) => {
    const attempt = fresh.attempt[row]!;
    firsts.set(attempt, Math.min(firsts.get(attempt) ?? Infinity, step));
  });
  const kept: number[] = [];
  old.step.forEach((step, row) => {
    const superseded = [...firsts].some(([attempt, first]) => step >= first && attempt >= old.attempt[row]!);
    if (!superseded) kept.push(row);
  });
  const pick = <T>(column: T[] | undefined, empty: T): T[] => kept.map((row) => column?.[row] ?? empty);
  const join = (name: "started_at" | "ended_at" | "num_tokens_trained") => [...pick<Value>(old[name], null), ...(fresh[name] ?? [])];
  const metrics: Record<string, Value[]> = {};
  for (const name of new Set([...Object.keys(old.metrics), ...Object.keys(fresh.metrics)])) {
    const behind = fresh.metrics[name] ?? fresh.step.map(() => null);
    metrics[name] = [...pick<Value>(old.metrics[name], null), ...behind];
  }
  return {
    next: fresh.next,
    attempt: [...pick(old.attempt, 0), ...fresh.attempt],
    step: [...pick(old.step, 0), ...fresh.step],
    started_at: join("started_at"),
    ended_at: join("ended_at"),
    num_tokens_trained: join("num_tokens_trained"),
    metrics,
  };
}

/** Runs that are kept when no page shows them. Metrics of 2,000 steps are some megabytes. */
const KEPT = 12;

/** The steps that were read, by run. */
export const steps = new Store<StepColumns>(KEPT, async (run, old = NO_STEPS) => {
  const fresh = await get<StepColumns>(runPath(run, "steps"), { since: old.next || null });
  // Fewer rows than before: another run is in the folder now.
  return fresh.next < old.next ? get<StepColumns>(runPath(run, "steps")) : mergeSteps(old, fresh);
});

/** Returns the steps of several runs, in their order; null for those still to be read. Live runs grow. */
export const useStepsOf = (runs: string[]): (StepColumns | null)[] => useReads(runs).map(({ data }) => data ?? null);

function useReads(runs: string[]): Resource<StepColumns>[] {
  useEvents(runs);
  return useStored(steps, runs, useVersions(runs, "steps"));
}

/** Returns the steps of a run, null while they are read for the first time. */
export function useSteps(run: string | null): { steps: StepColumns | null; error: Error | null } {
  const [read] = useReads(run === null ? [] : [run]);
  return { steps: read?.data ?? null, error: read?.error ?? null };
}

/** Returns the seconds that training has taken up to each step's end, without the gaps between attempts. */
export function trainingSeconds(steps: StepColumns): Value[] {
  let sum = 0;
  let previous: number | null = null;
  return steps.step.map((_, row) => {
    const start = steps.started_at[row];
    const end = steps.ended_at[row];
    if (start == null || end == null) return null;
    const sameAttempt = row > 0 && steps.attempt[row] === steps.attempt[row - 1];
    sum += end - (sameAttempt && previous !== null ? previous : start);
    previous = end;
    return sum;
  });
}

/** Returns the trained tokens up to and with each step. */
export function trainedTokens(steps: StepColumns): Value[] {
  let sum = 0;
  return steps.num_tokens_trained.map((tokens) => (sum += tokens ?? 0));
}

/** Returns when a range of steps began and ended; nulls without a range or its steps. */
export function timesOf(steps: StepColumns | null, range: { from: number; to: number } | null): { start: Value; end: Value } {
  if (!steps || !range) return { start: null, end: null };
  const rows = steps.step.flatMap((step, row) => (step >= range.from && step <= range.to ? [row] : []));
  return { start: steps.started_at[rows[0] ?? -1] ?? null, end: steps.ended_at[rows.at(-1) ?? -1] ?? null };
}

/** Returns the values of a metric or of a metric-like column, one for each step. */
export function column(steps: StepColumns, metric: string): Value[] {
  return steps.metrics[metric] ?? steps.step.map(() => null);
}

/** Training stood still to copy a checkpoint: a metric of the step after it. */
const COPY = "timing_checkpoint";

interface CheckpointMark {
  /** Finished steps. */
  step: number;
  /** Whether its files are in the run directory. */
  kept: boolean;
}

/** Returns the checkpoints that were written, or are there, in the order of their steps. Without `written`, the steps tell which were. */
export function checkpointMarks(steps: StepColumns | null, kept: number[], written?: number[] | null): CheckpointMark[] {
  const copied = () => (steps?.metrics[COPY] ?? []).flatMap((seconds, row) => (seconds !== null && seconds > 0 ? [steps!.step[row]!] : []));
  return [...new Set([...(written ?? copied()), ...kept])].sort((a, b) => a - b).map((step) => ({ step, kept: kept.includes(step) }));
}
