/** Health of a run: verdict, health cells, charts; alerts and config at the side. */

import { useMemo } from "react";
import { runPath } from "../api";
import { axisEnd, bandsOf, type DrawnRun, linesOf, useDrawnRuns } from "../charts/data";
import { Chart, type ChartProps, type Line } from "../charts/Chart";
import { smooth, stack } from "../charts/math";
import { Spark } from "../charts/Spark";
import { NONE, number, unbroken } from "../format";
import { Failure, Quiet } from "../shell/App";
import { useVersion } from "../state/live";
import { useLayouts } from "../state/layouts";
import { useResource } from "../state/resource";
import { useHealth, useRunId, useRunInfo, useStatus } from "../state/run";
import { column, useSteps } from "../state/steps";
import { elsewhere, go, usePlace, useRange } from "../state/url";
import type { Distribution, Health, RunInfo, StepColumns, Value } from "../types";
import { Side } from "./overview/Side";
import "./overview.css";

/** Smoothing of up to 100 steps; longer runs have as many bends. */
const KEEP = 0.6;
const keepOf = (steps: StepColumns): number => Math.min(0.98, 1 - (1 - KEEP) * Math.min(1, 100 / Math.max(1, steps.step.length)));

export function Overview() {
  const run = useRunId();
  const info = useRunInfo(run);
  const health = useHealth(run);
  const { steps, error } = useSteps(run);
  if (error && !steps) return <Failure error={error} />;
  if (!info.data || !steps) return null;
  return (
    <div className="overview">
      <div className="left">
        {health.data && <Verdict health={health.data} />}
        {steps.step.length === 0 ? (
          <Waiting info={info.data} />
        ) : (
          <>
            {health.data && <Strip health={health.data} steps={steps} />}
            <Charts info={info.data} steps={steps} />
          </>
        )}
      </div>
      <Side info={info.data} health={health.data} />
    </div>
  );
}

function Waiting({ info }: { info: RunInfo }) {
  const { live } = useStatus(info.info.id);
  return live ? (
    <Quiet title="No step yet." text="The charts begin when the first training step has ended. This page updates by itself." />
  ) : (
    <Quiet title="This run ended before its first step." text="Its logs show what it did until then." />
  );
}

/** Marks the numbers of a sentence. */
function strong(text: string) {
  return unbroken(text).split(/([−-]?\d+(?:[.,]\d+)?(?:[ \u202f]?%)?)/).map((part, i) => (i % 2 ? <b key={i}>{part}</b> : part));
}

function Verdict({ health }: { health: Health }) {
  const [first, ...rest] = health.verdict;
  if (!first) return null;
  return (
    <section className="verdict">
      <h1 title={first.metrics.length ? `From ${first.metrics.join(", ")}` : undefined}>{unbroken(first.text)}</h1>
      {rest.length > 0 && (
        <p>
          {rest.map((sentence, i) => (
            <span key={i} title={sentence.metrics.length ? `From ${sentence.metrics.join(", ")}` : undefined}>
              {strong(sentence.text)}{" "}
            </span>
          ))}
        </p>
      )}
    </section>
  );
}

function Strip({ health, steps }: { health: Health; steps: StepColumns }) {
  const place = usePlace();
  return (
    <section className="strip" aria-label="Health">
      {health.cells.map((cell) => {
        const open = () => go(elsewhere(place, { page: "metrics" }, { metric: cell.metric.split(" / ")[0]! }));
        return (
          <button key={cell.name} className={`hc ${cell.attention ? "bad" : ""}`} onClick={open} title={cell.metric}>
            <span className="l cut">{cell.title}</span>
            <span className="n">
              {cell.latest === null ? NONE : number(cell.latest)}
              {cell.latest !== null && cell.unit === "%" ? "\u202f%" : ""}
            </span>
            <Spark values={cellValues(cell.metric, steps)} color={cell.attention ? "var(--warn)" : "var(--ink)"} keep={keepOf(steps)} />
            <span className="wd cut">{cell.words}</span>
          </button>
        );
      })}
    </section>
  );
}

/** Returns the values of a health cell's line. A cell may divide one metric by another: `a / b`. */
function cellValues(metric: string, steps: StepColumns): Value[] {
  const [top, bottom] = metric.split(" / ");
  const values = column(steps, top!);
  if (!bottom) return values;
  const by = column(steps, bottom);
  return values.map((value, i) => (value === null || !by[i] ? null : value / by[i]!));
}

function Charts({ info, steps }: { info: RunInfo; steps: StepColumns }) {
  const run = info.info.id;
  const [zoom, setZoom] = useRange();
  const { live } = useStatus(run);
  const { pinned, setPinned } = useLayouts();
  const reward = useResource<Distribution>(runPath(run, "distribution"), { metric: "reward" }, useVersion(run, "step_stats", "steps")).data;
  const runs = useDrawnRuns(info, steps, "step");
  const charts = useMemo(() => defaultCharts(runs, info, reward), [runs, info, reward]);
  const common: Pick<ChartProps, "zoom" | "onZoom" | "xEnd"> = {
    zoom,
    onZoom: (next) => setZoom(next && { from: Math.max(0, Math.round(next.from)), to: Math.round(next.to) }),
    xEnd: Math.max(axisEnd((steps.step.at(-1) ?? -1) + 1, live ? info.info.num_steps : null), ...runs.map((one) => one.x.at(-1) ?? 0)),
  };
  const place = usePlace();
  const extra = pinned.filter((metric) => runs.some((one) => one.steps.metrics[metric]));
  return (
    <section className="grid" aria-label="Charts">
      {charts.map((chart) => (
        <Chart key={chart.title} {...chart} {...common} />
      ))}
      {extra.map((metric) => (
        <Pinned key={metric} metric={metric} runs={runs} common={common} open={() => go(elsewhere(place, { page: "metrics" }, { metric }))} remove={() => setPinned(pinned.filter((other) => other !== metric))} />
      ))}
    </section>
  );
}

function Pinned({ metric, runs, common, open, remove }: { metric: string; runs: DrawnRun[]; common: Partial<ChartProps>; open: () => void; remove: () => void }) {
  const lines = useMemo(() => linesOf(runs, metric, keepOf(runs[0]!.steps)), [runs, metric]);
  return (
    <Chart
      title={metric}
      x={runs[0]!.x}
      lines={lines}
      onTitle={open}
      {...common}
      after={
        <button className="over" onClick={remove} aria-label={`Take ${metric} off the overview`} title="Take off the overview">
          ×
        </button>
      }
    />
  );
}

const has = (run: DrawnRun, metric: string): boolean => run.steps.metrics[metric]?.some((value) => value !== null) ?? false;

/** Returns the charts that a run of any kind should begin with; those without a value are left out. */
function defaultCharts(runs: DrawnRun[], info: RunInfo, reward: Distribution | undefined): ChartProps[] {
  const first = runs[0]!;
  const { steps, x } = first;
  const get = (metric: string) => column(steps, metric);
  const keep = keepOf(steps);
  const line = (metric: string) => linesOf(runs, metric, keep);
  const out: ChartProps[] = [];
  const simple = (title: string, unit: string, metric: string, more: Partial<ChartProps> = {}) => {
    if (runs.some((run) => has(run, metric))) out.push({ title, unit, x, lines: line(metric), ...more });
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
      x,
      dash: [3, 3],
      width: 1.2,
      head: false,
      silent: true,
      direct: runs.length === 1 ? "kept" : undefined,
    });
  const range = info.environments.filter((environment) => environment.purpose === "training");
  const oneRange = range.length > 0 && range.every((environment) => environment.reward_min === range[0]!.reward_min && environment.reward_max === range[0]!.reward_max);
  out.push({
    title: "Reward",
    unit: bands.length ? "mean of all groups, p25 to p75 of the kept" : "mean of all groups",
    x,
    lines: rewardLines,
    low: oneRange ? (range[0]!.reward_min ?? undefined) : undefined,
    high: oneRange ? (range[0]!.reward_max ?? undefined) : undefined,
    right: runs.length === 1 ? 44 : 8,
  });

  if (has(first, "discarded/zero_advantage/pct")) {
    const wrong = get("discarded/zero_advantage_all_zero/pct");
    const right = get("discarded/zero_advantage_all_positive/pct");
    const total = get("discarded/zero_advantage/pct");
    const same = total.map((value, i) => (value === null ? null : Math.max(0, value - (wrong[i] ?? 0) - (right[i] ?? 0))));
    const parts: [string, string, Value[]][] = [
      ["all wrong", "--neg", wrong],
      ["all right", "--pos", right],
      ["all the same", "--q", same],
    ];
    const used = parts.filter(([, , values]) => values.some((value) => value !== null && value > 1e-6));
    const edges = stack(used.map(([, , values]) => values));
    const lines: Line[] = used.map(([label, color], i) => ({ label, color, values: edges[i]!, x, area: true, direct: label, silent: true }));
    if (lines.length === 0) lines.push({ label: "none", color: "--ink2", values: total, x });
    out.push({
      title: "Groups without signal",
      unit: "%",
      x,
      lines,
      low: 0,
      right: used.length ? 70 : 8,
      read: (at) => readRow(steps, total, at, (value) => `${number(value, 0)}\u202f%`),
    });
  }

  simple("Entropy", "nats a token", "entropy", { low: 0 });
  simple("KL to engine", "nats a token", "kl_divergence_inference", { low: 0 });

  if (has(first, "timing_step_total")) {
    const total = get("timing_step_total");
    const backward = get("timing_backward_total");
    const forward = get("timing_forward_total");
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
    const edges = stack(parts.map(([, , values]) => values));
    out.push({
      title: "Step time",
      unit: "s, stacked",
      x,
      lines: parts.map(([label, color], i) => ({ label, color, values: edges[i]!, x, area: true, direct: label, silent: true })),
      low: 0,
      right: 70,
      read: (at) => readRow(steps, total, at, (value) => `${number(value, 2)} s`),
    });
  }

  const clip = info.config.grad_clip;
  const largest = Math.max(...runs.flatMap((run) => column(run.steps, "grad_norm").map((value) => value ?? 0)));
  const marked = typeof clip === "number" && largest > 0.4 * clip;
  simple("Gradient norm", marked ? `clip at ${number(clip as number)}` : "", "grad_norm", {
    low: 0,
    marks: marked ? [{ y: clip as number }] : [],
    high: marked ? Math.max(1.2 * (clip as number), 1.06 * largest) : undefined,
  });
  simple("Reward Gini", "in a group", "reward/gini_mean", { low: 0, high: 1 });
  simple("Answer length", "tokens, mean", "rollouts/tokens_completion/mean");
  return out;
}

function readRow(steps: StepColumns, values: Value[], at: number | null, write: (value: number) => string): string {
  const row = at === null ? values.length - 1 : steps.step.indexOf(at);
  const value = values[row];
  return value == null ? NONE : write(value);
}
