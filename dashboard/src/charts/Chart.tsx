/** A chart: title line with the value at the crosshair, above a plot. */

import { useEffect, useMemo, useRef, useState } from "react";
import type uPlot from "uplot";
import { embedded } from "../embedded";
import { difference, number } from "../format";
import { type Item, Menu } from "../shell/Menu";
import { useSize } from "../shell/size";
import { cursorOn, onCursor, setCursor, useCursor } from "../state/cursor";
import { useTheme } from "../state/theme";
import { elsewhere, go, parseStep, place } from "../state/url";
import type { Value } from "../types";
import { download, fileName, linesCsv } from "./export";
import { lastRow, nearest, valueAt } from "./math";
import { downloadPng } from "./picture";
import { align, draw, placeCrosshair } from "./plot";
import type { ChartProps, Line } from "./props";

/** The largest way of the pointer between press and release of a click, in pixels. */
const CLICK_PX = 4;

/** Width of the button that opens what changed, in pixels. */
const WHY_WIDTH = 196;

export function Chart(props: ChartProps) {
  const { title, unit, x, lines, axis = "step", format = number } = props;
  const { dark } = useTheme();
  const { host, width, height } = useSize();
  const overlay = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef(props);
  latest.current = props;
  const drawn = useMemo(() => align(x, lines), [x, lines]);

  useEffect(() => {
    if (width <= 20 || height <= 40) return;
    const instance = draw(host.current!, latest, drawn, { width, height });
    plot.current = instance;
    // uPlot knows its scales from the next microtask on.
    queueMicrotask(() => plot.current === instance && placeCrosshair(instance, overlay.current!, latest.current));
    return () => {
      plot.current = null;
      instance.destroy();
    };
  }, [drawn, width, height, dark, props.log, props.low, props.high, props.xEnd, props.zoom?.from, props.zoom?.to, props.withoutOutliers, props.right, props.heat]);

  // useSelected clears the selection when its page unmounts; the ref of the overlay is null by then.
  useEffect(() => onCursor(() => plot.current && overlay.current && placeCrosshair(plot.current, overlay.current, latest.current)), []);
  // No event tells that the pointer left a chart that is gone.
  useEffect(() => () => setCursor(null), []);

  const move = (event: React.MouseEvent) => {
    const instance = plot.current;
    if (!instance || drawn.x.length === 0) return;
    const box = instance.over.getBoundingClientRect();
    const at = instance.posToVal(event.clientX - box.left, "x");
    setCursor({ axis, x: drawn.x[nearest(drawn.x, at)]! });
  };

  const pressed = useRef(0);
  const [picked, setPicked] = useState<{ step: number; left: number } | null>(null);
  const { stepOf, metric } = props;
  const explain = !embedded && stepOf && metric !== undefined ? (step: number) => go(elsewhere(place(), { page: "changes" }, { step: String(step), metric })) : null;
  const offer = (x: number) => plot.current && explain && setPicked({ step: stepOf!(x), left: plot.current.valToPos(x, "x") + plot.current.bbox.left / devicePixelRatio });
  const click = (event: React.MouseEvent) => {
    if (Math.abs(event.clientX - pressed.current) >= CLICK_PX) return;
    move(event); // a finger taps without moving there, and has left the chart before the click
    const { at, selected } = cursorOn(axis);
    if (at === null) return;
    props.onPick?.(at);
    if (at === selected) setPicked(null);
    else offer(at);
  };
  const moves = useChartKeys(plot, drawn.x, latest);
  const keys = (event: React.KeyboardEvent) => {
    const { at } = cursorOn(axis);
    if (event.target !== event.currentTarget) return;
    if (event.key === "w" && at !== null && explain) {
      event.preventDefault();
      event.stopPropagation();
      return explain(stepOf!(at));
    }
    if (event.key === "Escape") setPicked(null);
    if (event.key === "Enter" && at !== null) offer(at);
    moves(event);
  };
  const label = `${title}${unit ? `, ${unit}` : ""}`;
  const whole = props.name ?? title;
  const file = fileName(`${place().run ?? ""}_${whole}`);
  const selected = parseStep(place().params.step);
  const items: Item[] = [
    ...(props.menu ?? []),
    ...(explain && selected !== null ? [{ title: `What changed at step ${selected}`, run: () => explain(selected) }] : []),
    {
      title: "Save as PNG",
      run: () => void downloadPng(`${file}.png`, latest.current),
    },
    {
      title: "Save as CSV",
      run: () => {
        const columns = lines.flatMap((line) => [
          { label: line.label, x: line.x ?? x, values: line.measured ?? line.raw ?? line.values },
          ...(line.bands ?? []).flatMap(({ measured }) => (measured ? (["low", "high"] as const).map((edge, i) => ({ label: `${line.label} ${measured.names[i]}`, x: line.x ?? x, values: measured[edge] })) : [])),
        ]);
        download(`${file}.csv`, new Blob([linesCsv(axis, columns)], { type: "text/csv" }));
      },
    },
  ];
  return (
    <figure className="chart" aria-label={label}>
      <figcaption className="t">
        {props.before}
        {props.onTitle ? (
          <button className="name" onClick={props.onTitle} title={whole}>
            {title}
          </button>
        ) : (
          <b className="name" title={whole}>
            {title}
          </b>
        )}
        <span className="u">{unit}</span>
        {props.note && <span className="u note">{props.note}</span>}
        {props.scope && <span className="scope">{props.scope}</span>}
        <Values {...props} axis={axis} format={format} />
        <Menu label={`More for ${whole}`} button="⋯" className="over" items={items} />
      </figcaption>
      <div
        className="p"
        role="group"
        tabIndex={0}
        aria-label={`${label}: arrows read it${explain ? ", w tells what changed" : ""}`}
        onPointerMove={move}
        onPointerLeave={() => setCursor(null)}
        onPointerDown={(event) => (pressed.current = event.clientX)}
        onClick={props.onPick && click}
        onDoubleClick={() => props.onZoom?.(null)}
        onKeyDown={keys}
        onBlur={(event) => {
          setCursor(null);
          if (!event.currentTarget.contains(event.relatedTarget)) setPicked(null);
        }}
      >
        <div className="plot" ref={host} />
        <div className="cross" ref={overlay} aria-hidden />
        {picked && explain && (
          <button className="why" style={{ left: Math.max(0, Math.min(picked.left + 4, width - WHY_WIDTH)) }} onClick={(event) => (event.stopPropagation(), explain(picked.step))}>
            What changed at step {picked.step} <kbd>w</kbd>
          </button>
        )}
      </div>
    </figure>
  );
}

/** Moves by a page: a tenth of the places. */
const PAGES = 10;

/** Arrows move the crosshair, with Shift they select a range, Enter zooms to the range or selects the step. */
function useChartKeys(plot: React.RefObject<uPlot | null>, xs: number[], latest: React.RefObject<ChartProps>) {
  const from = useRef<number | null>(null);
  const show = (to: number | null) => {
    const instance = plot.current;
    if (!instance) return;
    const [a, b] = from.current === null || to === null ? [0, 0] : [instance.valToPos(from.current, "x"), instance.valToPos(to, "x")];
    instance.setSelect({ left: Math.min(a, b), width: Math.abs(b - a), top: 0, height: instance.over.clientHeight }, false);
  };
  return (event: React.KeyboardEvent) => {
    const { axis = "step", zoom, onZoom, onPick } = latest.current;
    const shown = xs.filter((x) => !zoom || (x >= zoom.from && x <= zoom.to));
    const { at } = cursorOn(axis);
    const row = at === null ? shown.length : nearest(shown, at);
    const page = Math.max(1, Math.round(shown.length / PAGES));
    const moves: Record<string, number> = { ArrowLeft: row - 1, ArrowRight: row + 1, PageUp: row - page, PageDown: row + page, Home: 0, End: shown.length - 1 };
    const next = moves[event.key];
    if (next !== undefined && shown.length > 0) {
      const x = shown[Math.min(Math.max(0, next), shown.length - 1)]!;
      from.current = event.shiftKey && onZoom ? (from.current ?? at ?? x) : null;
      setCursor({ axis, x });
      show(x);
    } else if (event.key === "Enter" && at !== null) {
      if (from.current !== null && from.current !== at) onZoom?.({ from: Math.min(from.current, at), to: Math.max(from.current, at) });
      else onPick?.(at);
      from.current = null;
      show(null);
    } else if (event.key === "Escape" && from.current !== null) {
      from.current = null;
      show(null);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  };
}

/** The last measured values, or those at the crosshair: of a smoothed line the value on it, and the measured one in grey. */
function Values(props: ChartProps & { axis: string; format: (value: Value) => string }) {
  const at = useCursor(props.axis);
  const label = at === null && (props.until || props.read || props.lines.some((line) => line.raw)) && <span className="u">{props.until ?? "last"} </span>;
  if (props.read) return <span className="v">{label}{props.read(at)}</span>;
  const spoken = props.lines.filter((line) => !line.silent);
  const valueOf = (line: Line, values = at === null ? (line.raw ?? line.values) : line.values): Value => {
    if (at === null && line.last !== undefined) return line.last;
    return at === null ? (values[lastRow(line.raw ?? line.values)] ?? null) : valueAt(line.x ?? props.x, values, at);
  };
  if (spoken.length === 1) {
    const [line] = spoken as [Line];
    return <span className="v">{label}{props.format(valueOf(line))}{at !== null && line.raw && <span className="u" title="measured"> {props.format(valueOf(line, line.raw))}</span>}</span>;
  }
  const baseline = spoken.find((line) => line.baseline);
  const base = baseline ? valueOf(baseline) : null;
  return (
    <span className={`v many ${baseline ? "deltas" : ""}`}>
      {label}
      {spoken.slice(0, props.named ? spoken.length : 6).map((line, i) => {
        const value = valueOf(line);
        return (
          <span key={i} title={line.label}>
            <i className="dot small" style={{ background: `var(${line.color})` }} />
            {props.named && <b>{line.label} </b>}
            {props.format(value)}
            {base !== null && value !== null && line !== baseline && <span className="u" title={`minus ${baseline!.label}`}> {difference(value - base)}</span>}
          </span>
        );
      })}
    </span>
  );
}
