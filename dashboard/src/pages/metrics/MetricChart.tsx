/** One metric of all runs, drawn when it comes into view. */

import { useEffect, useRef, useState } from "react";
import { Chart } from "../../charts/Chart";
import { isEval } from "../../charts/data";
import { ticks } from "../../charts/math";
import type { DrawnRun, XAxis } from "../../charts/runs";
import { tick } from "../../format";
import type { Scale } from "../../state/layouts";
import { useOverviewCharts } from "../../state/overviewCharts";
import { visible } from "../../text/hostile";
import type { Value } from "../../types";
import { DRAGGED_METRIC, Grip, useDrop } from "./Grip";
import { ScaleDialog } from "./ScaleDialog";
import { usePlaced, useSeries, type View } from "./series";
import { titleOf, unitOf } from "./tree";

interface MetricChartProps {
  metric: string;
  runs: DrawnRun[];
  view: View;
  open?: () => void;
  /** Opens the chart in full screen. */
  fill?: () => void;
  close?: () => void;
  remove?: () => void;
  /** Another chart was dropped on this one. */
  drop?: (metric: string) => void;
  move?: (by: 1 | -1) => void;
  /** Shows the names of the runs beside their values. */
  named?: boolean;
}

const X_TITLES: Record<XAxis, string> = { step: "step", time: "time of training", tokens: "trained tokens" };

export function MetricChart(props: MetricChartProps) {
  const host = useRef<HTMLDivElement>(null);
  const [seen, setSeen] = useState(false);
  useEffect(() => {
    if (seen) return;
    const observer = new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && setSeen(true), { rootMargin: "300px" });
    observer.observe(host.current!);
    return () => observer.disconnect();
  }, [seen]);
  const { drop } = props;
  const { isOver, handlers } = useDrop(drop ? [DRAGGED_METRIC] : [], (data) => {
    const metric = data.getData(DRAGGED_METRIC);
    if (metric) drop?.(metric);
    return metric !== "";
  });
  return (
    <div ref={host} className={`cell ${isOver ? "target" : ""}`} {...handlers}>
      {seen ? <Seen {...props} /> : null}
    </div>
  );
}

function Seen({ metric, runs, view, open, fill, close, remove, move, named }: MetricChartProps) {
  const scale = view.scales[metric] ?? {};
  const over = scale.x ?? view.x;
  const own = usePlaced(runs, scale.x ?? "", view.range);
  const placed = scale.x === undefined ? view.placed : own;
  return placed.length > 0 ? (
    <Placed {...{ metric, view, open, fill, close, remove, move, named, over }} runs={placed} />
  ) : (
    <p className="none f">
      No run has {visible(over)}.{" "}
      <button className="link" onClick={() => view.setScale(metric, { ...scale, x: undefined })}>
        Reset the axis
      </button>
    </p>
  );
}

function Placed({ metric, runs, view, open, fill, close, remove, move, named, over }: MetricChartProps & { over: string }) {
  const { lines, heat, note, scope, low, high } = useSeries(metric, runs, view, over);
  const { isPinned, pin } = useOverviewCharts();
  const [asked, setAsked] = useState(false);
  const scale = view.scales[metric] ?? {};
  const log = (scale.log ?? view.log) && lines.some((line) => line.values.some((value: Value) => value !== null && value > 0));
  const set = (next: Partial<Scale>) => view.setScale(metric, { ...scale, ...next });
  // A metric as the x axis has no range of steps, so the range of the ruler selects the points.
  const axes = over
    ? { axis: `metric ${over}`, xTicks: ticks, xFormat: tick, xTitle: visible(over) }
    : { axis: view.axis, xEnd: view.xEnd, xStart: view.xStart, xFormat: view.xFormat, xTicks: view.xTicks, zoom: view.zoom, onZoom: view.onZoom, onPick: view.onPick, stepOf: view.stepOf, metric: isEval(metric) ? undefined : metric, xTitle: X_TITLES[view.axis] };
  const { title, unit, name } = titleOf(metric);
  return (
    <>
      <Chart
        {...{ title, name, note, scope, heat, lines, named, ...axes }}
        titled={named}
        unit={[unit, scale.x && `over ${titleOf(over).title}`].filter(Boolean).join(", ")}
        yTitle={unitOf(metric) ? `${name} (${unitOf(metric)})` : name}
        low={low}
        high={high}
        x={runs[0]!.x}
        log={log}
        withoutOutliers={view.trim}
        until={view.until}
        onTitle={open}
        before={move && <Grip kind={DRAGGED_METRIC} name={metric} move={move} />}
        menu={[
          ...(open ? [{ title: "Open large", run: open }] : []),
          ...(fill ? [{ title: "Full screen", run: fill }] : []),
          ...(close ? [{ title: "Close", run: close }] : []),
          { title: log ? "Linear scale" : "Log scale", run: () => set({ log: !log }) },
          { title: "Axes…", run: () => setAsked(true) },
          { title: isPinned(metric) ? "Take off the overview" : "Pin to the overview", run: () => pin(metric) },
          ...(remove ? [{ title: "Remove from this layout", run: remove }] : []),
        ]}
      />
      {asked && <ScaleDialog metric={metric} scale={scale} names={view.names} set={set} close={() => setAsked(false)} />}
    </>
  );
}
