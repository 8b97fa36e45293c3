/** A chart: title line with the value at the crosshair, above a plot. */

import { type ReactNode, useEffect, useMemo, useRef, useState } from "react";
import type uPlot from "uplot";
import { number } from "../format";
import { onCursor, setCursor, useCursor } from "../state/cursor";
import { useTheme } from "../state/theme";
import type { Value } from "../types";
import type { Heat } from "./heat";
import { lastRow, nearest } from "./math";
import { align, draw, placeCrosshair } from "./plot";

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
  /** Beside the unit where there is room. */
  note?: string;
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
  canvas?: (canvas: HTMLCanvasElement | null) => void;
}

export function Chart(props: ChartProps) {
  const { title, unit, x, lines, axis = "step", format = number } = props;
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
  }, [drawn, size, dark, props.log, props.low, props.high, props.xEnd, props.zoom?.from, props.zoom?.to, props.withoutOutliers, props.right, props.heat]);

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
    <figure className="chart" aria-label={label}>
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
        {props.note && <span className="u note">{props.note}</span>}
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

/** Names differ at their ends: where room is short, they are cut at the beginning. */
function Name({ text }: { text: string }) {
  const at = text.lastIndexOf("/") + 1;
  return (
    <>
      {at > 0 && (
        <span className="cut">
          <bdi dir="ltr">{text.slice(0, at)}</bdi>
        </span>
      )}
      <span className="tail">{text.slice(at)}</span>
    </>
  );
}

/** The values at the crosshair, or the last ones. */
function Values(props: ChartProps & { axis: string; format: (value: Value) => string }) {
  const at = useCursor(props.axis);
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
