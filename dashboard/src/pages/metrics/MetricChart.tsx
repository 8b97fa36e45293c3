/** One metric of all runs, drawn when it comes into view. */

import { useEffect, useRef, useState } from "react";
import type { DrawnRun } from "../../charts/runs";
import { Chart } from "../../charts/Chart";
import { isEval } from "../../charts/data";
import { useOverviewCharts } from "../../state/overviewCharts";
import type { Value } from "../../types";
import { DRAGGED_METRIC, Grip } from "./Grip";
import { useSeries, type View } from "./series";
import { titleOf } from "./tree";

interface MetricChartProps {
  metric: string;
  runs: DrawnRun[];
  view: View;
  open?: () => void;
  close?: () => void;
  remove?: () => void;
  /** Another chart was dropped on this one. */
  drop?: (metric: string) => void;
  move?: (by: 1 | -1) => void;
}

export function MetricChart(props: MetricChartProps) {
  const host = useRef<HTMLDivElement>(null);
  const [seen, setSeen] = useState(false);
  const [target, setTarget] = useState(false);
  useEffect(() => {
    if (seen) return;
    const observer = new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && setSeen(true), { rootMargin: "300px" });
    observer.observe(host.current!);
    return () => observer.disconnect();
  }, [seen]);
  const { drop } = props;
  return (
    <div
      ref={host}
      className={`cell ${target ? "target" : ""}`}
      onDragOver={(event) => {
        if (!drop || !event.dataTransfer.types.includes(DRAGGED_METRIC)) return;
        event.preventDefault();
        setTarget(true);
      }}
      onDragLeave={() => setTarget(false)}
      onDrop={(event) => {
        setTarget(false);
        const metric = event.dataTransfer.getData(DRAGGED_METRIC);
        if (!metric || !drop) return;
        event.stopPropagation();
        drop(metric);
      }}
    >
      {seen ? <Seen {...props} /> : null}
    </div>
  );
}

function Seen({ metric, runs, view, open, close, remove, move }: MetricChartProps) {
  const first = runs[0]!;
  const { lines, heat, note, low, high } = useSeries(metric, runs, view);
  const { isPinned, pin } = useOverviewCharts();
  return (
    <Chart
      {...titleOf(metric)}
      note={note}
      heat={heat}
      low={low}
      high={high}
      x={first.x}
      lines={lines}
      axis={view.axis}
      xEnd={view.xEnd}
      xStart={view.xStart}
      xFormat={view.xFormat}
      xTicks={view.xTicks}
      zoom={view.zoom}
      onZoom={view.onZoom}
      log={view.log && lines.some((line) => line.values.some((value: Value) => value !== null && value > 0))}
      withoutOutliers={view.trim}
      onTitle={open}
      onPick={view.onPick}
      stepOf={view.stepOf}
      metric={isEval(metric) ? undefined : metric}
      before={move && <Grip kind={DRAGGED_METRIC} name={metric} move={move} />}
      menu={[
        ...(open ? [{ title: "Open large", run: open }] : []),
        ...(close ? [{ title: "Close", run: close }] : []),
        { title: isPinned(metric) ? "Take off the overview" : "Pin to the overview", run: () => pin(metric) },
        ...(remove ? [{ title: "Remove from this layout", run: remove }] : []),
      ]}
    />
  );
}
