/** A row a metric, a cell a step, each scaled to its own range; the value of the selected step at the right. */

import { extent } from "d3-array";
import { Fragment, useEffect, useRef } from "react";
import { number } from "../format";
import { color, useTheme } from "../state/theme";
import type { Value } from "../types";

interface HeatRow {
  label: string;
  values: Value[];
  format?: (value: Value) => string;
}

interface HeatStripProps {
  steps: number[];
  rows: HeatRow[];
  selected: number | null;
  onSelect: (step: number) => void;
}

const RAMP = ["--r0", "--r1", "--r2", "--r3", "--r4"];

export function HeatStrip({ steps, rows, selected, onSelect }: HeatStripProps) {
  const at = selected === null ? steps.length - 1 : steps.indexOf(selected);
  const move = (event: React.KeyboardEvent) => {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const step = steps[Math.min(Math.max(to, 0), steps.length - 1)];
    if (step !== undefined && to !== at) onSelect(step);
  };
  return (
    <div className="heat" tabIndex={0} role="group" aria-label="Steps: arrow keys go through them" onKeyDown={move}>
      {rows.map((row) => (
        <Fragment key={row.label}>
          <span className="cut">{row.label}</span>
          <Cells row={row} steps={steps} at={selected === null ? -1 : at} onSelect={onSelect} />
          <span className="r">{(row.format ?? number)(row.values[at] ?? null)}</span>
        </Fragment>
      ))}
    </div>
  );
}

function Cells({ row, steps, at, onSelect }: { row: HeatRow; steps: number[]; at: number; onSelect: (step: number) => void }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const { dark } = useTheme();
  useEffect(() => {
    const element = canvas.current!;
    const draw = () => {
      const ratio = devicePixelRatio || 1;
      const [width, height] = [element.clientWidth, element.clientHeight];
      element.width = width * ratio;
      element.height = height * ratio;
      const context = element.getContext("2d")!;
      context.scale(ratio, ratio);
      const [low = 0, high = 0] = extent(row.values, (value) => value);
      const wide = width / Math.max(1, row.values.length);
      row.values.forEach((value, i) => {
        if (value === null) return;
        const share = high > low ? (value - low) / (high - low) : 0.5;
        context.fillStyle = color(RAMP[Math.min(4, Math.floor(share * 5))]!);
        context.fillRect(i * wide, 0, Math.max(1, wide), height - 1);
      });
      if (at < 0) return;
      context.strokeStyle = color("--ink");
      context.lineWidth = 1.5;
      context.strokeRect(at * wide + 0.5, 0.75, Math.max(2, wide - 1), height - 2);
    };
    draw();
    const observer = new ResizeObserver(draw);
    observer.observe(element);
    return () => observer.disconnect();
  }, [row, at, dark]);
  const pick = (event: React.MouseEvent) => {
    const box = event.currentTarget.getBoundingClientRect();
    const step = steps[Math.floor(((event.clientX - box.left) / box.width) * steps.length)];
    if (step !== undefined) onSelect(step);
  };
  return <canvas ref={canvas} onClick={pick} title="Click selects the step" />;
}
