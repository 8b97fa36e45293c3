/** The charts of the overview: the user's choice and order, the same for all runs. */

import { useMemo } from "react";
import { useDocument } from "./documents";

/** Prefix of a chart that is one metric. */
const METRIC = "metric:";

/** Charts that the overview makes of several metrics, in the order that they begin with. */
export const STANDARD: { id: string; title: string }[] = [
  { id: "reward", title: "Reward" },
  { id: "signal", title: "Groups without signal" },
  { id: "entropy", title: "Entropy" },
  { id: "kl", title: "KL to engine" },
  { id: "time", title: "Step time" },
  { id: "gradient", title: "Gradient norm" },
  { id: "gini", title: "Reward Gini" },
  { id: "length", title: "Answer length" },
];
const FIRST = STANDARD.map((chart) => chart.id);

export const chartOf = (metric: string): string => METRIC + metric;

/** Returns the metric of a chart, or null for a standard one. */
export const metricOf = (chart: string): string | null => (chart.startsWith(METRIC) ? chart.slice(METRIC.length) : null);

/** Returns the charts that a document holds. */
export function parseCharts(value: unknown): string[] {
  const charts = (value as { charts?: unknown } | null | undefined)?.charts;
  return Array.isArray(charts) ? [...new Set(charts.filter((chart): chart is string => typeof chart === "string"))] : FIRST;
}

/** Returns the charts with one added at the end, or without it where it was. */
export const toggleChart = (charts: string[], chart: string): string[] => (charts.includes(chart) ? charts.filter((other) => other !== chart) : [...charts, chart]);

export function useOverviewCharts() {
  const { value, change } = useDocument<unknown>("overview");
  const charts = useMemo(() => parseCharts(value), [value]);
  return {
    charts,
    isPinned: (metric: string) => charts.includes(chartOf(metric)),
    pin: (metric: string) => change((old) => ({ charts: toggleChart(parseCharts(old), chartOf(metric)) })),
    set: (chosen: string[] | null) => change(() => (chosen ? { charts: chosen } : null)),
  };
}
