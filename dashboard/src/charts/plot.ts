/** The plot of a chart: lines by uPlot, bands, stacks, a dot at the head of each line, the crosshair. No React. */

import uPlot from "uplot";
import { number, tick } from "../format";
import { cursorOn } from "../state/cursor";
import { color, FONT } from "../state/theme";
import type { Value } from "../types";
import type { Band, ChartProps, Line } from "./props";
import { type Heat, heatGrid } from "./heat";
import { joinPlaces, lastRow, logTicks, nearest, stepTicks, ticks, valueRange } from "./math";

const AXIS_HEIGHT = 20;
const TOP = 6;
/** Charts below each other begin at the same place unless their labels are long. */
const LEAST_LEFT = 30;
/** With more points, a measured line is a band of its own: fainter. */
const MANY = 300;
const LEAST_RIGHT = 8;
const LABEL_HEIGHT = 13;
/** Space for the title of an axis, in pixels. */
const TITLE_HEIGHT = 20;

export interface Drawn {
  x: number[];
  data: uPlot.AlignedData;
  /** The place of each line's values in the data. */
  rows: number[];
}

interface Layer {
  line: Line;
  order: number;
  what: Band | "raw" | "values";
}

/** Returns what is painted, from bottom to top: bands, measured lines, lines. The first line, of the chosen run, is on top; areas keep their order. */
function layers(lines: Line[]): Layer[] {
  const all = lines.map((line, order) => ({ line, order }));
  const painted = lines.some((line) => line.area) ? all : [...all.slice(1), ...all.slice(0, 1)];
  return [
    ...painted.flatMap((one) => (one.line.bands ?? []).map((what): Layer => ({ ...one, what }))),
    ...painted.filter((one) => one.line.raw).map((one): Layer => ({ ...one, what: "raw" })),
    ...painted.map((one): Layer => ({ ...one, what: "values" })),
  ];
}

/** Puts all lines on one x axis. A gap of a line is null; a place that belongs to another line alone is undefined. */
export function align(x: number[], lines: Line[]): Drawn {
  const columns: { x: number[]; values: Value[] }[] = [];
  const rows: number[] = [];
  for (const { line, order, what } of layers(lines)) {
    const own = line.x ?? x;
    if (what === "values") rows[order] = columns.length + 1;
    if (typeof what === "object") columns.push({ x: own, values: what.high }, { x: own, values: what.low });
    else columns.push({ x: own, values: what === "raw" ? line.raw! : line.values });
  }
  if (columns.every((column) => column.x === columns[0]?.x)) {
    const own = columns[0]?.x ?? x;
    return { x: own, data: [own, ...columns.map((column) => column.values)] as uPlot.AlignedData, rows };
  }
  const joined = joinPlaces(columns.map((column) => column.x));
  const data = columns.map(({ values }, i) => joined.rows[i]!.map((row) => (row === undefined ? undefined : (values[row] ?? null))));
  return { x: joined.x, data: [joined.x, ...data] as uPlot.AlignedData, rows };
}

/** Draws the crosshair with a ring on each line that has a value there, and a mark where the selected step is. */
export function placeCrosshair(plot: uPlot, overlay: HTMLElement, props: ChartProps): void {
  const { at: x, selected } = cursorOn(props.axis ?? "step");
  const { min, max } = plot.scales.x!;
  const inside = (value: number | null): value is number => value !== null && min != null && max != null && value >= min && value <= max;
  overlay.replaceChildren();
  const ratio = devicePixelRatio || 1;
  const left = plot.bbox.left / ratio;
  const top = plot.bbox.top / ratio;
  const width = plot.bbox.width / ratio;
  const height = plot.bbox.height / ratio;
  const X = (value: number) => Math.round(left + plot.valToPos(value, "x"));
  const add = (name: string, style: Partial<CSSStyleDeclaration>, text = "") => {
    const element = document.createElement("i");
    element.className = name;
    Object.assign(element.style, style);
    element.textContent = text;
    overlay.append(element);
  };
  if (inside(selected)) add("selected", { left: `${X(selected)}px`, height: `${top + height}px` });
  if (!inside(x)) return;
  const at = X(x);
  if (x !== selected) add("hair", { left: `${at}px`, height: `${top + height}px` });
  for (const line of props.lines) {
    if (line.area) continue;
    const xs = line.x ?? props.x;
    const row = nearest(xs, x);
    const value = row < 0 || xs[row] !== x ? null : line.values[row];
    const y = value == null ? NaN : plot.valToPos(value, "y");
    if (y >= 0 && y <= height) add("ring", { left: `${at}px`, top: `${top + y}px`, borderColor: `var(${line.color})` });
  }
  const text = (props.xFormat ?? String)(x);
  const half = Math.max(11, 4 * text.length + 4);
  const middle = Math.min(Math.max(at, half), left + width + 8 - half);
  add("tag", { left: `${middle}px`, top: `${top + height + 3}px` }, text);
}

/** Draws with uPlot; the colors come from the tokens. `scale` enlarges type and lines, for a picture. */
export function draw(host: HTMLElement, latest: { current: ChartProps }, drawn: Drawn, size: { width: number; height: number }, scale = 1): uPlot {
  const props = latest.current;
  const { lines } = props;
  const inZoom = (values: Value[], xs: number[]) =>
    props.zoom ? values.filter((_, row) => xs[row]! >= props.zoom!.from && xs[row]! <= props.zoom!.to) : values;
  const ranged = lines.flatMap((line) => {
    const xs = line.x ?? props.x;
    const edges = (line.bands ?? []).flatMap((band) => [band.low, band.high]);
    const whiskers = line.whiskers ? [line.whiskers.low, line.whiskers.high] : [];
    return [line.raw ?? line.values, line.values, ...edges, ...whiskers].map((values) => inZoom(values, xs));
  });
  if (props.heat) ranged.push(inZoom(props.heat.low, props.heat.x), inZoom(props.heat.high, props.heat.x));
  if (lines.some((line) => line.area)) ranged.push([0]);
  const [yLow, yHigh] = valueRange(ranged, {
    low: props.low,
    high: props.high,
    log: props.log,
    withoutOutliers: props.withoutOutliers,
  });
  const first = props.zoom?.from ?? props.xStart ?? drawn.x[0] ?? 0;
  const last = props.zoom?.to ?? Math.max(props.xEnd ?? -Infinity, drawn.x.at(-1) ?? 1);
  const xRange: [number, number] = last > first ? [first, last] : [first - 0.5, first + 0.5];
  const [xTitle, yTitle] = props.titled ? [props.xTitle, props.yTitle] : [];
  const plotHeight = size.height / scale - TOP - AXIS_HEIGHT - (xTitle ? TITLE_HEIGHT : 0);
  const wanted = plotHeight > 170 ? 4 : plotHeight > 90 ? 3 : 2;
  const yTicks = props.log ? logTicks(yLow, yHigh) : ticks(yLow, yHigh, wanted);
  const stepOf = (all: number[]) => (all.length > 1 ? all[1]! - all[0]! : undefined);
  const write = props.tickFormat ?? ((value: number) => (props.log ? number(value, decimals(value)) : tick(value, stepOf(yTicks))));
  const context = measuring();
  const labelWidth = Math.max(...yTicks.map((value) => context.measureText(write(value)).width), 8);
  const left = Math.max(LEAST_LEFT, Math.ceil(labelWidth) + 8);
  const xTicks = props.xTicks ?? stepTicks;
  const xSplits = xTicks(xRange[0], xRange[1], Math.max(2, Math.min(6, Math.floor(size.width / scale / 75))));
  const writeX = (value: number) => (props.xFormat ?? String)(value, stepOf(xSplits));
  const right = Math.max(props.right ?? LEAST_RIGHT, overhang(xSplits.at(-1), xRange, size.width / scale - left - LEAST_RIGHT - (yTitle ? TITLE_HEIGHT : 0), (value) => context.measureText(writeX(value)).width));

  const series: uPlot.Series[] = [{}];
  const bands: uPlot.Band[] = [];
  let below = -1;
  for (const { line, what } of layers(lines)) {
    const stroke = color(line.color);
    const at = series.length;
    if (typeof what === "object") {
      series.push({ stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } });
      bands.push({ series: [at, at + 1], fill: faded(stroke, what.opacity) });
      continue;
    }
    if (line.cloud && (what === "raw" || !line.raw)) {
      series.push({ stroke, paths: () => null, points: { show: true, size: 4 * scale, width: 0, fill: faded(stroke, line.raw ? 0.4 : 0.8) } });
      continue;
    }
    if (what === "raw") {
      series.push({ stroke: faded(stroke, line.raw!.length > MANY ? 0.16 : 0.3), width: scale, points: { show: false } });
      continue;
    }
    series.push({
      stroke: line.area ? "transparent" : stroke,
      width: (line.width ?? 1.5) * scale,
      dash: line.dash?.map((length) => length * scale),
      points: { show: !line.area && (line.dots || line.values.filter((value) => value !== null).length === 1), size: 5 * scale, fill: stroke },
      fill: line.area && below < 0 ? faded(stroke, 0.85) : undefined,
      fillTo: yLow > 0 ? yLow : 0,
    });
    if (line.area && below >= 0) bands.push({ series: [at, below], fill: faded(stroke, 0.85) });
    if (line.area) below = at;
  }
  const font = FONT.replace("12px", `${12 * scale}px`);
  const titled = (label?: string) => (label ? { label, labelFont: font, labelSize: TITLE_HEIGHT * scale, labelGap: 2 * scale } : {});

  return new uPlot(
    {
      width: size.width,
      height: size.height,
      padding: [TOP * scale, right * scale, 0, 0],
      legend: { show: false },
      cursor: {
        x: false,
        y: false,
        points: { show: false },
        drag: { x: props.onZoom !== undefined, y: false, setScale: false, dist: 4 },
      },
      scales: {
        x: { time: false, range: () => xRange },
        y: { distr: props.log ? 3 : 1, range: () => [yLow, yHigh] },
      },
      axes: [
        {
          size: AXIS_HEIGHT * scale,
          font,
          ...titled(xTitle),
          stroke: color("--ink3"),
          gap: 3 * scale,
          grid: { show: false },
          ticks: { stroke: color("--line2"), width: scale, size: 4 * scale },
          border: { show: true, stroke: color("--line2"), width: scale },
          splits: () => xSplits,
          values: (_, splits) => splits.map((value) => writeX(value)),
        },
        {
          size: left * scale,
          font,
          ...titled(yTitle),
          stroke: color("--ink3"),
          gap: 6 * scale,
          grid: { stroke: color("--line"), width: scale },
          ticks: { show: false },
          splits: () => yTicks,
          values: () => yTicks.map(write),
        },
      ],
      series,
      bands,
      hooks: {
        // uPlot draws in the next microtask: the page may have got other lines by then, which `drawn` does not have.
        drawAxes: [(u) => props.heat && paintHeat(u, props.heat)],
        draw: [(u) => decorate(u, props, drawn, scale)],
        setSelect: [
          (u) => {
            const { left: from, width } = u.select;
            if (width < 4) return;
            latest.current.onZoom?.({ from: u.posToVal(from, "x"), to: u.posToVal(from + width, "x") });
            u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          },
        ],
      },
    },
    drawn.data,
    host,
  );
}

/** Returns the pixels right of the plot that the half of the last label needs. */
export function overhang(last: number | undefined, [low, high]: [number, number], width: number, widthOf: (value: number) => number): number {
  if (last === undefined) return 0;
  const from = ((high - last) / (high - low)) * width;
  return Math.ceil(widthOf(last) / 2 - from) + 1;
}

const CELL_HEIGHT = 5;
const CELL_WIDTH = 2;
const RAMP = ["--r0", "--r1", "--r2", "--r3", "--r4"];

/** Paints histograms: the more of a step's samples lie in a cell, the further it is on the ramp. */
function paintHeat(plot: uPlot, heat: Heat): void {
  const context = plot.ctx;
  const ratio = devicePixelRatio || 1;
  const { left, top, width, height } = plot.bbox;
  const { min, max } = plot.scales.x!;
  if (min == null || max == null) return;
  const columns = Math.max(1, Math.floor(width / (CELL_WIDTH * ratio)));
  const rows = Math.max(1, Math.floor(height / (CELL_HEIGHT * ratio)));
  const grid = heatGrid(heat, min, max, columns, rows, (value) => 1 - (plot.valToPos(value, "y", true) - top) / height);
  const most = grid.reduce((a, b) => Math.max(a, b), 0);
  if (most === 0) return;
  const colors = ramp(RAMP.map(color), 24);
  for (let column = 0; column < columns; column += 1) {
    const from = left + Math.floor((column * width) / columns);
    const to = left + Math.floor(((column + 1) * width) / columns);
    for (let row = 0; row < rows; row += 1) {
      const share = grid[column * rows + row]! / most;
      if (share <= 0) continue;
      // The square root separates small shares, which are most of the cells.
      context.fillStyle = colors[Math.ceil(Math.sqrt(share) * (colors.length - 1))]!;
      const bottom = top + height - Math.floor((row * height) / rows);
      const upper = top + height - Math.floor(((row + 1) * height) / rows);
      context.fillRect(from, upper, to - from, bottom - upper);
    }
  }
}

function decimals(value: number): number | undefined {
  return Math.abs(value) >= 1 && Number.isInteger(value) ? 0 : undefined;
}

/** Marks, whiskers, heads and direct labels, over the lines. */
function decorate(plot: uPlot, props: ChartProps, drawn: Drawn, scale: number): void {
  const context = plot.ctx;
  const ratio = (devicePixelRatio || 1) * scale;
  const X = (value: number) => plot.valToPos(value, "x", true);
  const Y = (value: number) => plot.valToPos(value, "y", true);
  const { left, top, width, height } = plot.bbox;
  context.save();
  for (const mark of props.marks ?? []) {
    const y = Y(mark.y);
    if (y < top || y > top + height) continue;
    context.strokeStyle = color("--ink3");
    context.lineWidth = ratio;
    context.setLineDash([2 * ratio, 3 * ratio]);
    context.beginPath();
    context.moveTo(left, Math.round(y) + 0.5);
    context.lineTo(left + width, Math.round(y) + 0.5);
    context.stroke();
    context.setLineDash([]);
    if (mark.label) write(context, mark.label, left + width - 4 * ratio, y - 4 * ratio, "--ink3", "right", ratio);
  }
  const { min, max } = plot.scales.x!;
  const inside = (value: number) => value >= (min ?? -Infinity) && value <= (max ?? Infinity);
  const labels: { x: number; y: number; text: string; color: string }[] = [];
  for (const { line, order: i, what } of layers(props.lines)) {
    if (what !== "values") continue;
    const xs = line.x ?? props.x;
    if (line.whiskers) {
      context.strokeStyle = color(line.color);
      context.lineWidth = ratio;
      context.beginPath();
      xs.forEach((value, row) => {
        const [low, high] = [line.whiskers!.low[row], line.whiskers!.high[row]];
        if (low == null || high == null || !inside(value)) return;
        context.moveTo(X(value), Y(low));
        context.lineTo(X(value), Y(high));
      });
      context.stroke();
    }
    const values = drawn.data[drawn.rows[i]!] as (Value | undefined)[];
    let row = lastRow(values);
    while (row >= 0 && (!inside(drawn.x[row]!) || values[row] == null)) row -= 1;
    if (row < 0) continue;
    const x = X(drawn.x[row]!);
    const y = Y(values[row]!);
    const under = i > 0 && line.area ? (drawn.data[drawn.rows[i - 1]!] as (Value | undefined)[])[row] : undefined;
    const bottom = under == null ? top + height : Y(under);
    if (line.area && row === 0) {
      // An area of one step has no width.
      context.fillStyle = faded(color(line.color), 0.85);
      context.fillRect(x, y, 6 * ratio, bottom - y);
    }
    if (line.direct) labels.push({ x: x + 9 * ratio, y: line.area ? (y + bottom) / 2 : y, text: line.direct, color: line.area ? "--ink2" : line.color });
    if (line.head === false || line.area) continue;
    context.beginPath();
    context.arc(x, y, 3.4 * ratio, 0, 2 * Math.PI);
    context.fillStyle = color(line.color);
    context.strokeStyle = color("--ground");
    context.lineWidth = 1.5 * ratio;
    context.fill();
    context.stroke();
  }
  // Labels keep their distance from each other and stay above the axis.
  labels.sort((a, b) => a.y - b.y);
  const apart = LABEL_HEIGHT * ratio;
  labels.forEach((label, i) => (label.y = Math.max(label.y, (labels[i - 1]?.y ?? -Infinity) + apart)));
  for (let i = labels.length - 1; i >= 0; i -= 1) labels[i]!.y = Math.min(labels[i]!.y, (labels[i + 1]?.y ?? top + height + 6 * ratio) - apart);
  context.font = FONT.replace("12px", `${12 * ratio}px`);
  for (const label of labels) {
    const wide = context.measureText(label.text).width;
    const over = label.x + wide - ((plot.width * ratio) / scale - 2);
    const y = Math.max(label.y + (over > 0 ? -6 : 4) * ratio, LABEL_HEIGHT * ratio);
    write(context, label.text, over > 0 ? label.x - 12 * ratio : label.x, y, label.color, over > 0 ? "right" : "left", ratio);
  }
  context.restore();
}

function write(context: CanvasRenderingContext2D, text: string, x: number, y: number, token: string, align: CanvasTextAlign, ratio: number): void {
  context.font = FONT.replace("12px", `${12 * ratio}px`);
  context.textAlign = align;
  context.textBaseline = "alphabetic";
  context.lineJoin = "round";
  context.lineWidth = 3 * ratio;
  context.strokeStyle = color("--ground");
  context.strokeText(text, x, y);
  context.fillStyle = color(token);
  context.fillText(text, x, y);
}

let measure: CanvasRenderingContext2D | null = null;
function measuring(): CanvasRenderingContext2D {
  measure ??= document.createElement("canvas").getContext("2d")!;
  measure.font = FONT;
  return measure;
}

/** Returns `count` colors along a ramp of hex colors. */
function ramp(stops: string[], count: number): string[] {
  const channels = stops.map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  return Array.from({ length: count }, (_, i) => {
    const at = (i / (count - 1)) * (stops.length - 1);
    const below = channels[Math.floor(at)]!;
    const above = channels[Math.ceil(at)]!;
    return `rgb(${below.map((value, channel) => Math.round(value + (above[channel]! - value) * (at % 1))).join(" ")})`;
  });
}

/** Returns a hex color with an opacity. */
function faded(hex: string, opacity: number): string {
  return `${hex.slice(0, 7)}${Math.round(255 * opacity).toString(16).padStart(2, "0")}`;
}
