/** What a chart is given: lines, bands, axes. */

import type { ReactNode } from "react";
import type { Item } from "../shell/Menu";
import type { Value } from "../types";
import type { Heat } from "./heat";

export interface Band {
  low: Value[];
  high: Value[];
  opacity: number;
  /** What a CSV has of it: names of its edges and their measured values, which are not smoothed. */
  measured?: { names: [string, string]; low: Value[]; high: Value[] };
}

export interface Line {
  label: string;
  /** A color token: `--c1`. */
  color: string;
  values: Value[];
  /** Own places on the x axis, where lines differ in them. */
  x?: number[];
  /** Measured values, faint under a smoothed line; the title line reads them. */
  raw?: Value[];
  /** What a CSV has of it, where that is neither `raw` nor `values`: a part of a stack. */
  measured?: Value[];
  bands?: Band[];
  width?: number;
  dash?: number[];
  /** Fills down to the line before it (a stack), or to the axis. */
  area?: boolean;
  head?: boolean;
  /** A dot on each value: there are few. */
  dots?: boolean;
  /** Draws measured values as points without a line, because the axis does not order them by step. */
  cloud?: boolean;
  /** Left out of the title line. */
  silent?: boolean;
  /** Short ticks at each point from low to high: intervals. */
  whiskers?: { low: Value[]; high: Value[] };
  /** Written at the head of the line. */
  direct?: string;
  /** Replaces the last value in the title line while there is no crosshair. */
  last?: Value;
  /** Other lines show their difference to this one. */
  baseline?: boolean;
}

export interface ChartProps {
  title: string;
  /** The whole name, where the title is its end. */
  name?: string;
  unit?: string;
  /** Beside the unit where there is room. */
  note?: string;
  /** Names the samples that are drawn if they differ from the page's choice. It is always shown. */
  scope?: string;
  /** The step of the values in the title line, unless it is the last one of each line: `step 57`. */
  until?: string;
  /** Shows the names of the lines in the title line. */
  named?: boolean;
  /** Titles of the axes, for saved pictures and the full screen, which have room for them. */
  xTitle?: string;
  yTitle?: string;
  titled?: boolean;
  /** Histograms under the lines, in the color of the first line. */
  heat?: Heat | null;
  x: number[];
  lines: Line[];
  /** Charts with the same axis share the crosshair. */
  axis?: string;
  xStart?: number;
  xEnd?: number;
  zoom?: { from: number; to: number } | null;
  onZoom?: (zoom: { from: number; to: number } | null) => void;
  low?: number;
  high?: number;
  log?: boolean;
  withoutOutliers?: boolean;
  format?: (value: Value) => string;
  tickFormat?: (value: number) => string;
  /** Of a tick with the distance to the next one, of the crosshair without. */
  xFormat?: (x: number, step?: number) => string;
  xTicks?: (low: number, high: number, wanted: number) => number[];
  /** The values of the title line, instead of those of the lines. */
  read?: (x: number | null) => ReactNode;
  /** Room at the right for direct labels. */
  right?: number;
  marks?: { y: number; label?: string }[];
  /** Before the title: a handle. */
  before?: ReactNode;
  /** What the menu offers beside saving. */
  menu?: Item[];
  onTitle?: () => void;
  /** A click, or Enter, selects the place of the crosshair. */
  onPick?: (x: number) => void;
  /** The metric of the chart, and the step at an x value. With it, a click offers the page of what changed at that step. */
  metric?: string;
  stepOf?: (x: number) => number;
}
