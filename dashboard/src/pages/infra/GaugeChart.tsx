/** Gauges over time: the aggregate of each role with its range, or a line for each. */

import { useMemo } from "react";
import { Chart } from "../../charts/Chart";
import type { Line } from "../../charts/props";
import { smooth } from "../../charts/math";
import type { GaugeSeries } from "../gauges";
import { timeLabel, timeTicks } from "../timeline/viewport";
import { aggregates, type ChartSpec, membersOf, MOST_LINES, roleColor } from "./infra";

export const PARTS = 250;
/** Smoothing of a mean over many; what was read stays under it, faint. */
const KEEP = 0.7;
const COLORS = 4;
/** Width of a character of a direct label, about. */
const LETTER_PX = 7;

interface GaugeChartProps {
  spec: ChartSpec;
  series: { label: string; series: GaugeSeries }[];
  /** A line for each series, instead of one for each role. */
  each: boolean;
  role: (series: GaugeSeries) => string;
  origin: number;
  extent: { from: number; to: number };
  zoom: (extent: { from: number; to: number } | null) => void;
  pick: (time: number) => void;
}

export function GaugeChart({ spec, series, each, role, origin, extent, zoom, pick }: GaugeChartProps) {
  // Different numbers on one chart (open and ready groups) are no group to aggregate.
  const several = series.length > 1 && (spec.names.length === 1 || spec.of !== undefined);
  const lines = useMemo(() => {
    if (!each && several) {
      const found = aggregates(series, role, extent.from, extent.to, PARTS);
      return found.map((one): Line => ({
        label: one.label,
        color: found.length > 1 || /trainer|engines/.test(one.label) ? roleColor(one.label) : "--c1",
        x: one.time,
        values: smooth(one.mean, KEEP),
        raw: one.mean,
        bands: one.count > 1 ? [{ low: one.low, high: one.high, opacity: 0.12 }] : undefined,
        direct: found.length > 1 ? one.label : undefined,
      }));
    }
    return series.slice(0, MOST_LINES).map((one, i): Line => ({
      label: one.label,
      color: `--c${(i % COLORS) + 1}`,
      dash: i >= COLORS ? [4, 3] : undefined,
      values: one.series.mean,
      x: one.series.time,
      width: series.length > COLORS ? 1 : 1.5,
      silent: series.length > COLORS,
      bands: series.length === 1 ? [{ low: one.series.min, high: one.series.max, opacity: 0.14 }] : undefined,
      direct: series.length > 1 || spec.each ? one.label : undefined,
    }));
  }, [series, each, several, role, extent.from, extent.to]);
  const x = useMemo(() => [...new Set(lines.flatMap((line) => line.x ?? []))].sort((a, b) => a - b), [lines]);
  const widest = Math.max(0, ...lines.map((line) => line.direct?.length ?? 0));
  const left = series.length - MOST_LINES;
  return (
    <div className="cell">
      <Chart
        title={spec.title}
        unit={[spec.unit, each && left > 0 ? `${MOST_LINES} of ${series.length}` : ""].filter(Boolean).join(", ")}
        note={!each && several ? `mean of ${membersOf(series.map((one) => one.series))}` : ""}
        x={x}
        lines={lines}
        axis="clock"
        zoom={extent}
        onZoom={zoom}
        onPick={pick}
        low={spec.low}
        high={spec.high}
        xTicks={(low, high, wanted) => timeTicks({ from: low, to: high }, origin, wanted).times}
        xFormat={(time) => timeLabel(time - origin, 1)}
        right={widest > 0 ? Math.min(130, 14 + LETTER_PX * widest) : undefined}
      />
    </div>
  );
}
