/** A square is an answer: hollow is the lowest reward, full the highest. */

import { extent, sum as total } from "d3-array";
import type { Environment, Group, Value } from "../../types";
import { visible } from "../../text/hostile";

export interface RewardScale {
  low: number;
  high: number;
  /** Whether the environment does not declare the end, and the rewards do not look like shares. */
  guessedLow?: boolean;
  guessedHigh?: boolean;
}

/** The scale of an environment's rewards: as it declares, else as seen. Rewards of 0 to 1 are seen as that range. */
export function rewardScale(environment: Environment | undefined, rewards: readonly (number | null)[]): RewardScale {
  const [least = 0, most = 1] = extent(rewards.filter((reward): reward is number => reward !== null));
  const isShare = least === most || (least >= 0 && most <= 1);
  const low = environment?.reward_min ?? (isShare ? Math.min(0, least) : least);
  const high = environment?.reward_max ?? (isShare ? Math.max(1, most) : most);
  return { low, high: high > low ? high : low + 1, guessedLow: low !== (environment?.reward_min ?? 0), guessedHigh: high !== (environment?.reward_max ?? 1) };
}

/** Returns the scale of each environment, by its own answers. An eval may have the name of an environment that is trained on. */
export function rewardScales(environments: readonly Environment[], answers: readonly { environment: string | null; reward: Value }[]): (environment: string | null) => RewardScale {
  const scales = new Map<string | null, RewardScale>();
  const made = (name: string | null): RewardScale => {
    const own = environments.filter((one) => one.name === name);
    const declared = own.find((one) => one.purpose === "training") ?? own[0];
    return rewardScale(declared, answers.filter((one) => one.environment === name).map((one) => one.reward));
  };
  return (name) => {
    const scale = scales.get(name) ?? made(name);
    scales.set(name, scale);
    return scale;
  };
}

/** Level of the ramp from 0 (hollow) to 4 (full); only the lowest reward is hollow and only the highest full. */
export function level(reward: number | null, { low, high }: RewardScale): number | null {
  if (reward === null) return null;
  const share = (reward - low) / (high - low);
  if (share <= 0) return 0;
  if (share >= 1) return 4;
  return Math.min(3, Math.max(1, Math.round(share * 4)));
}

export const METRIC = "metric:";

/** Numbers that can fill squares, besides the metrics of the environment. */
export const SQUARES: [value: string, title: string][] = [
  ["reward", "reward"],
  ["length", "answer tokens"],
  ["advantage", "advantage"],
];

interface Answer {
  reward: Value;
  advantage: Value;
  metrics?: Record<string, Value>;
  length?: Value;
  completion_tokens?: Value;
}

/** Returns the number that fills the square of an answer. */
export function squareValue(answer: Answer, by: string): Value {
  if (by.startsWith(METRIC)) return answer.metrics?.[by.slice(METRIC.length)] ?? null;
  if (by === "length") return answer.length ?? answer.completion_tokens ?? null;
  return by === "advantage" ? answer.advantage : answer.reward;
}

/** How squares are filled: the number, and the ends of its scale in each environment. */
export interface Filling {
  by: string;
  scaleOf: (environment: string) => RewardScale;
}

/** Returns how a number fills squares. Rewards span the range of their environment, other numbers the shown values. */
export function fillingBy(by: string, rewards: Filling["scaleOf"], shown: readonly Answer[]): Filling {
  if (by === "reward") return { by, scaleOf: rewards };
  const values = shown.map((answer) => squareValue(answer, by)).filter((value): value is number => value !== null && Number.isFinite(value));
  const [low = Infinity, high = -Infinity] = extent(values);
  const scale = low < high ? { low, high } : { low: Math.min(low, 0) || 0, high: Number.isFinite(high) ? Math.max(high, 1) : 1 };
  return { by, scaleOf: () => scale };
}

/** Gini coefficient of the values, shifted so that the smallest is 0 when one is negative. */
export function gini(values: readonly number[]): number | null {
  if (values.length === 0) return null;
  const lowest = Math.min(...values);
  const sorted = values.map((value) => value - Math.min(0, lowest)).sort((a, b) => a - b);
  const sum = total(sorted);
  if (sum === 0) return 0;
  return (2 * total(sorted, (value, i) => (i + 1) * value)) / (sorted.length * sum) - (sorted.length + 1) / sorted.length;
}

/** The fate of a group in a word or two: why it was not trained. */
export function fate(group: Pick<Group, "status" | "reason" | "reward_mean">, scale: RewardScale): string {
  if (group.status === "kept") return "kept";
  if (group.reason === "zero_advantage") {
    if (group.reward_mean === scale.high && !scale.guessedHigh) return "all right";
    return group.reward_mean === scale.low && !scale.guessedLow ? "all wrong" : "all equal";
  }
  const words: Record<string, string> = { max_async: "too old", run_ended: "run ended" };
  return group.reason ? (words[group.reason] ?? visible(group.reason.replaceAll("_", " "))) : (group.status ?? "");
}
