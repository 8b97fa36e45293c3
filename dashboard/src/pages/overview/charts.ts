/** The standard charts of the overview. A chart without a value is left out. */

import { max } from "d3-array";
import type { ChartProps, Line } from "../../charts/props";
import { bandsOf, linesOf, reached } from "../../charts/data";
import { declaredRange } from "../../charts/sources";
import type { DrawnRun } from "../../charts/runs";
import { smooth, stack, smoothingFor } from "../../charts/math";
import { NONE, number } from "../../format";
import { column } from "../../state/steps";
import type { Distribution, RunInfo, StepColumns, Value } from "../../types";

export const keepOf = (steps: StepColumns): number => smoothingFor(steps.step.length);

const has = (run: DrawnRun, metric: string): boolean => run.steps.metrics[metric]?.some((value) => value !== null) ?? false;

/** An exported file has 6 digits of each share, in percent: what is left of three of them may be this much above 0. */
const ROUNDING = 1e-3;

/** Returns the standard charts of runs by their ids. */
export function standardCharts(runs: DrawnRun[], info: RunInfo, reward: Distribution | undefined): Map<string, ChartProps> {
  const first = runs[0]!;
  const { steps, x } = first;
  const get = (metric: string) => column(steps, metric);
  const keep = keepOf(steps);
  const line = (metric: string) => linesOf(runs, metric, keep);
  const out = new Map<string, ChartProps>();
  const simple = (id: string, title: string, unit: string, metric: string, more: Partial<ChartProps> = {}) => {
    if (runs.some((run) => has(run, metric))) out.set(id, { title, unit, x, lines: line(metric), ...more });
  };

  const rewardLines = linesOf(runs, "reward/all_groups/mean", keep);
  const bands = bandsOf(first, reward, "percentiles", keep).slice(1);
  if (rewardLines[0] && bands.length > 0) rewardLines[0].bands = bands;
  if (rewardLines[0] && runs.length === 1) rewardLines[0].direct = "all";
  if (has(first, "reward/total/mean"))
    rewardLines.push({
      label: "kept",
      color: "--ink2",
      values: smooth(get("reward/total/mean"), keep),
      measured: get("reward/total/mean"),
      x,
      dash: [3, 3],
      width: 1.2,
      head: false,
      silent: true,
      direct: runs.length === 1 ? "kept" : undefined,
    });
  out.set("reward", {
    title: "Reward",
    unit: "all groups",
    note: bands.length ? "p25 to p75 of the kept" : undefined,
    x,
    lines: rewardLines,
    ...reached(declaredRange("reward/all_groups/mean", { environment: "", tag: "" }, info.environments), rewardLines),
  });

  if (has(first, "discarded/zero_advantage/pct")) {
    const zero = get("discarded/zero_advantage_all_zero/pct");
    const positive = get("discarded/zero_advantage_all_positive/pct");
    const total = get("discarded/zero_advantage/pct");
    const same = total.map((value, i) => (value === null ? null : Math.max(0, value - (zero[i] ?? 0) - (positive[i] ?? 0))));
    const parts: [string, string, Value[]][] = [
      ["all 0", "--neg", zero],
      ["all above 0", "--pos", positive],
      ["all equal", "--q", same],
    ];
    const used = parts.filter(([, , values]) => values.some((value) => value !== null && value > ROUNDING));
    const edges = stack(used.map(([, , values]) => values));
    const lines: Line[] = used.map(([label, color], i) => ({ label, color, values: edges[i]!, measured: used[i]![2], x, area: true, direct: label, silent: true }));
    if (lines.length === 0) lines.push({ label: "none", color: "--ink2", values: total, x });
    out.set("signal", {
      title: "Zero advantage",
      unit: "% of groups",
      x,
      lines,
      low: 0,
      read: (at) => readRow(steps, total, at, (value) => `${number(value, 0)}\u202f%`),
    });
  }

  simple("entropy", "Entropy", "nats a token", "entropy", { low: 0 });
  simple("kl", "KL to engine", "nats a token", "kl_divergence_inference", { low: 0 });

  if (has(first, "timing_step_total")) {
    const total = get("timing_step_total");
    const backward = get("timing_backward_total");
    const reference = get("timing_reference_logprobs_total");
    const forward = get("timing_forward_total").map((value, i) => (value === null ? null : value + (reference[i] ?? 0)));
    const background = get("weight_sync/background");
    const sync = get("timing_weight_sync_total").map((value, i) => (background[i] ? 0 : value));
    const waits = get("timing_waiting_for_data");
    const other = total.map((value, i) =>
      value === null ? null : Math.max(0, value - (backward[i] ?? 0) - (forward[i] ?? 0) - (sync[i] ?? 0) - (waits[i] ?? 0)),
    );
    const parts: [string, string, Value[]][] = [
      ["backward", "--bw", backward],
      ["forward", "--fw", forward],
      ["other", "--red", other],
      ["sync", "--sync", sync],
      ["waits", "--q", waits],
    ];
    const used = parts.filter(([, , values]) => values.some((value) => value !== null));
    const edges = stack(used.map(([, , values]) => values));
    out.set("time", {
      title: "Step time",
      unit: "s, stacked",
      x,
      lines: used.map(([label, color], i) => ({ label, color, values: edges[i]!, measured: used[i]![2], x, area: true, direct: label, silent: true })),
      low: 0,
      read: (at) => readRow(steps, total, at, (value) => `${number(value, 2)} s`),
    });
  }

  const clip = info.config.grad_clip;
  const largest = max(runs, (run) => max(column(run.steps, "grad_norm"), (value) => value)) ?? 0;
  const marked = typeof clip === "number" && largest > 0.4 * clip;
  simple("gradient", "Gradient norm", marked ? `clip at ${number(clip as number)}` : "", "grad_norm", {
    low: 0,
    marks: marked ? [{ y: clip as number }] : [],
    high: marked ? Math.max(1.2 * (clip as number), 1.06 * largest) : undefined,
  });
  simple("gini", "Reward Gini", "in a group", "reward/gini_mean", { low: 0, high: 1 });
  simple("length", "Answer length", "tokens, mean", "rollouts/tokens_completion/mean");
  return out;
}

function readRow(steps: StepColumns, values: Value[], at: number | null, write: (value: number) => string): string {
  const row = at === null ? values.length - 1 : steps.step.indexOf(at);
  const value = values[row];
  return value == null ? NONE : write(value);
}
