/** The steps of a run as columns, read once and then only what is new. */

import { useEffect, useSyncExternalStore } from "react";
import { get, runPath } from "../api";
import type { StepColumns, Value } from "../types";
import { useVersion } from "./live";

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

interface Entry {
  steps: StepColumns | null;
  error: Error | null;
  listeners: Set<() => void>;
  version: string | null;
  running: boolean;
}

const entries = new Map<string, Entry>();

function entryOf(run: string): Entry {
  let entry = entries.get(run);
  if (!entry) {
    entry = { steps: null, error: null, listeners: new Set(), version: null, running: false };
    entries.set(run, entry);
  }
  return entry;
}

async function load(run: string, entry: Entry, version: string): Promise<void> {
  if (entry.running) return;
  entry.running = true;
  entry.version = version;
  try {
    const old = entry.steps ?? NO_STEPS;
    entry.steps = mergeSteps(old, await get<StepColumns>(runPath(run, "steps"), { since: old.next || null }));
    entry.error = null;
  } catch (error) {
    entry.error = error as Error;
  }
  entry.running = false;
  revision += 1;
  for (const listener of entry.listeners) listener();
}

let revision = 0;

/** Returns the steps of a run, null while they are read for the first time. */
export function useSteps(run: string | null): { steps: StepColumns | null; error: Error | null } {
  const version = useVersion(run, "steps");
  const revision = useRevision(run === null ? [] : [run]);
  useEffect(() => {
    if (run === null) return;
    const entry = entryOf(run);
    if (entry.version !== version) void load(run, entry, version);
  }, [run, version, revision]);
  const entry = run === null ? undefined : entries.get(run);
  return { steps: entry?.steps ?? null, error: entry?.error ?? null };
}

function useRevision(runs: string[]): number {
  const key = runs.join("\n");
  return useSyncExternalStore(
    (listener) => {
      const mine = key === "" ? [] : key.split("\n").map(entryOf);
      for (const entry of mine) entry.listeners.add(listener);
      return () => mine.forEach((entry) => entry.listeners.delete(listener));
    },
    () => revision,
  );
}

/** Returns the steps of several runs, in their order; null for those still to be read. */
export function useStepsOf(runs: string[]): (StepColumns | null)[] {
  const key = runs.join("\n");
  useRevision(runs);
  useEffect(() => {
    for (const run of key === "" ? [] : key.split("\n")) {
      const entry = entryOf(run);
      if (entry.version === null) void load(run, entry, "");
    }
  }, [key]);
  return runs.map((run) => entries.get(run)?.steps ?? null);
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

/** Returns the values of a metric or of a metric-like column, one for each step. */
export function column(steps: StepColumns, metric: string): Value[] {
  return steps.metrics[metric] ?? steps.step.map(() => null);
}

/** Returns the mean of the last values that were measured; null without any. */
export function latestMean(values: Value[], window = 10): Value {
  const last = values.slice(-window).filter((value): value is number => value !== null);
  return last.length ? last.reduce((sum, value) => sum + value, 0) / last.length : null;
}
