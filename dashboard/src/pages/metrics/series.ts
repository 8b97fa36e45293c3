/** What a chart of a metric draws: the lines of all runs, and how the samples of the first one spread. */

import { useMemo } from "react";
import { address, runPath } from "../../api";
import type { ChartProps, Line } from "../../charts/Chart";
import { type BandKind, bandsOf, drawnLines, heatOf, isEval, isTwoValued, linesOf, statisticColumn } from "../../charts/data";
import type { Heat } from "../../charts/heat";
import { type DrawnRun, leavesOf, type XAxis } from "../../charts/runs";
import { type DeclaredRange, declaredRange, type Filter, isSparse, sourceOf, statisticOf } from "../../charts/sources";
import { useVersions } from "../../state/live";
import { useResources } from "../../state/resource";
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
}

interface Series extends DeclaredRange {
  lines: Line[];
  heat: Heat | null;
  /** What the bands are, and which samples are meant. */
  note: string;
}

const WORDS: Record<BandKind, string> = { none: "", std: "mean ± std", percentiles: "p5 to p95, p25 to p75", range: "min to max", heat: "share of samples" };

export function useSeries(metric: string, runs: DrawnRun[], view: View): Series {
  const first = runs[0]!;
  const { filter, band, keep } = view;
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
    const lines = filtered
      ? drawnLines(runs, (leaf) => statisticColumn(leaf, found[read.indexOf(leaf)], statistic!.statistic), keep, bands, isSparse(metric))
      : source?.kind === "metric"
        ? linesOf(runs, source.name, keep, bands, isSparse(metric))
        : [];
    // The color of the first run is that of the cells under it.
    if (heat && lines[0]) lines[0] = { ...lines[0], color: "--ink" };
    const two = found[0] !== undefined && (spread === "std" || spread === "percentiles") && isTwoValued(found[0]);
    const words = isEval(metric) ? "after steps, 95 % interval" : two ? "two values" : bands.length > 0 || heat ? `${WORDS[spread]}${runs.length > 1 ? ` of ${first.name}` : ""}` : "";
    const note = [words, source?.kind === "metric" && !source.filtered ? "all samples" : ""].filter(Boolean).join(", ");
    const declared = declaredRange(metric, filter, view.environments);
    const bounded = lines.map((line, i) => (runs[i]?.members ? within(line, declared) : line));
    return { lines: bounded, heat, note, ...(view.full && !view.trim && !view.log ? reached(declared, bounded) : {}) };
    // The parts of `found` are stable, the array is not; `source` follows from the others.
  }, [runs, metric, keep, spread, view.full, view.trim, view.log, view.environments, filter.environment, filter.tag, ...found]);
}

/** Returns a line whose bands end where the declared range does: a mean cannot lie outside. */
function within(line: Line, { low = -Infinity, high = Infinity }: DeclaredRange): Line {
  const cut = (values: Value[]) => values.map((value) => (value === null ? null : Math.min(Math.max(value, low), high)));
  return { ...line, bands: line.bands?.map((band) => ({ ...band, low: cut(band.low), high: cut(band.high) })) };
}

/** Returns a declared range as far as the values keep to it; an end that they cross is free. */
function reached({ low, high }: DeclaredRange, lines: Line[]): DeclaredRange {
  const within = (inside: (value: number) => boolean) =>
    lines.every((line) => [line.raw ?? line.values, ...(line.bands ?? []).flatMap((one) => [one.low, one.high])].every((values: Value[]) => values.every((value) => value === null || inside(value))));
  return {
    ...(low !== undefined && within((value) => value >= low) ? { low } : {}),
    ...(high !== undefined && within((value) => value <= high) ? { high } : {}),
  };
}
