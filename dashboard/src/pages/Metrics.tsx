/** Every step metric of a run and of those drawn over it, with one crosshair. */

import { useMemo, useState } from "react";
import { axisEnd, type BandKind, clock, type DrawnRun, useDrawnRuns, useStepAxis, type XAxis } from "../charts/data";
import { clockTicks, smoothingFor, ticks } from "../charts/math";
import { sourceOf } from "../charts/sources";
import { number } from "../format";
import { Failure, Quiet } from "../shell/App";
import { useKeys } from "../shell/keys";
import { type Layout, moveMetric, stepMetric, toggleMetric } from "../state/layouts";
import { useRunId, useRunInfo } from "../state/run";
import { useSteps } from "../state/steps";
import { setParams, useParam } from "../state/url";
import type { Environment } from "../types";
import { LayoutChoice, useLayout } from "./metrics/LayoutChoice";
import { MetricChart } from "./metrics/MetricChart";
import { MetricTree } from "./metrics/MetricTree";
import { RunTable } from "./metrics/RunTable";
import type { View } from "./metrics/series";
import { Toolbar } from "./metrics/Toolbar";
import "./metrics.css";

export function Metrics() {
  const run = useRunId();
  const info = useRunInfo(run).data;
  const { steps, error } = useSteps(run);
  const [axis] = useParam("axis", "step");
  const runs = useDrawnRuns(info, steps, axis as XAxis);

  if (error && !steps) return <Failure error={error} />;
  if (!steps || !info) return null;
  if (runs.every((one) => one.steps.step.length === 0)) return <Quiet title="No step yet." text="Metrics come with the first training step." />;
  return <Loaded runs={runs} axis={axis as XAxis} environments={info.environments} planned={info.info.live ? (info.info.num_steps ?? null) : null} />;
}

function Loaded({ runs, axis, environments, planned }: { runs: DrawnRun[]; axis: XAxis; environments: Environment[]; planned: number | null }) {
  const first = runs[0]!;
  const [environment] = useParam("environment");
  const [tag] = useParam("tag");
  const filter = { environment, tag };
  const measured = useMemo(() => [...new Set(runs.flatMap((run) => Object.keys(run.steps.metrics).filter((name) => run.steps.metrics[name]!.some((value) => value !== null))))], [runs]);
  const names = useMemo(() => measured.filter((name) => sourceOf(name, filter, () => false) !== null), [measured, environment, tag]);
  const [smoothing] = useParam("smooth");
  const [band] = useParam("band", "percentiles");
  const [log, setLog] = useParam("log");
  const [trim] = useParam("trim");
  const [fit] = useParam("fit");
  const [tree, setTree] = useState(false);
  const [focus, setFocus] = useParam("metric");
  const { layout, edited, choose, change } = useLayout(names);
  const keep = smoothing === "" ? smoothingFor(first.steps.step.length) : Math.min(0.99, Math.max(0, Number(smoothing) || 0));

  const view: View = {
    ...useStepAxis(first, axis),
    axis,
    keep,
    band: band as BandKind,
    log: log === "1",
    trim: trim === "1",
    full: fit !== "1",
    filter,
    environments,
    xEnd: axis === "step" && planned ? axisEnd((first.steps.step.at(-1) ?? -1) + 1, planned) : undefined,
    xStart: axis === "step" ? undefined : 0,
    xTicks: axis === "time" ? clockTicks : axis === "tokens" ? ticks : undefined,
    xFormat: axis === "time" ? clock : axis === "tokens" ? (x) => number(x) : undefined,
  };
  useKeys("Metrics", [
    { keys: ["l"], does: "log scale", run: () => setLog(log === "1" ? null : "1") },
    {
      keys: ["Escape"],
      does: "close the large chart, then clear the range",
      run: () => (tree ? setTree(false) : focus ? setFocus(null) : setParams({ step: null, range: null })),
    },
  ]);
  const shown = new Set(layout.sections.flatMap((section) => section.metrics));
  return (
    <div className="metrics">
      <h1 className="vh">Metrics</h1>
      <MetricTree
        run={first}
        names={names}
        shown={shown}
        toggle={(metric) => change(toggleMetric(layout, metric))}
        open={(metric) => (setTree(false), setFocus(metric))}
        opened={tree}
        close={() => setTree(false)}
      />
      <div className="wrapped">
        <Toolbar run={first.id} environments={environments} keep={keep} openTree={() => setTree(true)}>
          <LayoutChoice layout={layout} edited={edited} choose={choose} />
        </Toolbar>
        <RunTable runs={runs} axis={axis} />
        <div className={`charts ${runs.length > 1 ? "several" : ""}`}>
          {focus && names.includes(focus) && (
            <div className="focus">
              <MetricChart metric={focus} runs={runs} view={view} close={() => setFocus(null)} />
            </div>
          )}
          {layout.sections.map((section, i) => (
            <ChartSection key={`${section.title}${i}`} title={section.title} metrics={section.metrics} index={i} runs={runs} view={view} layout={layout} change={change} open={setFocus} />
          ))}
          {layout.sections.length === 0 && <p className="none d">No charts. Choose metrics at the left.</p>}
        </div>
      </div>
    </div>
  );
}

interface SectionProps {
  title: string;
  metrics: string[];
  index: number;
  runs: DrawnRun[];
  view: View;
  layout: Layout;
  change: (layout: Layout) => void;
  open: (metric: string) => void;
}

function ChartSection({ title, metrics, index, runs, view, layout, change, open }: SectionProps) {
  const drop = (metric: string, before: string | null) => change(moveMetric(layout, metric, index, before));
  return (
    <section>
      <h2>
        {title} <span>{metrics.length === 1 ? "1 chart" : `${metrics.length} charts`}</span>
      </h2>
      <div className="row">
        {metrics.map((metric) => (
          <MetricChart
            key={metric}
            metric={metric}
            runs={runs}
            view={view}
            open={() => open(metric)}
            remove={() => change(toggleMetric(layout, metric))}
            drop={(moved) => drop(moved, metric)}
            move={(by) => change(stepMetric(layout, metric, by))}
          />
        ))}
      </div>
    </section>
  );
}
