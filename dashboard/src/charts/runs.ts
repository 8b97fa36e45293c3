/** The runs that charts draw: steps and evals of each on one axis, and groups of runs as their mean. */

import { useMemo } from "react";
import { resultFormat } from "../format";
import { useRunColors } from "../state/colors";
import { useSelected } from "../state/cursor";
import { groupFields, groupRuns, groupTitle } from "../state/groups";
import { useResource } from "../state/resource";
import { curveOf, useEvalsOf, useNamed, useRuns } from "../state/run";
import { NO_STEPS, trainedTokens, trainingSeconds, useStepsOf } from "../state/steps";
import { parseStep, place, type Range, setParams, useOthers, usePlace, useRange } from "../state/url";
import { visible } from "../text/hostile";
import type { EvalRow, RunInfo, Runs, StepColumns, Value } from "../types";
import type { ChartProps } from "./props";
import { meanOf, nearest } from "./math";

export type XAxis = "step" | "time" | "tokens";

/** Values at steps, or at numbers of finished steps, and where these lie on the axis. */
export interface Column {
  at: number[];
  x: number[];
  values: Value[];
  /** Ends of an interval around each value. */
  low?: Value[];
  high?: Value[];
}

/** A run as charts draw it, or the mean of its `members`. */
export interface DrawnRun {
  id: string;
  name: string;
  color: string;
  /** Dashes, where another run has the color. */
  dash?: number[];
  steps: StepColumns;
  x: number[];
  evals: Map<string, Column>;
  members?: DrawnRun[];
  /** Whether it is the baseline: drawn in grey, and compared with the others. */
  baseline?: boolean;
  /** The last step whose values are read, if it is not the run's own last step. */
  until?: number;
}

export const leavesOf = (run: DrawnRun): DrawnRun[] => run.members ?? [run];

/** Returns the place of each step on an axis: its number, seconds of training, or trained tokens. */
function placesOf(steps: StepColumns, axis: XAxis): number[] {
  if (axis === "step") return steps.step;
  const places = axis === "time" ? trainingSeconds(steps) : trainedTokens(steps);
  let last = 0;
  return places.map((place) => (last = place ?? last));
}

/** Returns the results of evals as `eval/NAME/METRIC`, with `accuracy` and its interval for `correct`, after as many steps as their weights had. */
export function evalColumns(rows: EvalRow[], steps: StepColumns, x: number[], axis: XAxis): Map<string, Column> {
  const placeOf = (version: number): number => (axis === "step" ? version : version === 0 ? 0 : (x[nearest(steps.step, version - 1)] ?? 0));
  const out = new Map<string, Column>();
  for (const name of new Set(rows.map((row) => row.name))) {
    const curve = curveOf(rows.filter((row) => row.name === name));
    const at = curve.map((row) => row.version);
    const places = at.map(placeOf);
    const add = (metric: string, values: Value[], ends: Partial<Column> = {}) =>
      values.some((value) => value !== null) && out.set(`eval/${visible(name)}/${visible(metric)}`, { at, x: places, values, ...ends });
    const { label } = resultFormat(curve.at(-1)?.metric);
    add(label, curve.map((row) => row.accuracy), { low: curve.map((row) => row.accuracy_low), high: curve.map((row) => row.accuracy_high) });
    for (const metric of new Set(curve.flatMap((row) => Object.keys(row.metrics)))) if (metric !== label) add(metric, curve.map((row) => row.metrics[metric] ?? null));
  }
  return out;
}

/**
 * Returns the mean of columns where at least one has a value, with its 95 % interval where two have. Where a column ends, the
 * mean place on the axis goes on from there as the others do: that of the others alone may lie before it.
 */
function meanColumn(columns: Column[]): Column {
  const rows = columns.map((column) => new Map(column.at.map((at, row) => [at, row])));
  const at = [...new Set(columns.flatMap((column) => column.at))].sort((a, b) => a - b);
  const out: Required<Column> = { at, x: [], values: [], low: [], high: [] };
  for (const [i, place] of at.entries()) {
    const there = columns.flatMap((column, k) => (rows[k]!.has(place) ? [{ column, row: rows[k]!.get(place)! }] : []));
    const mean = meanOf(there.map(({ column, row }) => column.values[row] ?? null));
    const last = out.x.at(-1) ?? -Infinity;
    const grown = meanOf(there.flatMap(({ column, row }) => (row > 0 && column.at[row - 1] === at[i - 1] ? [column.x[row]! - column.x[row - 1]!] : [])));
    out.x.push(grown ? last + grown.mean : Math.max(last, meanOf(there.map(({ column, row }) => column.x[row]!))!.mean));
    out.values.push(mean?.mean ?? null);
    out.low.push(mean?.half == null ? null : mean.mean - mean.half);
    out.high.push(mean?.half == null ? null : mean.mean + mean.half);
  }
  return out;
}

/** Returns what `of` gives for a run, or the mean of what it gives for the runs of a group. */
export function columnBy(run: DrawnRun, of: (leaf: DrawnRun) => Column | undefined): Column | undefined {
  if (!run.members) return of(run);
  const columns = run.members.flatMap((member) => of(member) ?? []);
  return columns.length > 0 ? meanColumn(columns) : undefined;
}

/** Returns a metric of a run, or of an eval of it. */
export const columnOf = (run: DrawnRun, metric: string): Column | undefined => columnBy(run, (leaf) => leafColumn(leaf, metric));

export function leafColumn(leaf: DrawnRun, metric: string): Column | undefined {
  const values = leaf.steps.metrics[metric];
  return values ? { at: leaf.steps.step, x: leaf.x, values } : leaf.evals.get(metric);
}

/** Returns the names of all metrics that the runs have a value of. */
export function metricNames(runs: DrawnRun[]): string[] {
  const known = (values: Value[]) => values.some((value) => value !== null);
  return [...new Set(runs.flatMap(leavesOf).flatMap((run) => [...Object.keys(run.steps.metrics).filter((name) => known(run.steps.metrics[name]!)), ...run.evals.keys()]))];
}

/** Returns a group of runs as one whose columns are means. */
export function groupOf(id: string, name: string, members: DrawnRun[]): DrawnRun {
  const steps = meanColumn(members.map((run) => ({ at: run.steps.step, x: run.x, values: run.x })));
  return { ...members[0]!, id, name, members, steps: { ...NO_STEPS, step: steps.at }, x: steps.x };
}

/** Returns the last step that all runs have; null if there is none. */
export function commonStep(runs: DrawnRun[]): number | null {
  const [first, ...rest] = runs.flatMap(leavesOf).map((run) => run.steps.step);
  const others = rest.map((steps) => new Set(steps));
  return first?.findLast((step) => others.every((steps) => steps.has(step))) ?? null;
}

/** Returns the number of steps of the longest run, which determines the smoothing of all runs. */
export const longest = (runs: DrawnRun[]): number => Math.max(0, ...runs.flatMap(leavesOf).map((run) => run.steps.step.length));

/**
 * Returns a run whose axis is a metric: its steps in the order of that metric's values, in a range of steps. Of an eval each
 * step has the newest result. Null for a run without the metric.
 */
export function overMetric(run: DrawnRun, metric: string, range: Range | null = null): DrawnRun | null {
  const column = leafColumn(run, metric);
  if (!column) return null;
  const isEval = !(metric in run.steps.metrics);
  const placeOf = (step: number): Value => {
    const row = isEval ? column.at.findLastIndex((version) => version <= step + 1) : column.at.indexOf(step);
    return column.values[row] ?? null;
  };
  const places = isEval ? run.steps.step.map(placeOf) : column.values;
  const inRange = (step: number) => !range || (step >= range.from && step <= range.to);
  const rows = places.map((_, row) => row).filter((row) => places[row] != null && inRange(run.steps.step[row]!)).sort((a, b) => places[a]! - places[b]!);
  const pick = <T>(values: T[]): T[] => rows.map((row) => values[row]!);
  const metrics = Object.fromEntries(Object.entries(run.steps.metrics).map(([name, values]) => [name, pick(values)]));
  const evals = new Map<string, Column>();
  for (const [name, { at, values, low, high }] of run.evals) {
    const there = at.map((version, i) => ({ i, x: placeOf(Math.max(0, version - 1)) })).filter((one) => one.x !== null && inRange(at[one.i]!)).sort((a, b) => a.x! - b.x!);
    const take = <T>(from: T[]): T[] => there.map(({ i }) => from[i]!);
    evals.set(name, { at: take(at), x: there.map(({ x }) => x!), values: take(values), low: low && take(low), high: high && take(high) });
  }
  return { ...run, steps: { ...NO_STEPS, step: pick(run.steps.step), metrics }, x: pick(places as number[]), evals };
}

const DASHES: (number[] | undefined)[] = [undefined, [6, 3], [2, 3]];

/** Returns the runs with dashes where an earlier one has the same color. */
export function dashed(runs: DrawnRun[]): DrawnRun[] {
  return runs.map((run, i) => ({ ...run, dash: DASHES[runs.slice(0, i).filter((other) => other.color === run.color).length % DASHES.length] }));
}

/** Returns the run of the page and, as far as they are read, those drawn over it; with a grouping, their groups. */
export function useDrawnRuns(info: RunInfo | undefined, steps: StepColumns | null, axis: XAxis, grouping = ""): DrawnRun[] {
  const others = useOthers();
  const otherSteps = useStepsOf(others);
  const ids = info ? [info.info.id, ...others] : [];
  const evals = useEvalsOf(ids);
  const colors = useRunColors();
  const fields = groupFields(grouping).join(",");
  const withFields = useNamed(useResource<Runs>(fields ? "/api/runs" : null, { fields })).data?.runs;
  const plain = useRuns().data?.runs;
  const listed = fields ? withFields : plain;
  return useMemo(() => {
    if (!steps || !info || !colors.isKnown) return [];
    const runs = ids.flatMap((id, i): DrawnRun[] => {
      const theirs = i === 0 ? steps : otherSteps[i - 1];
      if (!theirs) return [];
      const x = placesOf(theirs, axis);
      const name = visible(i === 0 ? info.info.name : (listed?.find((row) => row.id === id)?.name ?? id));
      return [{ id, name, color: colors.of(id), steps: theirs, x, evals: evalColumns(evals[i] ?? [], theirs, x, axis) }];
    });
    if (!grouping || !listed) return dashed(runs);
    const rows = runs.flatMap((run) => listed.find((row) => row.id === run.id) ?? []);
    const groups = groupRuns(rows, groupFields(grouping), (row, field) => row.fields[field]);
    return dashed(groups.map((group) => groupOf(group.key, groupTitle(group, grouping), group.runs.map((row) => runs.find((run) => run.id === row.id)!))));
    // The arrays of steps and evals are new on every call; their parts are not.
  }, [info, steps, axis, listed, grouping, colors, others.join(), ...otherSteps, ...evals]);
}

/** Ties charts over the steps of a run to the address: its range is their zoom, and its step is marked on them. */
export function useStepAxis(run: DrawnRun | undefined, axis: XAxis): Pick<ChartProps, "zoom" | "onZoom" | "onPick" | "stepOf"> {
  const [range, setRange] = useRange();
  const chosen = parseStep(usePlace().params.step);
  const steps = run?.steps.step ?? [];
  const xOf = (step: number): number | null => (axis === "step" ? step : (run?.x[nearest(steps, step)] ?? null));
  const stepOf = (x: number): number => (axis === "step" ? Math.max(0, Math.round(x)) : (steps[nearest(run?.x ?? [], x)] ?? 0));
  useSelected(axis, chosen === null ? null : xOf(chosen));
  const [from, to] = range ? [xOf(range.from), xOf(range.to)] : [null, null];
  const zoom = useMemo(() => (from === null || to === null ? null : { from, to }), [from, to]);
  return {
    zoom,
    stepOf,
    onZoom: (next) => setRange(next && { from: stepOf(next.from), to: stepOf(next.to) }),
    onPick: (x) => {
      const step = String(stepOf(x));
      setParams({ step: place().params.step === step ? null : step });
    },
  };
}
