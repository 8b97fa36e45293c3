/** Groups the answers of a prompt by step, and describes them in words. */

import { mean } from "d3-array";
import { count, percent } from "../../format";
import type { GroupSample, Prompt, SampleRow } from "../../types";

/** How often prompts were solved: the counts of a page of prompts by their names. */
export const MARKS = ["total", "never", "sometimes", "always"] as const;

export const PROMPT_SORTS: [value: string, title: string][] = [
  ["first_step", "first seen"],
  ["-last_step", "last seen"],
  ["pass_rate", "lowest pass rate"],
  ["-pass_rate", "highest pass rate"],
  ["-n", "most answers"],
  ["-first_right", "last to be solved"],
];

type Marked = Pick<Prompt, "n" | "num_right">;

/** Returns the mark of a prompt in words; empty if only some of its answers are right. */
export function markOf({ n, num_right }: Marked): string {
  return num_right === 0 ? "never solved" : num_right === n ? "always solved" : "";
}

/** Returns a sentence about how often a prompt was answered right, and since which step. */
export function verdict(prompt: Prompt): string {
  const steps = `${count(prompt.steps.length)} ${prompt.steps.length === 1 ? "step" : "steps"}`;
  const answers = `${count(prompt.n)} ${prompt.n === 1 ? "answer" : "answers"} at ${steps}`;
  if (prompt.num_right === 0) return `Never solved in ${answers}.`;
  if (prompt.num_right === prompt.n) return `Always solved in ${answers}.`;
  return `${percent(prompt.pass_rate, 0)} of ${answers} are right, the first ${prompt.first_right! < 0 ? "before training" : `at step ${count(prompt.first_right)}`}.`;
}

export interface PromptGroup {
  attempt: number;
  step: number;
  group: number;
  eval: string | null;
  environment: string;
  status: string;
  reason: string | null;
  reward_mean: number | null;
  samples: GroupSample[];
}

/** Returns the answers of a prompt by step and group, in this order. The answers of an eval are one group. */
export function groupsOf(rows: readonly SampleRow[]): PromptGroup[] {
  const groups = new Map<string, PromptGroup>();
  for (const row of rows) {
    const key = [row.attempt, row.step, row.eval_name ?? row.group_id].join("/");
    const { attempt, step, environment, status, reason } = row;
    let group = groups.get(key);
    if (!group) groups.set(key, (group = { attempt, step, group: row.group_id, eval: row.eval_name, environment, status, reason, reward_mean: null, samples: [] }));
    if (status === "kept") [group.status, group.reason] = [status, null];
    group.samples.push({ id: row.sample_id, reward: row.reward, advantage: row.advantage, status, length: row.completion_tokens, logprob_sum: null, ratio: null, completion: row.completion ?? "", metrics: row.metrics });
  }
  for (const group of groups.values()) group.reward_mean = mean(group.samples, (sample) => sample.reward) ?? null;
  return [...groups.values()].sort((a, b) => a.step - b.step || a.attempt - b.attempt || a.group - b.group);
}
