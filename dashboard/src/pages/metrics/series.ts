/** What a chart of a metric draws: the lines of all runs, and how the samples of the first one spread. */

import { useMemo } from "react";
import { address, runPath } from "../../api";
import type { ChartProps, Line } from "../../charts/props";
import { type BandKind, bandsOf, drawnLines, heatOf, isEval, isTwoValued, linesOf, reached, statisticColumn } from "../../charts/data";
import type { Heat } from "../../charts/heat";
import { type DrawnRun, leavesOf, overMetric, type XAxis } from "../../charts/runs";
import { type DeclaredRange, declaredRange, type Filter, isAll, sourceOf, statisticOf } from "../../charts/sources";
import { useVersions } from "../../state/live";
import type { Scale, Scales } from "../../state/layouts";
import { useResources } from "../../state/resource";
import type { Range } from "../../state/url";
import type { Distribution, Environment, Value } from "../../types";

/** What the toolbar and the ruler decide for all charts. */
export interface View extends Pick<ChartProps, "zoom" | "onZoom" | "onPick" | "stepOf" | "xEnd" | "xStart" | "xFormat" | "xTicks"> {
  axis: XAxis;
  keep: number;
  band: BandKind;
  log: boolean;
  trim: boolean;
  /** Axes show at least the range that environments declare. */
  full: boolean;
  filter: Filter;
  environments: readonly Environment[];
  /** A metric as the x axis of all charts; empty for that of `axis`. */
  x: string;
  /** The runs over `x`. */
  placed: DrawnRun[];
  /** Axes of single charts, by metric. */
  scales: Scales;
  setScale: (metric: string, scale: Scale) => void;
  /** All metrics. Any of them may be the x axis. */
  names: string[];
  /** The range of steps on the ruler; null for all steps. */
  range: Range | null;
  /** The step of the values in the title lines, if that is not the last one: `step 57`. */
  until?: string;
}

const NO_SCALE: Scale = {};

interface Series extends DeclaredRange {
  lines: Line[];
  heat: Heat | null;
  /** What the bands show. */
  note: string;
  /** Names the samples if they are not those of the filter. */
  scope: string;
}

const WORDS: Record<BandKind, string> = { none: "", std: "mean ± std", percentiles: "p5 to p95, p25 to p75", range: "min to max", heat: "share of samples" };

/** Returns the runs over a metric as the x axis, without runs that lack it; the runs themselves if `x` is empty. */
export function usePlaced(runs: DrawnRun[], x: string, range: Range | null): DrawnRun[] {
  return useMemo(() => (x ? runs.flatMap(leavesOf).flatMap((run) => overMetric(run, x, range) ?? []) : runs), [runs, x, x ? range?.from : 0, x ? range?.to : 0]);
}

export function useSeries(metric: string, runs: DrawnRun[], view: View, x: string): Series {
  const first = runs[0]!;
  const { filter, keep } = view;
  const scale = view.scales[metric] ?? NO_SCALE;
  // Neighbors on the axis of a metric are not consecutive steps, so no band can join them.
  const band = x ? "none" : view.band;
  const source = sourceOf(metric, filter, (name) => leavesOf(first).some((leaf) => name in leaf.steps.metrics));
  const statistic = source?.kind === "samples" ? source : statisticOf(metric);
  // A group of runs has the interval of its mean instead.
  const spread = statistic?.statistic === "mean" && !first.members ? band : "none";
  const filtered = source?.kind === "samples";
  const read = statistic && filtered ? runs.flatMap(leavesOf) : statistic && spread !== "none" ? [first] : [];
  const keys = read.map((run, order) =>
    address(runPath(run.id, "distribution"), {
      metric: statistic!.metric,
      environment: statistic!.environment,
      tag: filtered ? source.tag : "",
      histogram: spread === "heat" && order === 0 ? "true" : null,
    }),
  );
  const versions = useVersions(read.map((run) => run.id), "step_stats", "steps");
  const found = useResources<Distribution>(keys, versions).map((one) => one.data);
  return useMemo(() => {
    const bands = bandsOf(first, found[0], spread, keep);
    const heat = spread === "heat" ? heatOf(first, found[0]) : null;
    const joined = filtered
      ? // Some steps may have no sample of an environment or tag.
        drawnLines(runs, (leaf) => statisticColumn(leaf, found[read.indexOf(leaf)], statistic!.statistic), keep, bands, true)
      : source?.kind === "metric"
        ? linesOf(runs, source.name, keep, bands)
        : [];
    const lines = x && !isEval(metric) ? joined.map((line) => ({ ...line, cloud: true, head: false })) : joined;
    // The color of the first run is that of the cells under it.
    if (heat && lines[0]) lines[0] = { ...lines[0], color: "--ink" };
    const two = found[0] !== undefined && (spread === "std" || spread === "percentiles") && isTwoValued(found[0]);
    const words = isEval(metric) ? "after steps, 95 % interval" : two ? "two values" : bands.length > 0 || heat ? `${WORDS[spread]}${runs.length > 1 ? ` of ${first.name}` : ""}` : "";
    const scope = !isAll(filter) && source?.kind === "metric" && !source.filtered ? "all samples" : "";
    const declared = declaredRange(metric, filter, view.environments);
    const bounded = lines.map((line, i) => (runs[i]?.members ? within(line, declared) : line));
    const own = { ...(scale.low === undefined ? {} : { low: scale.low }), ...(scale.high === undefined ? {} : { high: scale.high }) };
    return { lines: bounded, heat, note: words, scope, ...(view.full && !view.trim && !(scale.log ?? view.log) ? reached(declared, bounded) : {}), ...own };
    // The parts of `found` are stable, the array is not; `source` follows from the others.
  }, [runs, metric, keep, spread, view.full, view.trim, view.log, scale, view.environments, filter.environment, filter.tag, x, ...found]);
}

/** Returns a line whose bands end where the declared range does: a mean cannot lie outside. */
function within(line: Line, { low = -Infinity, high = Infinity }: DeclaredRange): Line {
  const cut = (values: Value[]) => values.map((value) => (value === null ? null : Math.min(Math.max(value, low), high)));
  return { ...line, bands: line.bands?.map((band) => ({ ...band, low: cut(band.low), high: cut(band.high) })) };
}
