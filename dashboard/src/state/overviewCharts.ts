/** The charts of the overview: the user's choice and order, the same for all runs. */

import { useMemo } from "react";
import { toggled } from "../lists";
import { useDocument } from "./documents";

/** Prefix of a chart that is one metric. */
const METRIC = "metric:";

/** Charts that the overview makes of several metrics, in the order that they begin with, each with its main metric. */
export const STANDARD: { id: string; title: string; metric: string }[] = [
  { id: "reward", title: "Reward", metric: "reward/all_groups/mean" },
  { id: "signal", title: "Zero advantage", metric: "discarded/zero_advantage/pct" },
  { id: "entropy", title: "Entropy", metric: "entropy" },
  { id: "kl", title: "KL to engine", metric: "kl_divergence_inference" },
  { id: "time", title: "Step time", metric: "timing_step_total" },
  { id: "gradient", title: "Gradient norm", metric: "grad_norm" },
  { id: "gini", title: "Reward Gini", metric: "reward/gini_mean" },
  { id: "length", title: "Answer length", metric: "rollouts/tokens_completion/mean" },
];
const FIRST = STANDARD.map((chart) => chart.id);

export const chartOf = (metric: string): string => METRIC + metric;

/** Returns the metric of a chart, or null for a standard one. */
export const metricOf = (chart: string): string | null => (chart.startsWith(METRIC) ? chart.slice(METRIC.length) : null);

/** Returns the metric that a chart opens. */
export const mainMetricOf = (chart: string): string | null => STANDARD.find((one) => one.id === chart)?.metric ?? metricOf(chart);

/** Returns the charts that a document holds. */
export function parseCharts(value: unknown): string[] {
  const charts = (value as { charts?: unknown } | null | undefined)?.charts;
  return Array.isArray(charts) ? [...new Set(charts.filter((chart): chart is string => typeof chart === "string"))] : FIRST;
}

export function useOverviewCharts() {
  const { value, change } = useDocument<unknown>("overview");
  const charts = useMemo(() => parseCharts(value), [value]);
  return {
    charts,
    isPinned: (metric: string) => charts.includes(chartOf(metric)),
    pin: (metric: string) => change((old) => ({ charts: toggled(parseCharts(old), chartOf(metric)) })),
    set: (chosen: string[] | null) => change(() => (chosen ? { charts: chosen } : null)),
  };
}
