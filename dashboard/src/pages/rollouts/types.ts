/** Rows of the API that Rollouts reads. */

import type { Value } from "../../types";

export type { Group, GroupSample } from "../../types";

/** A sample without its texts. */
export interface SampleRow {
  attempt: number;
  sample_id: string;
  group_id: number;
  sample_index: number;
  environment: string;
  status: string;
  reason: string | null;
  step: number;
  reward: Value;
  advantage: Value;
  stop_reason: string | null;
  num_turns: Value;
  prompt_tokens: Value;
  completion_tokens: Value;
  start_version: Value;
  end_version: Value;
  age: Value;
  server: Value;
  lane: Value;
  started_at: Value;
  generated_at: Value;
  finished_at: Value;
  eval_name: string | null;
  metrics: Record<string, Value>;
  tags: Record<string, string>;
  /** Starts of the texts, where the server sends them. */
  prompt?: string;
  completion?: string;
}

export type Facets = Record<string, { value: string; count: number }[]>;

export interface SamplePage {
  total: number;
  rows: SampleRow[];
  facets: Facets;
}

/** A turn with the arrays of its tokens, where they were kept. */
export interface DetailTurn {
  turn: number;
  role: string;
  text: string;
  num_tokens?: Value;
  tokens?: string[] | null;
  token_ids?: number[] | null;
  logprobs?: Value[] | null;
  trainer_logprobs?: Value[] | null;
  entropies?: Value[] | null;
  versions?: Value[] | null;
  mask?: (number | boolean)[] | null;
  started_at?: Value;
  ended_at?: Value;
  restarts?: boolean | null;
  divergence?: string | null;
}

export interface ToolCall {
  turn: Value;
  name: string;
  arguments: string | null;
  result: string | null;
  error: string | null;
  seconds: Value;
}

export interface Detail extends SampleRow {
  prompt_text: string;
  completion_text: string;
  golden: Record<string, string>;
  turns: DetailTurn[];
  tool_calls: ToolCall[];
  info: unknown;
  info_turns: unknown;
  failure_kind: string | null;
  failure_message: string | null;
  penalty: Value;
  environment_tokens: Value;
  num_retries: Value;
  wasted_tokens: Value;
  divergences: Record<string, Value>;
  /** Spans of its requests and rewards. */
  spans?: { name: string; start: number; end: number }[];
}
