/** Health of a run: verdict, health cells, charts; alerts and config at the side. */

import { useMemo, useState } from "react";
import { runPath } from "../../api";
import { Chart } from "../../charts/Chart";
import type { ChartProps } from "../../charts/props";
import { axisEnd, isEval, linesOf } from "../../charts/data";
import { type DrawnRun, metricNames, useDrawnRuns, useStepAxis } from "../../charts/runs";
import { Spark } from "../../charts/Spark";
import { embedded } from "../../embedded";
import { moment, NONE, number, unbroken } from "../../format";
import { Failure, useEnd } from "../../shell/Quiet";
import { Chooser, type Option } from "../../shell/Chooser";
import { useVersion } from "../../state/live";
import { chartOf, mainMetricOf, metricOf, STANDARD, useOverviewCharts } from "../../state/overviewCharts";
import { useResource } from "../../state/resource";
import { useHealth, useRunId, useRunInfo, useStatus } from "../../state/run";
import { column, useSteps } from "../../state/steps";
import { elsewhere, format, go, usePlace } from "../../state/url";
import type { Distribution, Health, RunInfo, Sentence, StepColumns, Value } from "../../types";
import { place as placeOfMetric, titleOf } from "../metrics/tree";
import { keepOf, standardCharts } from "./charts";
import { Costs } from "./Costs";
import { Now } from "./Now";
import { Outcome } from "./Outcome";
import { Side } from "./Side";
import "./overview.css";

export function Overview() {
  const run = useRunId();
  const info = useRunInfo(run);
  const health = useHealth(run);
  const { steps, error } = useSteps(run);
  const { live } = useStatus(run);
  if (error && !steps) return <Failure error={error} />;
  if (!info.data || !steps) return null;
  return (
    <div className="overview">
      <div className="left">
        {health.data && <Verdict health={health.data} info={info.data} steps={steps} />}
        {embedded && (
          <p className="exported s f">
            Exported {moment(embedded.written_at)} with {embedded.left_out.join("; ")}.
          </p>
        )}
        {live && <Now info={info.data} />}
        {steps.step.length === 0 ? (
          <Waiting live={live} />
        ) : (
          <>
            {health.data && <Strip health={health.data} steps={steps} />}
            {!embedded && <Costs run={run} />}
            <Charts info={info.data} steps={steps} />
          </>
        )}
      </div>
      <Side info={info.data} health={health.data} />
    </div>
  );
}

function Waiting({ live }: { live: boolean }) {
  const place = usePlace();
  const [why, look] = useEnd();
  const logs = (
    <a className="link" href={format(elsewhere(place, { page: "logs" }))}>
      Its logs
    </a>
  );
  return <p className="waiting d">{live ? <>The charts begin when the first training step has ended. {logs} show what it does until then.</> : <>{why} {look}</>}</p>;
}

/** Marks the numbers of a sentence. */
function strong(text: string) {
  return unbroken(text).split(/([−-]?\d+(?:[.,]\d+)?(?:[ \u202f]?%)?)/).map((part, i) => (i % 2 ? <b key={i}>{part}</b> : part));
}

function Verdict({ health, info, steps }: { health: Health; info: RunInfo; steps: StepColumns }) {
  const outcome = health.verdict.find((sentence) => sentence.is_outcome);
  const others = health.verdict.filter((sentence) => sentence !== outcome);
  // Failures and problems that need attention come before the outcome.
  const urgent = outcome && health.verdict[0] === outcome ? [] : others.splice(0, 1);
  const from = (sentence: Sentence) => (sentence.metrics.length ? `From ${sentence.metrics.join(", ")}` : undefined);
  return (
    <>
      {urgent.map((sentence) => (
        <section key={sentence.text} className="verdict">
          <h1 title={from(sentence)}>{unbroken(sentence.text)}</h1>
        </section>
      ))}
      <Outcome info={info} steps={steps} sentence={outcome} />
      {others.length > 0 && (
        <section className="verdict">
          <p>
            {others.map((sentence, i) => (
              <span key={i} title={from(sentence)}>
                {strong(sentence.text)}{" "}
              </span>
            ))}
          </p>
        </section>
      )}
    </>
  );
}

/** Steps over which the server takes the mean of a health cell, at most. */
const WINDOW = 10;

function Strip({ health, steps }: { health: Health; steps: StepColumns }) {
  const place = usePlace();
  const count = Math.min(WINDOW, steps.step.length);
  return (
    <section className="health" aria-label="Health">
      <p className="s f">Mean of the last {count === 1 ? "step" : `${count} steps`}</p>
      <div className="strip">
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
              <span className="wd">{cell.words}</span>
            </button>
          );
        })}
      </div>
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
  const { live } = useStatus(run);
  const { charts: chosen, set } = useOverviewCharts();
  const [choosing, choose] = useState(false);
  const reward = useResource<Distribution>(runPath(run, "distribution"), { metric: "reward" }, useVersion(run, "step_stats", "steps")).data;
  const runs = useDrawnRuns(info, steps, "step");
  const charts = useMemo(() => (runs.length > 0 ? standardCharts(runs, info, reward) : new Map<string, ChartProps>()), [runs, info, reward]);
  const names = useMemo(() => new Set(metricNames(runs)), [runs]);
  const common: Partial<ChartProps> = {
    ...useStepAxis(runs[0], "step"),
    xEnd: Math.max(axisEnd((steps.step.at(-1) ?? -1) + 1, live ? info.info.num_steps : null), ...runs.map((one) => one.x.at(-1) ?? 0)),
  };
  const place = usePlace();
  const shown = chosen.filter((id) => charts.has(id) || (metricOf(id) !== null && names.has(metricOf(id)!)));
  return (
    <section className="plots" aria-label="Charts">
      <div className="grid">
        {shown.map((id) => {
          const metric = metricOf(id);
          const standard = charts.get(id);
          const open = () => go(elsewhere(place, { page: "metrics" }, { metric: mainMetricOf(id)! }));
          const menu = [{ title: "Open in Metrics", run: open }, { title: "Take off the overview", run: () => set(chosen.filter((other) => other !== id)) }];
          if (standard) return <Chart key={id} {...standard} {...common} metric={mainMetricOf(id)!} onTitle={open} menu={menu} />;
          return <Pinned key={id} metric={metric!} runs={runs} common={{ ...common, menu, onTitle: open }} />;
        })}
      </div>
      <p className="more">
        <button className="link" onClick={() => choose(true)}>
          Choose charts
        </button>
      </p>
      {choosing && <Chooser title="Charts of the overview" close={() => choose(false)} options={chartOptions(runs)} chosen={chosen} onChange={set} reset={() => set(null)} />}
    </section>
  );
}

/** Returns the standard charts, and every metric that a run has. */
function chartOptions(runs: DrawnRun[]): Option[] {
  const names = metricNames(runs).sort();
  return [
    ...STANDARD.map(({ id, title }) => ({ id, title, section: "Of several metrics" })),
    ...names.map((name) => ({ id: chartOf(name), title: name, section: placeOfMetric(name)[0] })),
  ];
}

function Pinned({ metric, runs, common }: { metric: string; runs: DrawnRun[]; common: Partial<ChartProps> }) {
  const lines = useMemo(() => linesOf(runs, metric, keepOf(runs[0]!.steps)), [runs, metric]);
  return <Chart {...titleOf(metric)} x={runs[0]!.x} lines={lines} metric={isEval(metric) ? undefined : metric} {...common} />;
}
