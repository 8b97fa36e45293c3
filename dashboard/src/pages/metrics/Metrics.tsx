/** Every step metric of a run and of those drawn over it, with one crosshair. */

import { useMemo, useState } from "react";
import { axisEnd, type BandKind, clock } from "../../charts/data";
import { commonStep, type DrawnRun, leavesOf, longest, metricNames, useDrawnRuns, useStepAxis, type XAxis } from "../../charts/runs";
import { clockTicks, smoothingFor, ticks } from "../../charts/math";
import { sourceOf } from "../../charts/sources";
import { tick } from "../../format";
import { Failure, Waiting } from "../../shell/Quiet";
import { Dialog } from "../../shell/Dialog";
import { useKeys } from "../../shell/keys";
import { addSection, sectionFor, toggleMetric } from "../../state/layouts";
import { useRunId, useRunInfo } from "../../state/run";
import { useSteps } from "../../state/steps";
import { setParams, useParam, useRange } from "../../state/url";
import type { Environment } from "../../types";
import { ChartSection } from "./ChartSection";
import { LayoutChoice, useLayout } from "./LayoutChoice";
import { MetricChart } from "./MetricChart";
import { MetricTree } from "./MetricTree";
import { RunTable } from "./RunTable";
import { usePlaced, type View } from "./series";
import { Toolbar } from "./Toolbar";
import { fitsSearch, place as placeOfMetric } from "./tree";
import "./metrics.css";
import { visible } from "../../text/hostile";

export function Metrics() {
  const run = useRunId();
  const info = useRunInfo(run).data;
  const { steps, error } = useSteps(run);
  const [axis] = useParam("axis", "step");
  const [grouping] = useParam("group");
  const drawn = useDrawnRuns(info, steps, axis as XAxis, grouping);
  const [baseline] = useParam("baseline");
  const [last] = useParam("last");
  const runs = useMemo(() => {
    const until = last === "common" && drawn.length > 1 ? (commonStep(drawn) ?? undefined) : undefined;
    return drawn.map((one) => ({ ...one, until, ...(drawn.length > 1 && leavesOf(one).some((leaf) => leaf.id === baseline) ? { color: "--ink3", baseline: true } : {}) }));
  }, [drawn, baseline, last]);

  if (error && !steps) return <Failure error={error} />;
  if (!steps || !info || runs.length === 0) return null;
  if (runs.every((one) => one.steps.step.length === 0)) return <Waiting title="No step yet." text="Metrics come with the first training step." />;
  return <Loaded runs={runs} axis={axis as XAxis} environments={info.environments} planned={info.info.live ? (info.info.num_steps ?? null) : null} />;
}

function Loaded({ runs, axis, environments, planned }: { runs: DrawnRun[]; axis: XAxis; environments: Environment[]; planned: number | null }) {
  const first = runs[0]!;
  const [environment] = useParam("environment");
  const [tag] = useParam("tag");
  const filter = { environment, tag };
  const measured = useMemo(() => metricNames(runs), [runs]);
  const names = useMemo(() => measured.filter((name) => sourceOf(name, filter, () => false) !== null), [measured, environment, tag]);
  const [smoothing] = useParam("smooth");
  const [band] = useParam("band", "percentiles");
  const [log, setLog] = useParam("log");
  const [trim] = useParam("trim");
  const [fit] = useParam("fit");
  const [tree, setTree] = useState(false);
  const [made, setMade] = useState(-1);
  const [focus, setFocus] = useParam("metric");
  const [full, setFull] = useParam("full");
  const [search] = useParam("search");
  const [x] = useParam("x");
  const [range] = useRange();
  const { layout, edited, choose, change, setScale } = useLayout(names);
  const keep = smoothing === "" ? smoothingFor(longest(runs)) : Math.min(0.99, Math.max(0, Number(smoothing) || 0));
  const found = useMemo(() => (metric: string) => fitsSearch(metric, search), [search]);

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
    x,
    placed: usePlaced(runs, x, range),
    scales: layout.scales,
    setScale,
    names: measured,
    range,
    until: first.until === undefined ? undefined : `step ${first.until}`,
    xEnd: axis === "step" && planned ? axisEnd((first.steps.step.at(-1) ?? -1) + 1, planned) : undefined,
    xStart: axis === "step" ? undefined : 0,
    xTicks: axis === "time" ? clockTicks : axis === "tokens" ? ticks : undefined,
    xFormat: axis === "time" ? clock : axis === "tokens" ? tick : undefined,
  };
  useKeys("Metrics", [
    { keys: ["l"], does: "log scale", run: () => setLog(log === "1" ? null : "1") },
    { keys: ["f"], does: "show the large chart, or the first one, in full screen", run: () => setFull(focus || (layout.sections.flatMap((section) => section.metrics).find(found) ?? null)) },
    {
      keys: ["Escape"],
      does: "close the large chart, then clear the range",
      run: () => (tree ? setTree(false) : focus ? setFocus(null) : setParams({ step: null, range: null })),
    },
  ]);
  const others = search.trim() ? names.filter((metric) => found(metric) && !layout.sections.some((section) => section.metrics.includes(metric))) : [];
  const shown = new Set(layout.sections.flatMap((section) => section.metrics));
  return (
    <div className="metrics">
      <h1 className="vh">Metrics</h1>
      <MetricTree
        run={first}
        names={names}
        shown={shown}
        toggle={(metric) => change(toggleMetric(layout, metric, sectionFor(layout, metric, (name) => placeOfMetric(name)[0])))}
        open={(metric) => (setTree(false), setFocus(metric))}
        opened={tree}
        close={() => setTree(false)}
      />
      <div className="wrapped">
        <Toolbar run={leavesOf(first)[0]!.id} environments={environments} keep={keep} names={measured} openTree={() => setTree(true)}>
          <LayoutChoice layout={layout} edited={edited} choose={choose} />
        </Toolbar>
        <RunTable runs={runs} axis={axis} />
        <div className="charts">
          {focus && names.includes(focus) && (
            <div className="focus">
              <MetricChart metric={focus} runs={runs} view={view} fill={() => setFull(focus)} close={() => setFocus(null)} />
            </div>
          )}
          {layout.sections.map((section, i) =>
            // An empty section stays, because charts found by the search can be dragged there.
            section.metrics.length > 0 && !section.metrics.some(found) ? null : (
              <ChartSection key={i} index={i} layout={layout} change={change} isNew={i === made} runs={runs} view={view} open={setFocus} fill={setFull} found={found} />
            ),
          )}
          {others.length > 0 && (
            <section aria-label="Other metrics that match the search">
              <h2>
                Not in this layout <span>{others.length === 1 ? "1 chart" : `${others.length} charts`}</span>
              </h2>
              <div className="row">
                {others.map((metric) => (
                  <MetricChart key={metric} metric={metric} runs={runs} view={view} open={() => setFocus(metric)} fill={() => setFull(metric)} />
                ))}
              </div>
            </section>
          )}
          {layout.sections.length === 0 && <p className="none d">No charts. Choose metrics at the left.</p>}
          <p className="more">
            <button
              className="link"
              onClick={() => {
                setMade(layout.sections.length);
                change(addSection(layout, "New section"));
              }}
            >
              New section
            </button>
          </p>
        </div>
      </div>
      {full && names.includes(full) && (
        <Dialog bare full close={() => setFull(null)} title={visible(full)}>
          <MetricChart metric={full} runs={runs} view={view} close={() => setFull(null)} named />
        </Dialog>
      )}
    </div>
  );
}
