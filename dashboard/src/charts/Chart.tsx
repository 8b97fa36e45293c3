/** A chart: title line with the value at the crosshair, lines by uPlot, bands, stacks, a dot at the head of each line. */

import { type ReactNode, useEffect, useMemo, useRef, useState } from "react";
import uPlot from "uplot";
import { number } from "../format";
import { cursorNow, onCursor, setCursor } from "../state/cursor";
import { color, useTheme } from "../state/theme";
import type { Value } from "../types";
import { lastRow, logTicks, nearest, stepTicks, ticks, valueRange } from "./math";

export interface Band {
  low: Value[];
  high: Value[];
  opacity: number;
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
  bands?: Band[];
  width?: number;
  dash?: number[];
  /** Fills down to the line before it (a stack), or to the axis. */
  area?: boolean;
  head?: boolean;
  /** Left out of the title line. */
  silent?: boolean;
  /** Short ticks at each point from low to high: intervals. */
  whiskers?: { low: Value[]; high: Value[] };
  /** Written at the head of the line. */
  direct?: string;
}

export interface ChartProps {
  title: string;
  unit?: string;
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
  xFormat?: (x: number) => string;
  xTicks?: (low: number, high: number, wanted: number) => number[];
  /** The values of the title line, instead of those of the lines. */
  read?: (x: number | null) => ReactNode;
  /** Room at the right for direct labels. */
  right?: number;
  marks?: { y: number; label?: string }[];
  /** Behind the title: a handle, a menu. */
  before?: ReactNode;
  after?: ReactNode;
  onTitle?: () => void;
  /** Cells behind the lines: a histogram in each step. */
  heat?: { x: number[]; edges: number[][]; counts: number[][] };
  className?: string;
  canvas?: (canvas: HTMLCanvasElement | null) => void;
}

const AXIS_HEIGHT = 20;
const TOP = 6;
/** Charts below each other begin at the same place unless their labels are long. */
const LEAST_LEFT = 30;
const LABEL_HEIGHT = 13;
const FONT = '12px -apple-system, "Segoe UI", Inter, Roboto, system-ui, "Noto Sans", sans-serif';

interface Drawn {
  x: number[];
  data: uPlot.AlignedData;
  /** The place of each line's values in the data. */
  rows: number[];
}

/** Puts all lines on one x axis. A gap of a line is null; a place that belongs to another line alone is undefined. */
function align(x: number[], lines: Line[]): Drawn {
  const columns: { x: number[]; values: Value[] }[] = [];
  const rows: number[] = [];
  for (const line of lines) {
    const own = line.x ?? x;
    for (const band of line.bands ?? []) columns.push({ x: own, values: band.high }, { x: own, values: band.low });
    if (line.raw) columns.push({ x: own, values: line.raw });
    rows.push(columns.length + 1);
    columns.push({ x: own, values: line.values });
  }
  if (columns.every((column) => column.x === columns[0]?.x)) {
    const own = columns[0]?.x ?? x;
    return { x: own, data: [own, ...columns.map((column) => column.values)] as uPlot.AlignedData, rows };
  }
  const all = [...new Set(columns.flatMap((column) => column.x))].sort((a, b) => a - b);
  const place = new Map(all.map((value, row) => [value, row]));
  const data = columns.map((column) => {
    const out = new Array<Value | undefined>(all.length).fill(undefined);
    column.x.forEach((value, row) => (out[place.get(value)!] = column.values[row] ?? null));
    return out;
  });
  return { x: all, data: [all, ...data] as uPlot.AlignedData, rows };
}

export function Chart(props: ChartProps) {
  const { title, unit, x, lines, axis = "step", format = number, className = "" } = props;
  const { dark } = useTheme();
  const host = useRef<HTMLDivElement>(null);
  const overlay = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const drawn = useMemo(() => align(x, lines), [x, lines]);
  const [size, setSize] = useState<{ width: number; height: number } | null>(null);

  useEffect(() => {
    const element = host.current!;
    const observer = new ResizeObserver(() => {
      const { clientWidth: width, clientHeight: height } = element;
      if (width > 20 && height > 40) setSize((old) => (old?.width === width && old.height === height ? old : { width, height }));
    });
    observer.observe(element);
    return () => observer.disconnect();
  }, []);

  useEffect(() => {
    if (!size) return;
    const instance = draw(host.current!, latest, drawn, size);
    plot.current = instance;
    props.canvas?.(instance.ctx.canvas);
    placeCrosshair(instance, overlay.current!, latest.current);
    return () => {
      props.canvas?.(null);
      plot.current = null;
      instance.destroy();
    };
  }, [drawn, size, dark, props.log, props.low, props.high, props.xEnd, props.zoom?.from, props.zoom?.to, props.withoutOutliers, props.heat, props.right]);

  useEffect(() => onCursor(() => plot.current && placeCrosshair(plot.current, overlay.current!, latest.current)), []);

  const move = (event: React.PointerEvent) => {
    const instance = plot.current;
    if (!instance || drawn.x.length === 0) return;
    const box = instance.over.getBoundingClientRect();
    const at = instance.posToVal(event.clientX - box.left, "x");
    setCursor({ axis, x: drawn.x[nearest(drawn.x, at)]! });
  };

  const label = `${title}${unit ? `, ${unit}` : ""}`;
  return (
    <figure className={`chart ${className}`} aria-label={label}>
      <figcaption className="t">
        {props.before}
        {props.onTitle ? (
          <button className="name" onClick={props.onTitle} title={title}>
            <Name text={title} />
          </button>
        ) : (
          <b className="name" title={title}>
            <Name text={title} />
          </b>
        )}
        <span className="u">{unit}</span>
        <Values {...props} axis={axis} format={format} />
        {props.after}
      </figcaption>
      <div className="p" onPointerMove={move} onPointerLeave={() => setCursor(null)} onDoubleClick={() => props.onZoom?.(null)}>
        <div className="plot" ref={host} />
        <div className="cross" ref={overlay} aria-hidden />
      </div>
    </figure>
  );
}

/** Names differ at their ends: where room is short, the part before the last slash is cut. */
function Name({ text }: { text: string }) {
  const at = text.lastIndexOf("/") + 1;
  const tail = text.slice(at);
  if (at === 0 || tail.length > 24) return <span className="cut">{text}</span>;
  return (
    <>
      <span className="cut">{text.slice(0, at)}</span>
      <span className="tail">{tail}</span>
    </>
  );
}

/** The values at the crosshair, or the last ones. */
function Values(props: ChartProps & { axis: string; format: (value: Value) => string }) {
  const at = useCursorOf(props.axis);
  if (props.read) return <span className="v">{props.read(at)}</span>;
  const spoken = props.lines.filter((line) => !line.silent);
  const text = (line: Line) => {
    const values = line.raw ?? line.values;
    const xs = line.x ?? props.x;
    const row = at === null ? lastRow(values) : nearest(xs, at);
    const beyond = at !== null && xs.length > 0 && at > xs[xs.length - 1]!;
    return props.format(row < 0 || beyond ? null : (values[row] ?? null));
  };
  if (spoken.length === 1) return <span className="v">{text(spoken[0]!)}</span>;
  return (
    <span className="v many">
      {spoken.slice(0, 6).map((line) => (
        <span key={line.label} title={line.label}>
          <i className="dot small" style={{ background: `var(${line.color})` }} />
          {text(line)}
        </span>
      ))}
    </span>
  );
}

function useCursorOf(axis: string): number | null {
  const [at, setAt] = useState<number | null>(null);
  useEffect(() => {
    const read = () => {
      const cursor = cursorNow();
      setAt(cursor?.axis === axis ? cursor.x : null);
    };
    read();
    return onCursor(read);
  }, [axis]);
  return at;
}

function placeCrosshair(plot: uPlot, overlay: HTMLElement, props: ChartProps): void {
  const cursor = cursorNow();
  const { min, max } = plot.scales.x!;
  const shown = cursor && cursor.axis === (props.axis ?? "step") && min != null && max != null && cursor.x >= min && cursor.x <= max;
  overlay.replaceChildren();
  if (!shown) return;
  const ratio = devicePixelRatio || 1;
  const left = plot.bbox.left / ratio;
  const top = plot.bbox.top / ratio;
  const width = plot.bbox.width / ratio;
  const height = plot.bbox.height / ratio;
  const at = Math.round(left + plot.valToPos(cursor.x, "x"));
  const add = (name: string, style: Partial<CSSStyleDeclaration>, text = "") => {
    const element = document.createElement("i");
    element.className = name;
    Object.assign(element.style, style);
    element.textContent = text;
    overlay.append(element);
    return element;
  };
  add("hair", { left: `${at}px`, height: `${top + height}px` });
  for (const line of props.lines) {
    if (line.area) continue;
    const xs = line.x ?? props.x;
    const row = nearest(xs, cursor.x);
    const value = row < 0 || xs[row] !== cursor.x ? null : line.values[row];
    const y = value == null ? NaN : plot.valToPos(value, "y");
    if (y >= 0 && y <= height) add("ring", { left: `${at}px`, top: `${top + y}px`, borderColor: `var(${line.color})` });
  }
  const text = (props.xFormat ?? String)(cursor.x);
  const half = Math.max(11, 4 * text.length + 4);
  const middle = Math.min(Math.max(at, half), left + width + 8 - half);
  add("tag", { left: `${middle}px`, top: `${top + height + 3}px` }, text);
}

/** Draws with uPlot; the sizes of axes and the colors come from the tokens. */
function draw(host: HTMLElement, latest: { current: ChartProps }, drawn: Drawn, size: { width: number; height: number }): uPlot {
  const props = latest.current;
  const { lines } = props;
  const tickFormat = props.tickFormat ?? ((value: number) => number(value, decimals(value)));
  const inZoom = (values: Value[], xs: number[]) =>
    props.zoom ? values.filter((_, row) => xs[row]! >= props.zoom!.from && xs[row]! <= props.zoom!.to) : values;
  const ranged = lines.flatMap((line) => {
    const xs = line.x ?? props.x;
    const edges = (line.bands ?? []).flatMap((band) => [band.low, band.high]);
    const whiskers = line.whiskers ? [line.whiskers.low, line.whiskers.high] : [];
    return [line.raw ?? line.values, line.values, ...edges, ...whiskers].map((values) => inZoom(values, xs));
  });
  if (lines.some((line) => line.area)) ranged.push([0]);
  const heatEnds = props.heat ? props.heat.edges.map((edges) => [edges[0] ?? null, edges.at(-1) ?? null]) : [];
  const [yLow, yHigh] = valueRange([...ranged, ...heatEnds], {
    low: props.low,
    high: props.high,
    log: props.log,
    withoutOutliers: props.withoutOutliers,
  });
  const first = props.zoom?.from ?? props.xStart ?? drawn.x[0] ?? 0;
  const last = props.zoom?.to ?? Math.max(props.xEnd ?? -Infinity, drawn.x.at(-1) ?? 1);
  const xRange: [number, number] = last > first ? [first, last] : [first - 0.5, first + 0.5];
  const plotHeight = size.height - TOP - AXIS_HEIGHT;
  const wanted = plotHeight > 170 ? 4 : plotHeight > 90 ? 3 : 2;
  const yTicks = props.log ? logTicks(yLow, yHigh) : ticks(yLow, yHigh, wanted);
  const step = yTicks.length > 1 ? yTicks[1]! - yTicks[0]! : 1;
  const tickDecimals = Math.max(0, -Math.floor(Math.log10(Math.abs(step) || 1) + 1e-9));
  const write = props.tickFormat ?? ((value: number) => (props.log ? tickFormat(value) : tickText(value, tickDecimals)));
  const context = measuring();
  const labelWidth = Math.max(...yTicks.map((value) => context.measureText(write(value)).width), 8);
  const left = Math.max(LEAST_LEFT, Math.ceil(labelWidth) + 8);
  const xTicks = props.xTicks ?? stepTicks;

  const series: uPlot.Series[] = [{}];
  const bands: uPlot.Band[] = [];
  let below = -1;
  for (const line of lines) {
    const stroke = color(line.color);
    for (const band of line.bands ?? []) {
      const at = series.length;
      series.push({ stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } });
      bands.push({ series: [at, at + 1], fill: faded(stroke, band.opacity) });
    }
    if (line.raw) series.push({ stroke: faded(stroke, 0.3), width: 1, points: { show: false } });
    const at = series.length;
    series.push({
      stroke: line.area ? "transparent" : stroke,
      width: line.width ?? 1.5,
      dash: line.dash,
      points: { show: !line.area && line.values.filter((value) => value !== null).length === 1, size: 5, fill: stroke },
      fill: line.area && below < 0 ? faded(stroke, 0.85) : undefined,
      fillTo: yLow > 0 ? yLow : 0,
    });
    if (line.area && below >= 0) bands.push({ series: [at, below], fill: faded(stroke, 0.85) });
    if (line.area) below = at;
  }

  const plot = new uPlot(
    {
      width: size.width,
      height: size.height,
      padding: [TOP, props.right ?? 8, 0, 0],
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
          size: AXIS_HEIGHT,
          font: FONT,
          stroke: color("--ink3"),
          gap: 3,
          grid: { show: false },
          ticks: { stroke: color("--line2"), width: 1, size: 4 },
          border: { show: true, stroke: color("--line2"), width: 1 },
          splits: () => xTicks(xRange[0], xRange[1], Math.max(2, Math.min(6, Math.floor(size.width / 75)))),
          values: (_, splits) => splits.map((value) => (props.xFormat ?? String)(value)),
        },
        {
          size: left,
          font: FONT,
          stroke: color("--ink3"),
          gap: 6,
          grid: { stroke: color("--line"), width: 1 },
          ticks: { show: false },
          splits: () => yTicks,
          values: () => yTicks.map(write),
        },
      ],
      series,
      bands,
      hooks: {
        drawAxes: [(u) => props.heat && drawHeat(u, props.heat)],
        draw: [(u) => decorate(u, latest.current, drawn)],
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
  return plot;
}

function decimals(value: number): number | undefined {
  return Math.abs(value) >= 1 && Number.isInteger(value) ? 0 : undefined;
}

function tickText(value: number, digits: number): string {
  const size = Math.abs(value);
  if (size >= 1e4) return number(value);
  return digits > 4 ? number(value) : number(value, digits);
}

/** Marks, whiskers, heads and direct labels, over the lines. */
function decorate(plot: uPlot, props: ChartProps, drawn: Drawn): void {
  const context = plot.ctx;
  const ratio = devicePixelRatio || 1;
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
  props.lines.forEach((line, i) => {
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
    if (row < 0) return;
    const x = X(drawn.x[row]!);
    const y = Y(values[row]!);
    if (line.direct) {
      const under = i > 0 && line.area ? (drawn.data[drawn.rows[i - 1]!] as (Value | undefined)[])[row] : undefined;
      const middle = line.area ? (y + (under == null ? top + height : Y(under))) / 2 : y;
      labels.push({ x: x + 9 * ratio, y: middle, text: line.direct, color: line.area ? "--ink2" : line.color });
    }
    if (line.head === false || line.area) return;
    context.beginPath();
    context.arc(x, y, 3.4 * ratio, 0, 2 * Math.PI);
    context.fillStyle = color(line.color);
    context.strokeStyle = color("--ground");
    context.lineWidth = 1.5 * ratio;
    context.fill();
    context.stroke();
  });
  // Labels keep their distance from each other and stay above the axis.
  labels.sort((a, b) => a.y - b.y);
  const apart = LABEL_HEIGHT * ratio;
  labels.forEach((label, i) => (label.y = Math.max(label.y, (labels[i - 1]?.y ?? -Infinity) + apart)));
  for (let i = labels.length - 1; i >= 0; i -= 1) labels[i]!.y = Math.min(labels[i]!.y, (labels[i + 1]?.y ?? top + height + 6 * ratio) - apart);
  context.font = FONT.replace("12px", `${12 * ratio}px`);
  for (const label of labels) {
    const wide = context.measureText(label.text).width;
    const over = label.x + wide - (plot.width * ratio - 2);
    write(context, label.text, over > 0 ? label.x - 12 * ratio : label.x, label.y + (over > 0 ? -6 : 4) * ratio, label.color, over > 0 ? "right" : "left", ratio);
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

function drawHeat(plot: uPlot, heat: NonNullable<ChartProps["heat"]>): void {
  const context = plot.ctx;
  const most = Math.max(1, ...heat.counts.flat());
  const { left, width } = plot.bbox;
  context.save();
  context.beginPath();
  context.rect(left, plot.bbox.top, width, plot.bbox.height);
  context.clip();
  context.fillStyle = color("--c1");
  heat.x.forEach((x, i) => {
    const gap = (heat.x[i + 1] ?? x + (x - (heat.x[i - 1] ?? x - 1))) - x;
    const from = plot.valToPos(x - gap / 2, "x", true);
    const to = plot.valToPos(x + gap / 2, "x", true);
    heat.counts[i]!.forEach((count, bin) => {
      if (!count) return;
      const high = plot.valToPos(heat.edges[i]![bin + 1]!, "y", true);
      const low = plot.valToPos(heat.edges[i]![bin]!, "y", true);
      context.globalAlpha = 0.08 + 0.92 * Math.sqrt(count / most);
      context.fillRect(from, high, to - from + 0.5, low - high + 0.5);
    });
  });
  context.restore();
}

let measure: CanvasRenderingContext2D | null = null;
function measuring(): CanvasRenderingContext2D {
  measure ??= document.createElement("canvas").getContext("2d")!;
  measure.font = FONT;
  return measure;
}

/** Returns a hex color with an opacity. */
export function faded(hex: string, opacity: number): string {
  return `${hex.slice(0, 7)}${Math.round(255 * opacity).toString(16).padStart(2, "0")}`;
}
