/** Draws the timeline on a canvas, layer by layer. Knows no React and no API. */

import { color, FONT } from "../../state/theme";
import { type Brush, brushOf } from "./brush";
import { drawEngines, drawOrchestrator, drawTrainer } from "./drawLanes";
import { AXIS, LABEL_WIDTH } from "./layout";
import type { PathNode, Readings, Scene } from "./scene";
import { timeLabel, timeTicks } from "./viewport";

type Labels = ReturnType<typeof timeTicks>;

export function draw(context: CanvasRenderingContext2D, scene: Scene, width: number, height: number, scroll: number): void {
  context.fillStyle = color("--ground");
  context.fillRect(0, 0, width, height);
  context.font = FONT;
  context.textBaseline = "middle";
  const brush = brushOf(context, scene, width);
  const labels = timeTicks(scene.view, scene.origin, Math.max(2, Math.floor(brush.plot / 110)));
  drawGrid(brush, labels, height);
  context.save();
  context.beginPath();
  context.rect(0, AXIS, width, height - AXIS);
  context.clip();
  context.translate(0, AXIS - scroll);
  drawOrchestrator(brush, scene);
  drawEngines(brush, scene, height, scroll);
  drawTrainer(brush, scene.layout);
  drawGauges(brush, scene);
  drawPath(brush, scene.path);
  if (scene.now !== null && scene.now <= scene.view.to) {
    context.fillStyle = color("--live");
    context.fillRect(brush.X(scene.now), 0, 1.5, scene.layout.height);
  }
  context.restore();
  drawAxis(brush, scene, labels, width);
}

function drawGrid({ context, X, right }: Brush, labels: Labels, height: number): void {
  for (const time of labels.times) {
    const x = Math.round(X(time));
    if (x < LABEL_WIDTH || x > right) continue;
    context.fillStyle = color("--line");
    context.fillRect(x, AXIS, 1, height);
  }
}

function drawGauges(brush: Brush, scene: Scene): void {
  const { context, plot, text } = brush;
  for (const { index, y, height: h } of scene.layout.gauges) {
    const gauge = scene.gauges[index];
    if (!gauge) continue;
    const bottom = y + h - 6;
    const Y = (value: number) => bottom - (h - 12) * Math.max(0, Math.min(1, value / gauge.high));
    text(gauge.title, 20, y + h / 2 - 4, "--ink", "left", true);
    text(cut(context, gauge.unit, LABEL_WIDTH - 28), 20, y + h / 2 + 11);
    text(gauge.read(Math.min(scene.view.to, scene.now ?? scene.view.to)), LABEL_WIDTH - 8, y + h / 2 - 4, "--ink2", "right");
    const line = gauge.role === "trainer" ? "--bw" : gauge.role === "engine" ? "--pf" : "--ink2";
    const fill = gauge.role === "trainer" ? "--bw" : gauge.role === "engine" ? "--dc" : "--line2";
    plotLine(brush, scene, gauge.series, Y, bottom, color(line), color(fill), gauge.role === "trainer" ? 0.28 : 0.6);
    context.fillStyle = color("--line2");
    context.fillRect(LABEL_WIDTH, bottom, plot, 1);
  }
}

/** Draws each reading until the next one, or until the end of its attempt. A sloped line would show values that were not measured. */
export function plotLine({ context, X, right, plot }: Brush, scene: Scene, series: Readings, Y: (value: number) => number, bottom: number, stroke: string, fill: string, alpha: number): void {
  const held = Math.min(right, X(scene.end));
  const shown = series.time.flatMap((time, i) => {
    const [value, from] = [series.mean[i], X(time)];
    const to = i + 1 < series.time.length ? X(series.time[i + 1]!) : Math.max(held, from);
    return value == null || to < LABEL_WIDTH || from > held ? [] : [{ from, to, y: Y(value) }];
  });
  context.save();
  context.beginPath();
  context.rect(LABEL_WIDTH, 0, plot, scene.layout.height);
  context.clip();
  for (const area of [true, false]) {
    context.beginPath();
    shown.forEach(({ from, to, y }, i) => {
      if (shown[i - 1]?.to !== from) context.moveTo(from, area ? bottom : y);
      context.lineTo(from, y);
      context.lineTo(to, y);
      if (area && shown[i + 1]?.from !== to) context.lineTo(to, bottom);
    });
    context.globalAlpha = area ? alpha : 1;
    context.fillStyle = fill;
    context.strokeStyle = stroke;
    context.lineWidth = 1.2;
    if (area) context.fill();
    else context.stroke();
  }
  context.restore();
}

/** Draws the axis over everything: its labels stay at the top, whatever is scrolled. */
function drawAxis({ context, X, right, text, rule }: Brush, { view, origin, now }: Scene, labels: Labels, width: number): void {
  context.fillStyle = color("--ground");
  context.fillRect(0, 0, width, AXIS);
  rule(AXIS - 1);
  text(view.to - origin > 3600 ? "hours : minutes : seconds" : "minutes : seconds", 20, 12);
  for (const time of labels.times) {
    const x = Math.round(X(time));
    if (x < LABEL_WIDTH + 14 || x > right - 24) continue;
    text(timeLabel(time - origin, labels.step), x, 12, "--ink3", "center");
  }
  if (now !== null && now <= view.to) {
    const x = X(now);
    context.fillStyle = color("--ground");
    context.fillRect(x - 18, 3, 36, 18);
    text("now", x, 12, "--live", "center", true);
  }
}

/** Returns the start of a text that fits into a width. */
function cut(context: CanvasRenderingContext2D, value: string, width: number): string {
  context.font = FONT;
  if (context.measureText(value).width <= width) return value;
  let end = value.length;
  while (end > 0 && context.measureText(`${value.slice(0, end)}…`).width > width) end -= 1;
  return `${value.slice(0, end)}…`;
}

/** A shorter line, in pixels, would be covered by its own numbers. */
const SHORTEST_PATH = 40;

function drawPath({ context, X, right, text }: Brush, path: readonly PathNode[]): void {
  if (path.length === 0 || X(path.at(-1)!.to) - X(path[0]!.from) < SHORTEST_PATH) return;
  const place = (time: number) => Math.min(Math.max(X(time), LABEL_WIDTH), right);
  for (const [lineWidth, token] of [[5, "--ground"], [2, "--ink"]] as const) {
    context.strokeStyle = color(token);
    context.lineWidth = lineWidth;
    context.lineJoin = "miter";
    context.beginPath();
    path.forEach((node, i) => {
      if (i === 0) context.moveTo(place(node.from), node.y);
      else context.lineTo(place(node.from), node.y);
      context.lineTo(place(node.to), node.y);
    });
    context.stroke();
  }
  for (const node of path) {
    let last = -Infinity;
    for (const { n, at } of node.numbers) {
      const x = X(at);
      if (x < LABEL_WIDTH || x > right || x - last < 18) continue;
      last = x;
      for (const [radius, token] of [[9.5, "--ground"], [8, "--ink"]] as const) {
        context.fillStyle = color(token);
        context.beginPath();
        context.arc(x, node.y, radius, 0, 7);
        context.fill();
      }
      text(String(n), x, node.y + 0.5, "--ground", "center", true);
    }
  }
}
