/** What the API returns. Times are Unix seconds; a number that was not measured is null. */

export type Value = number | null;

export interface RunRow {
  id: string;
  name: string;
  status: string;
  live: boolean;
  started_at: Value;
  duration: Value;
  attempt: number;
  steps: number;
  num_steps: Value;
  reward_first: Value;
  reward_last: Value;
  heldout_before: Value;
  heldout_after: Value;
  error: string | null;
  project: string;
  tags: string[];
  model: string | null;
  algorithm: string | null;
  environments: string[];
  max_step: Value;
}

export interface Problem {
  path: string;
  problem: string;
}

export interface Runs {
  runs: RunRow[];
  problems: Problem[];
  roots: string[];
}

export interface Attempt {
  attempt: number;
  started_at: Value;
  first_step: Value;
  host: string | null;
  pid: Value;
  config_hash: string | null;
  git_commit: string | null;
  git_dirty: boolean | null;
  versions: Record<string, string>;
  topology: Record<string, string>;
  notes: string[];
}

export interface Environment {
  key: string;
  name: string;
  purpose: string;
  weight: Value;
  num_samples: Value;
  is_multi_turn: boolean | null;
  reward_min: Value;
  reward_max: Value;
  metrics_ranges: Record<string, { min: Value; max: Value }>;
  tags_options: Record<string, string[]>;
}

export interface RunInfo {
  info: RunRow;
  config: Record<string, unknown>;
  user_set: string[];
  attempts: Attempt[];
  environments: Environment[];
  result: Record<string, unknown>;
}

/** Rows of steps as columns; `next` is the cursor of the following request. */
export interface StepColumns {
  next: number;
  attempt: number[];
  step: number[];
  started_at: Value[];
  ended_at: Value[];
  num_tokens_trained: Value[];
  metrics: Record<string, Value[]>;
}

interface Sentence {
  text: string;
  metrics: string[];
}

interface HealthCell {
  name: string;
  title: string;
  metric: string;
  latest: Value;
  unit: string;
  words: string;
  attention: boolean;
}

export interface Alert {
  step: Value;
  time: Value;
  title: string;
  text: string;
  level: string;
  resolved: boolean;
}

export interface Health {
  verdict: Sentence[];
  cells: HealthCell[];
  alerts: Alert[];
  progress: { step: number; num_steps: Value; seconds_left: Value };
}

export interface Distribution {
  step: number[];
  n: number[];
  mean: Value[];
  std: Value[];
  min: Value[];
  max: Value[];
  p5: Value[];
  p25: Value[];
  p50: Value[];
  p75: Value[];
  p95: Value[];
}

export interface EvalRow {
  attempt: number;
  eval_id: string;
  name: string;
  source: string;
  status: string;
  error: string | null;
  step: number;
  version: number;
  started_at: Value;
  ended_at: Value;
  num_items: number;
  num_completions: number;
  num_scored: number;
  temperature: Value;
  held_out: boolean | null;
  metric: string | null;
  accuracy: Value;
  accuracy_low: Value;
  accuracy_high: Value;
  gain: Value;
  gain_low: Value;
  gain_high: Value;
  metrics: Record<string, Value>;
}

export interface Comparison {
  /** Settings that differ, with the value of each run in the order asked for. */
  config: { key: string; values: unknown[] }[];
}
