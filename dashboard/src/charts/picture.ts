/** A chart as a PNG of one size, whatever the page and the screen: title, legend, titles of the axes, plot. */

import { color, FONT } from "../state/theme";
import type { ChartProps } from "./props";
import { download } from "./export";
import { align, draw } from "./plot";

/** Layout size in pixels; the picture is `SCALE` times as large. It fits a slide and a column of a paper. */
const WIDTH = 960;
const HEIGHT = 600;
const SCALE = 2;
const EDGE = 20;
const LINE = 20;
const BETWEEN = 16;

export interface Label {
  text: string;
  color: string;
}

/** Breaks the labels of a legend into lines that fit a width. */
export function wrapped(labels: Label[], width: number, widthOf: (text: string) => number): Label[][] {
  const lines: Label[][] = [[]];
  let left = width;
  for (const label of labels) {
    const wide = widthOf(label.text) + BETWEEN;
    if (wide > left && lines.at(-1)!.length > 0) {
      lines.push([]);
      left = width;
    }
    lines.at(-1)!.push(label);
    left -= wide;
  }
  return lines;
}

export async function downloadPng(name: string, props: ChartProps): Promise<void> {
  const { lines, x, axis = "step", title, unit } = props;
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [WIDTH * SCALE, HEIGHT * SCALE];
  const context = canvas.getContext("2d")!;
  context.scale(SCALE, SCALE);
  context.fillStyle = color("--ground");
  context.fillRect(0, 0, WIDTH, HEIGHT);
  context.textBaseline = "top";
  context.fillStyle = color("--ink");
  context.font = FONT.replace("12px", "600 15px");
  context.fillText(props.name ?? title, EDGE, EDGE);
  context.font = FONT;
  const notes = [props.note, props.scope].filter(Boolean).join(", ");
  context.fillStyle = color("--ink2");
  context.textAlign = "right";
  context.fillText(notes, WIDTH - EDGE, EDGE + 2);
  context.textAlign = "left";
  const legend = lines.length > 1 ? wrapped(lines.map((line) => ({ text: line.label, color: line.color })), WIDTH - 2 * EDGE, (text) => context.measureText(text).width + LINE) : [];
  legend.forEach((row, i) => {
    let left = EDGE;
    for (const label of row) {
      context.fillStyle = color(label.color);
      context.fillRect(left, EDGE + LINE * (i + 1) + 10, 12, 3);
      context.fillStyle = color("--ink");
      context.fillText(label.text, left + LINE - 2, EDGE + LINE * (i + 1) + 6);
      left += context.measureText(label.text).width + LINE + BETWEEN;
    }
  });
  const top = EDGE + LINE * (legend.length + 1) + 10;
  // uPlot multiplies its size by the pixel ratio of the screen, so type and lines are scaled by the rest.
  const ratio = devicePixelRatio || 1;
  const size = { width: ((WIDTH - 2 * EDGE) * SCALE) / ratio, height: ((HEIGHT - top - EDGE) * SCALE) / ratio };
  const titled = { ...props, titled: true, xTitle: props.xTitle ?? axis, yTitle: props.yTitle ?? [title, unit].filter(Boolean).join(", ") };
  const plot = draw(document.createElement("div"), { current: titled }, align(x, lines), size, SCALE / ratio);
  await new Promise((done) => setTimeout(done)); // uPlot draws in a microtask
  context.drawImage(plot.ctx.canvas, EDGE, top, WIDTH - 2 * EDGE, HEIGHT - top - EDGE);
  plot.destroy();
  canvas.toBlob((blob) => blob && download(name, blob));
}
