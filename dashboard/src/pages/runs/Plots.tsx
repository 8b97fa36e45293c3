/** Plots the fields of the listed runs: a scatter plot of two, and parallel coordinates of settings and an outcome. */

import { type ReactNode, useState } from "react";
import { setting } from "../../format";
import { useSize } from "../../shell/size";
import type { RunRow } from "../../types";
import { visible } from "../../text/hostile";
import { type Axis, axisOf } from "./axis";
import { type Column, measured } from "./columns";

interface Shared {
  runs: RunRow[];
  colorOf: (run: RunRow) => string;
  hrefOf: (run: RunRow) => string;
}

const EDGE = 24;
const BELOW = 44;
/** Longest label, in characters. */
const LONGEST = 18;

const short = (text: string) => (text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text);
const write = (column: Column, run?: RunRow) => (value: number) => column.write?.(value, run) ?? setting(value);
const textOf = (column: Column, run: RunRow): string => {
  const value = column.value(run);
  return value === null ? "none" : typeof value === "number" ? write(column, run)(value) : value;
};

/** A plot below a line of text about the run under the pointer or focus, or else about all runs. */
function Plot({ words, choices, draw }: { words: ReactNode; choices: ReactNode; draw: (width: number, height: number) => ReactNode }) {
  const { host, width, height } = useSize();
  return (
    <div className="fieldplot">
      <div className="choices">
        {choices}
        <span className="d cut" role="status">
          {words}
        </span>
      </div>
      <div className="area" ref={host}>
        {width > 80 && height > 80 && draw(width, height)}
      </div>
    </div>
  );
}

export function Scatter({ runs, x, y, choices, colorOf, hrefOf }: Shared & { x: Column; y: Column; choices: ReactNode }) {
  const [at, setAt] = useState<string | null>(null);
  const [across, up] = [axisOf(runs.map(x.value), write(x, measured(x, runs))), axisOf(runs.map(y.value), write(y, measured(y, runs)))];
  const points = runs.flatMap((run) => {
    const [left, bottom] = [across.place(x.value(run)), up.place(y.value(run))];
    return left === null || bottom === null ? [] : [{ run, left, bottom }];
  });
  const shown = runs.find((run) => run.id === at);
  const missing = runs.length - points.length;
  const words = shown ? `${visible(shown.name)}: ${x.title} ${textOf(x, shown)}, ${y.title} ${textOf(y, shown)}` : missing > 0 ? `${missing} of ${runs.length} runs ${missing === 1 ? "lacks" : "lack"} one of the two` : "";
  return (
    <Plot
      words={words}
      choices={choices}
      draw={(width, height) => {
        const left = 24 + 6.6 * Math.max(4, ...up.ticks.map((tick) => short(tick.text).length));
        const X = (place: number) => left + place * (width - left - EDGE);
        const Y = (place: number) => 8 + (1 - place) * (height - 8 - BELOW);
        const labeled = apart(points.map(({ run, left: place, bottom }) => ({ id: run.id, x: X(place), y: Y(bottom), room: 24 + 7 * short(visible(run.name)).length })));
        return (
          <svg width={width} height={height} role="group" aria-label={`${y.title} by ${x.title}`}>
            {up.ticks.map((tick) => (
              <g key={tick.at}>
                <line x1={left} x2={width - EDGE} y1={Y(tick.at)} y2={Y(tick.at)} />
                <text x={left - 8} y={Y(tick.at) + 4} textAnchor="end">
                  {short(tick.text)}
                </text>
              </g>
            ))}
            <line className="base" x1={left} x2={width - EDGE} y1={Y(0)} y2={Y(0)} />
            {across.ticks.map((tick) => (
              <text key={tick.at} x={X(tick.at)} y={height - BELOW + 18} textAnchor="middle">
                {short(tick.text)}
              </text>
            ))}
            <text className="title" x={(left + width - EDGE) / 2} y={height - 8} textAnchor="middle">
              {x.title}
              {across.log ? ", log" : ""}
            </text>
            <text className="title" transform={`translate(8 ${Y(0.5)}) rotate(-90)`} textAnchor="middle">
              {y.title}
              {up.log ? ", log" : ""}
            </text>
            {points.toReversed().map(({ run, left: place, bottom }) => (
              <a key={run.id} href={hrefOf(run)} aria-label={`${visible(run.name)}: ${x.title} ${textOf(x, run)}, ${y.title} ${textOf(y, run)}`} onFocus={() => setAt(run.id)} onBlur={() => setAt(null)} onPointerEnter={() => setAt(run.id)} onPointerLeave={() => setAt(null)}>
                <circle cx={X(place)} cy={Y(bottom)} r={run.id === at ? 8 : 5.5} style={{ fill: `var(${colorOf(run)})` }} />
                {(at === null ? labeled.has(run.id) : run.id === at) && (
                  <text className="name" x={X(place) + (place > 0.85 ? -10 : 10)} y={Y(bottom) + 4} textAnchor={place > 0.85 ? "end" : "start"}>
                    {short(visible(run.name))}
                  </text>
                )}
              </a>
            ))}
          </svg>
        );
      }}
    />
  );
}

/** Returns the points whose labels do not overlap. */
function apart(points: { id: string; x: number; y: number; room: number }[]): Set<string> {
  const kept: typeof points = [];
  for (const point of points) if (kept.every((other) => Math.abs(other.x - point.x) > Math.max(other.room, point.room) || Math.abs(other.y - point.y) > 16)) kept.push(point);
  return new Set(kept.map((point) => point.id));
}

/** Colors of outcomes from low to high, without the palest ones, which are invisible as lines. */
const RAMP = ["--r2", "--r3", "--r4"];

export function Parallel({ runs, columns, choices, hrefOf }: Omit<Shared, "colorOf"> & { columns: Column[]; choices: ReactNode }) {
  const [at, setAt] = useState<string | null>(null);
  const outcome = columns.at(-1)!;
  const axes = columns.map((column) => ({ column, axis: axisOf(runs.map(column.value), write(column, measured(column, runs))) }));
  const last = axes.at(-1)!.axis;
  const colorOf = (run: RunRow) => {
    const place = last.place(outcome.value(run));
    return place === null ? "--ink3" : RAMP[Math.min(RAMP.length - 1, Math.floor(place * RAMP.length))]!;
  };
  const shown = runs.find((run) => run.id === at);
  // Better runs are drawn on top, and the run under the pointer over all others.
  const rank = (run: RunRow) => (run.id === at ? 2 : (last.place(outcome.value(run)) ?? -1));
  const ordered = [...runs].sort((a, b) => rank(a) - rank(b));
  return (
    <Plot
      words={shown ? `${visible(shown.name)}: ${columns.map((column) => `${column.title} ${textOf(column, shown)}`).join(", ")}` : "Each line is a run; higher outcomes have a stronger color"}
      choices={choices}
      draw={(width, height) => {
        const step = (width - 2 * 70) / Math.max(1, axes.length - 1);
        const X = (i: number) => 70 + i * step;
        const Y = (place: number) => 34 + (1 - place) * (height - 34 - 16);
        const letters = Math.max(6, Math.floor(step / 8));
        const path = (run: RunRow) => {
          let isPen = false;
          return axes
            .map(({ column, axis }, i) => {
              const place = axis.place(column.value(run));
              const part = place === null ? "" : `${isPen ? "L" : "M"}${X(i)} ${Y(place)}`;
              isPen = place !== null;
              return part;
            })
            .join("");
        };
        return (
          <svg width={width} height={height} role="group" aria-label={`Settings against ${outcome.title}`}>
            {ordered.map((run) => (
              <a key={run.id} href={hrefOf(run)} aria-label={`${visible(run.name)}: ${columns.map((column) => `${column.title} ${textOf(column, run)}`).join(", ")}`} onFocus={() => setAt(run.id)} onBlur={() => setAt(null)} onPointerEnter={() => setAt(run.id)} onPointerLeave={() => setAt(null)}>
                <path className="reach" d={path(run)} />
                <path d={path(run)} style={{ stroke: `var(${colorOf(run)})`, strokeWidth: run.id === at ? 3.5 : 1.75, opacity: at && run.id !== at ? 0.35 : 1 }} />
              </a>
            ))}
            {axes.map(({ column, axis }, i) => (
              <Coordinate key={column.id} x={X(i)} y={Y} axis={axis} title={column.title} letters={letters} isLast={i === axes.length - 1} />
            ))}
          </svg>
        );
      }}
    />
  );
}

function Coordinate({ x, y, axis, title, letters, isLast }: { x: number; y: (place: number) => number; axis: Axis; title: string; letters: number; isLast: boolean }) {
  const cut = (text: string) => (text.length > letters ? `${text.slice(0, letters - 1)}…` : text);
  return (
    <g>
      <line className="base" x1={x} x2={x} y1={y(0)} y2={y(1)} />
      <text className="title" x={x} y={16} textAnchor="middle">
        <title>{title}</title>
        {isLast ? <tspan fontWeight={600}>{cut(title)}</tspan> : cut(title)}
      </text>
      {axis.ticks.map((tick) => (
        <text key={tick.at} className="name" x={x + 6} y={y(tick.at) + 4}>
          {cut(tick.text)}
        </text>
      ))}
    </g>
  );
}

