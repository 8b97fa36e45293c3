/** Every step metric of a run and of those drawn over it, with one crosshair. */

import { useMemo, useState } from "react";
import { axisEnd, type BandKind, clock, type DrawnRun, useDrawnRuns, type XAxis } from "../charts/data";
import { clockTicks, nearest, ticks } from "../charts/math";
import { number } from "../format";
import { Failure, Quiet } from "../shell/App";
import { useKeys } from "../shell/keys";
import { Menu } from "../shell/Menu";
import { formatSections, type Layout, moveMetric, parseSections, stepMetric, toggleMetric, useLayouts } from "../state/layouts";
import { useRunId, useRunInfo } from "../state/run";
import { useSteps } from "../state/steps";
import { setParams, useParam, useRange } from "../state/url";
import { MetricChart, type View } from "./metrics/MetricChart";
import { RunTable } from "./metrics/RunTable";
import { MetricTree } from "./metrics/MetricTree";
import { allSections, mainSections } from "./metrics/tree";
import "./metrics.css";

const AXES: [XAxis, string][] = [
  ["step", "Step"],
  ["time", "Time"],
  ["tokens", "Tokens"],
];
const BANDS: [BandKind, string][] = [
  ["none", "None"],
  ["std", "Std"],
  ["percentiles", "p5–p95"],
];
const MAIN = "main";
const ALL = "all";

export function Metrics() {
  const run = useRunId();
  const info = useRunInfo(run).data;
  const { steps, error } = useSteps(run);
  const [axis, setAxis] = useParam("axis", "step");
  const runs = useDrawnRuns(info, steps, axis as XAxis);

  if (error && !steps) return <Failure error={error} />;
  if (!steps || !info) return null;
  if (runs.every((one) => one.steps.step.length === 0)) return <Quiet title="No step yet." text="Metrics come with the first training step." />;
  return <Loaded runs={runs} axis={axis as XAxis} setAxis={setAxis} planned={info.info.live ? (info.info.num_steps ?? null) : null} />;
}

function Loaded({ runs, axis, setAxis, planned }: { runs: DrawnRun[]; axis: XAxis; setAxis: (axis: string) => void; planned: number | null }) {
  const first = runs[0]!;
  const names = useMemo(() => [...new Set(runs.flatMap((run) => Object.keys(run.steps.metrics).filter((name) => run.steps.metrics[name]!.some((value) => value !== null))))], [runs]);
  const [smoothing, setSmoothing] = useParam("smooth", "0.6");
  const [band, setBand] = useParam("band", "percentiles");
  const [log, setLog] = useParam("log");
  const [trim, setTrim] = useParam("trim");
  const [focus, setFocus] = useParam("metric");
  const [range, setRange] = useRange();
  const { layout, edited, choose, change } = useLayout(names);
  const keep = Math.min(0.99, Math.max(0, Number(smoothing) || 0));

  const xs = first.x;
  const zoom = useMemo(() => {
    if (!range || xs.length === 0) return null;
    const at = (step: number) => xs[nearest(first.steps.step, step)]!;
    return axis === "step" ? range : { from: at(range.from), to: at(range.to) };
  }, [range?.from, range?.to, axis, xs, first.steps.step]);
  const view: View = {
    axis,
    keep,
    band: band as BandKind,
    log: log === "1",
    trim: trim === "1",
    zoom,
    onZoom: (next) => {
      if (!next) return setRange(null);
      const step = (x: number) => (axis === "step" ? Math.max(0, Math.round(x)) : first.steps.step[nearest(xs, x)]!);
      setRange({ from: step(next.from), to: step(next.to) });
    },
    xEnd: axis === "step" && planned ? axisEnd((first.steps.step.at(-1) ?? -1) + 1, planned) : undefined,
    xStart: axis === "step" ? undefined : 0,
    xTicks: axis === "time" ? clockTicks : axis === "tokens" ? ticks : undefined,
    xFormat: axis === "time" ? clock : axis === "tokens" ? (x) => number(x) : undefined,
  };
  useKeys("Metrics", [
    { keys: ["l"], does: "log scale", run: () => setLog(log === "1" ? null : "1") },
    { keys: ["Escape"], does: "close the large chart, then clear the range", run: () => (focus ? setFocus(null) : setParams({ step: null, range: null })) },
  ]);
  const shown = new Set(layout.sections.flatMap((section) => section.metrics));
  return (
    <div className="metrics">
      <h1 className="vh">Metrics</h1>
      <MetricTree run={first} names={names} shown={shown} toggle={(metric) => change(toggleMetric(layout, metric))} open={setFocus} />
      <div className="wrapped">
        <div className="toolbar">
          <LayoutChoice layout={layout} edited={edited} choose={choose} />
          <span className="seg" role="group" aria-label="Axis">
            {AXES.map(([name, title]) => (
              <button key={name} aria-pressed={axis === name} onClick={() => setAxis(name)}>
                {title}
              </button>
            ))}
          </span>
          <label className="smooth">
            Smooth
            <input type="range" min={0} max={0.98} step={0.02} value={keep} onChange={(event) => setSmoothing(event.target.value, true)} />
            <b>{keep.toFixed(2)}</b>
          </label>
          <span className="seg" role="group" aria-label="Bands">
            {BANDS.map(([name, title]) => (
              <button key={name} aria-pressed={band === name} onClick={() => setBand(name)}>
                {title}
              </button>
            ))}
          </span>
          <span className="seg">
            <button aria-pressed={view.log} onClick={() => setLog(view.log ? null : "1")}>
              Log
            </button>
            <button aria-pressed={view.trim} onClick={() => setTrim(view.trim ? null : "1")} title="The axis leaves out the outermost 2 % on each side">
              Trim outliers
            </button>
          </span>
        </div>
        <RunTable runs={runs} axis={axis} />
        <div className="charts">
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

/** The chosen layout; a changed one is in the address until it is saved. */
function useLayout(names: string[]) {
  const { layouts } = useLayouts();
  const [name] = useParam("layout", MAIN);
  const [charts] = useParam("charts");
  const base: Layout = useMemo(() => {
    const own = layouts.find((layout) => layout.name === name);
    if (own) return own;
    return name === ALL ? { name: ALL, sections: allSections(names) } : { name: MAIN, sections: mainSections(names) };
  }, [name, layouts, names]);
  const layout = useMemo(() => (charts ? { name: base.name, sections: parseSections(charts) } : base), [base, charts]);
  return {
    layout,
    edited: charts !== "",
    choose: (next: string) => setParams({ layout: next === MAIN ? null : next, charts: null }),
    change: (next: Layout) => setParams({ charts: formatSections(next.sections) }),
  };
}

const titleOf = (name: string): string => (name === MAIN ? "Main" : name === ALL ? "All metrics" : name);

function LayoutChoice({ layout, edited, choose }: { layout: Layout; edited: boolean; choose: (name: string) => void }) {
  const { layouts, save, remove } = useLayouts();
  const own = layouts.some((other) => other.name === layout.name);
  const [naming, setNaming] = useState<string | null>(null);
  const keep = (name: string) => {
    const clean = name.trim();
    if (!clean || clean === MAIN || clean === ALL) return;
    save({ name: clean, sections: layout.sections });
    setNaming(null);
    choose(clean);
  };
  if (naming !== null)
    return (
      <form
        className="naming"
        onSubmit={(event) => {
          event.preventDefault();
          keep(naming);
        }}
      >
        <input className="field" autoFocus placeholder="Name of the layout" aria-label="Name of the layout" value={naming} onChange={(event) => setNaming(event.target.value)} onKeyDown={(event) => event.key === "Escape" && setNaming(null)} />
        <button className="btn">Save</button>
      </form>
    );
  return (
    <span className="layout nb">
      <span className="d">Layout</span>
      <Menu
        label="Choose a layout"
        button={
          <>
            <b>{titleOf(layout.name)}</b> {edited && <span className="f">edited </span>}▾
          </>
        }
        items={[
          ...[MAIN, ALL, ...layouts.map((other) => other.name)].map((name) => ({ title: titleOf(name), run: () => choose(name) })),
          { title: "Save under a name…", run: () => setNaming(own ? layout.name : "") },
          ...(own ? [{ title: `Delete “${layout.name}”`, run: () => (remove(layout.name), choose(MAIN)) }] : []),
        ]}
      />
      {edited && (
        <button className="btn" onClick={() => (own ? keep(layout.name) : setNaming(""))}>
          Save
        </button>
      )}
    </span>
  );
}
