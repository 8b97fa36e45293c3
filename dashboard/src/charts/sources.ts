/** Where the numbers of a chart come from: step metrics, or statistics of the samples that a filter chooses. */

import type { Environment, Value } from "../types";

/** The samples that charts show: all, those of an environment, or those with a tag (`name=value`). */
export interface Filter {
  environment: string;
  tag: string;
}

export const isAll = (filter: Filter): boolean => filter.environment === "" && filter.tag === "";

const STATISTICS = ["mean", "std", "min", "max", "gini"] as const;
export type Statistic = (typeof STATISTICS)[number];

/** A statistic of a number of the samples. */
interface SampleStatistic {
  /** As in the table `step_stats`. */
  metric: string;
  /** Empty for all samples. */
  environment: string;
  statistic: Statistic;
}

const NUMBERS: Record<string, string> = {
  "reward/total": "reward",
  "advantage/all": "advantage",
  "staleness/steps": "age",
  "rollouts/turns": "num_turns",
  "rollouts/tokens_prompt": "prompt_tokens",
  "rollouts/tokens_completion": "completion_tokens",
  "rollouts/tokens_environment": "environment_tokens",
  "rollouts/tokens_total": "total_tokens",
};
const GINI: Record<string, string> = { "reward/gini_mean": "reward", group_length_gini_mean: "completion_tokens" };
/** Groups of the section `reward` that are no environments. */
const NOT_ENVIRONMENTS = ["total", "all_groups", "overlong_penalty"];

/** Returns which statistic of the samples a step metric is; null if it is none. */
export function statisticOf(name: string): SampleStatistic | null {
  const gini = GINI[name];
  if (gini) return { metric: gini, environment: "", statistic: "gini" };
  const [, base = name, last = "mean"] = /^(.+)\/(mean|std|min|max|gini)$/.exec(name) ?? [];
  const statistic = last as Statistic;
  const discarded = /^discarded\/all\/(prompt_tokens|tokens|total_tokens|reward)_(mean|std|min|max)$/.exec(name);
  if (discarded) return { metric: `discarded/${discarded[1] === "tokens" ? "completion_tokens" : discarded[1]}`, environment: "", statistic: discarded[2] as Statistic };
  const sample = /^sample_metrics\/([^/]+)\/(.+)$/.exec(base);
  if (sample) return { metric: `sample_metrics/${sample[2]}`, environment: sample[1]!, statistic };
  if (base === name) return null;
  const metric = NUMBERS[base];
  if (metric) return { metric, environment: "", statistic };
  const reward = /^reward\/([^/]+)$/.exec(base);
  return reward && !NOT_ENVIRONMENTS.includes(reward[1]!) ? { metric: "reward", environment: reward[1]!, statistic } : null;
}

/** Whether steps may lack a metric because they have none of its samples or tokens: an environment's, or those of an age. */
export const isSparse = (name: string): boolean => /^(environment|sample_metrics|staleness\/age_[^/]*|discarded|masked|cancelled|returned|retried|lost)\//.test(name) || Boolean(statisticOf(name)?.environment);

type Source =
  | { kind: "metric"; name: string; filtered: boolean }
  | ({ kind: "samples"; tag: string } & SampleStatistic);

/** Returns where a chart of a metric takes its values under a filter; null if the filter leaves nothing of it. */
export function sourceOf(name: string, filter: Filter, known: (name: string) => boolean): Source | null {
  if (isAll(filter)) return { kind: "metric", name, filtered: true };
  const statistic = statisticOf(name);
  if (statistic) {
    const { environment } = statistic;
    if (environment && filter.environment && environment !== filter.environment) return null;
    return { kind: "samples", ...statistic, environment: environment || filter.environment, tag: filter.tag };
  }
  const own = `environment/${filter.environment}/${name}`;
  if (!filter.tag && known(own)) return { kind: "metric", name: own, filtered: true };
  const other = /^environment\/([^/]+)\//.exec(name);
  if (other && filter.environment && other[1] !== filter.environment) return null;
  return { kind: "metric", name, filtered: Boolean(other) && !filter.tag };
}

export interface DeclaredRange {
  low?: number;
  high?: number;
}

/**
 * Returns the range that the environments of a run declare for a metric. Rewards of several environments have one only if all
 * declare it. Spreads and Gini coefficients have none.
 */
export function declaredRange(name: string, filter: Filter, environments: readonly Environment[]): DeclaredRange {
  const { metric, environment, statistic } = statisticOf(name) ?? (name === "reward/all_groups/mean" ? { metric: "reward", environment: "", statistic: "mean" as const } : {});
  if (metric === undefined || statistic === "std" || statistic === "gini") return {};
  const chosen = environment || filter.environment;
  const own = environments.filter((one) => one.purpose === "training" && (chosen === "" || one.name === chosen));
  const declared = own.map((one): [Value, Value] => {
    if (metric === "reward") return [one.reward_min, one.reward_max];
    const range = one.metrics_ranges[metric.replace(/^sample_metrics\//, "")];
    return [range?.min ?? null, range?.max ?? null];
  });
  const lows = declared.map(([low]) => low).filter((low) => low !== null);
  const highs = declared.map(([, high]) => high).filter((high) => high !== null);
  return {
    ...(lows.length > 0 && lows.length === own.length ? { low: Math.min(...lows) } : {}),
    ...(highs.length > 0 && highs.length === own.length ? { high: Math.max(...highs) } : {}),
  };
}
