/** Draws the timeline on a canvas. Knows no React and no API. */

import { duration } from "../../format";
import { color } from "../../state/theme";
import type { GaugeSeries } from "../gauges";
import type { AlertMark, Outage } from "./alerts";
import { ALERT_Y, AXIS, LABEL_WIDTH, RIGHT, slotsOf, type Layout, type Row } from "./layout";
import { type Box, boxesWithin, pixelBoxes } from "./pixels";
import { firstFrom } from "./search";
import { COLOR, KINDS, type Lanes, type Outcome, OUTCOMES, type Track } from "./spans";
import { timeLabel, timeTicks, type View } from "./viewport";

const FONT = '12px -apple-system, "Segoe UI", Inter, Roboto, system-ui, "Noto Sans", sans-serif';

type Readings = Pick<GaugeSeries, "time" | "mean">;

export interface Gauge {
  title: string;
  unit: string;
  /** What the height of the plot stands for. */
  high: number;
  role: "engine" | "trainer" | "host";
  /** Writes the reading at a time. */
  read: (time: number) => string;
  series: Readings;
}

export interface Mark {
  time: number;
  label: string;
}

/** A node of the critical path: where the ink line goes, and its number. */
export interface PathNode {
  from: number;
  to: number;
  y: number;
  numbers: { n: number; at: number }[];
}

export interface Scene {
  lanes: Lanes;
  layout: Layout;
  view: View;
  origin: number;
  /** The newest time of a live run; null when it has ended. */
  now: number | null;
  /** The newest time of the run. Gauges are drawn with their last reading until then. */
  end: number;
  batches: Mark[];
  /** Times at which groups were ready. */
  ready: number[];
  alerts: AlertMark[];
  outages: Outage[];
  gauges: Gauge[];
  path: PathNode[];
  /** Rows of the columns to outline: the samples of a group, and the selected one. */
  group: ReadonlySet<string>;
  sample: string;
  /** Requests that are hidden. */
  hidden: ReadonlySet<Outcome>;
}

const DARK_KINDS = new Set(["backward", "optimizer", "prefill", "checkpoint"]);

/** Hatching of requests, which shows the outcome without color: lines between points of a tile, in pixels. */
const TILE = 8;
const HATCHES: Partial<Record<Outcome, [number, number, number, number][]>> = {
  discarded: [[-1, 9, 9, -1], [-5, 5, 5, -5], [3, 13, 13, 3]],
  cancelled: [[-1, 9, 9, -1], [-1, -1, 9, 9]],
  eval: [[0.5, -1, 0.5, 9], [4.5, -1, 4.5, 9]],
};

const hatches = new Map<string, CanvasPattern | null>();

function hatch(context: CanvasRenderingContext2D, outcome: Outcome, stroke: string): CanvasPattern | null {
  const known = hatches.get(outcome + stroke);
  if (known !== undefined) return known;
  const tile = document.createElement("canvas");
  tile.width = tile.height = TILE;
  const own = tile.getContext("2d")!;
  own.strokeStyle = stroke;
  own.lineWidth = 1.1;
  own.beginPath();
  for (const [x, y, toX, toY] of HATCHES[outcome] ?? []) {
    own.moveTo(x, y);
    own.lineTo(toX, toY);
  }
  own.stroke();
  const made = context.createPattern(tile, "repeat");
  hatches.set(outcome + stroke, made);
  return made;
}

export function draw(context: CanvasRenderingContext2D, scene: Scene, width: number, height: number, scroll: number): void {
  const { view, layout, lanes } = scene;
  const plot = width - LABEL_WIDTH - RIGHT;
  const perPixel = (view.to - view.from) / plot;
  const X = (time: number) => LABEL_WIDTH + (time - view.from) / perPixel;
  const right = width - RIGHT;
  const kindColors = KINDS.map((kind) => color(`--${COLOR[kind]}`));
  context.fillStyle = color("--ground");
  context.fillRect(0, 0, width, height);
  context.font = FONT;
  context.textBaseline = "middle";

  const text = (value: string, x: number, y: number, token = "--ink3", align: CanvasTextAlign = "left", bold = false) => {
    context.font = bold ? `600 ${FONT}` : FONT;
    context.textAlign = align;
    context.fillStyle = color(token);
    context.fillText(value, x, y);
  };
  const rule = (y: number) => {
    context.fillStyle = color("--line");
    context.fillRect(0, Math.round(y), width, 1);
  };
  const rect = (from: number, to: number, y: number, h: number, fill: string, gap = 0.5): [number, number] | null => {
    const a = Math.max(LABEL_WIDTH, X(from));
    const b = Math.min(right, X(to));
    if (b <= a) return null;
    context.fillStyle = fill;
    context.fillRect(a, y, Math.max(0.75, b - a > 3 ? b - a - gap : b - a), h);
    return [a, b];
  };

  // Grid and axis: labels stay at the top, whatever is scrolled.
  const marks = timeTicks(view, scene.origin, Math.max(2, Math.floor(plot / 110)));
  for (const time of marks.times) {
    const x = Math.round(X(time));
    if (x < LABEL_WIDTH || x > right) continue;
    context.fillStyle = color("--line");
    context.fillRect(x, AXIS, 1, height);
  }

  context.save();
  context.beginPath();
  context.rect(0, AXIS, width, height - AXIS);
  context.clip();
  context.translate(0, AXIS - scroll);

  // Spans are drawn in whole device pixels.
  const ratio = context.getTransform().a;
  const narrow = perPixel / ratio;
  const first = Math.round((lanes.start - view.from) / narrow) + LABEL_WIDTH * ratio;
  const [leftmost, rightmost] = [LABEL_WIDTH * ratio - first, right * ratio - first];
  type Shown = [left: number, right: number, box: Box];
  const shownOf = (track: Track): Shown[] =>
    track.start.length === 0
      ? []
      : boxesWithin(pixelBoxes(track, lanes.start, narrow), leftmost, rightmost)
          .filter((box) => !scene.hidden.has(OUTCOMES[box.outcome]!))
          .map((box) => [(Math.max(box.from, leftmost) + first) / ratio, (Math.min(box.to, rightmost) + first) / ratio, box]);
  const boxes = (track: Track, y: number, h: number, alpha = 1): Shown[] => {
    context.globalAlpha = alpha;
    const shown = shownOf(track);
    for (const [a, b, box] of shown) {
      context.fillStyle = kindColors[box.kind]!;
      context.fillRect(a, y, b - a, h);
    }
    context.globalAlpha = 1;
    // A line between two spans of one kind that touch.
    context.fillStyle = color("--ground");
    context.globalAlpha = 0.7;
    shown.forEach(([a, b, box], i) => {
      const before = shown[i - 1];
      if (before && before[1] === a && before[2].kind === box.kind && Math.min(b - a, a - before[0]) > 4) context.fillRect(a, y, 1 / ratio, h);
    });
    context.globalAlpha = 1;
    return shown;
  };
  const hatched = (shown: Shown[], y: number, h: number) => {
    const ground = color("--ground");
    for (const [a, b, box] of shown) {
      const outcome = OUTCOMES[box.outcome]!;
      if (outcome === "kept") continue;
      // An eval has a line along its middle if the slot is high enough. In thin slots, patterns continue across slots.
      const middle = outcome === "eval" && h >= 2;
      context.fillStyle = middle ? ground : (hatch(context, outcome, ground) ?? ground);
      if (middle) context.fillRect(a, y + Math.floor(h / 2), b - a, 1);
      else context.fillRect(a, y, b - a, h);
    }
  };

  // Orchestrator: groups becoming ready, batches, checkpoints and evals.
  text("Orchestrator", 20, 25, "--ink", "left", true);
  const readyFrom = firstFrom(scene.ready, view.from);
  context.fillStyle = color("--ink2");
  let lastX = -10;
  for (let i = readyFrom; i < scene.ready.length && scene.ready[i]! <= view.to; i++) {
    const x = X(scene.ready[i]!);
    if (x - lastX < 1.2) continue;
    lastX = x;
    context.fillRect(x, 37, 1.2, 8);
  }
  const names = ["eval", "checkpoint"];
  for (const lane of lanes.orchestrator) {
    const name = names[lane.owner] ?? "";
    // A checkpoint is often saved while an eval runs.
    if (name === "checkpoint") boxes(lane.main, 33, 3);
    else for (const [a, b] of boxes(lane.main, 20, 12)) if (b - a > context.measureText(name).width + 8) text(name, a + 4, 26.5, "--ground");
  }
  for (const alert of scene.alerts) {
    if (alert.time < view.from || alert.time > view.to) continue;
    const x = X(alert.time);
    context.fillStyle = color(alert.quiet ? "--ink3" : "--warn");
    context.strokeStyle = color("--ground");
    context.lineWidth = 2;
    context.beginPath();
    context.moveTo(x, ALERT_Y - 5);
    context.lineTo(x + 5, ALERT_Y + 4);
    context.lineTo(x - 5, ALERT_Y + 4);
    context.closePath();
    context.stroke();
    context.fill();
  }
  const shown = scene.batches.filter((mark) => mark.time >= view.from && mark.time <= view.to);
  shown.forEach((mark, i) => {
    const x = X(mark.time);
    const room = (shown[i + 1] ? X(shown[i + 1]!.time) : right) - x;
    context.fillStyle = color("--ink");
    // Diamonds that would touch are drawn as ticks.
    if (room < 12 && i + 1 < shown.length) context.fillRect(Math.round(x), 4, 1, 10);
    else {
      context.beginPath();
      context.moveTo(x, 3);
      context.lineTo(x + 5, 9);
      context.lineTo(x, 15);
      context.lineTo(x - 5, 9);
      context.fill();
    }
    if (context.measureText(mark.label).width + 24 < room) text(mark.label, x + 10, 9, "--ink2");
  });
  rule(layout.orchestrator.height);

  const outline = (row: Row, y: number) => {
    const { main } = row.lane;
    const found = new Map<string, { from: number; to: number }>();
    for (let i = firstFrom(main.start, view.from - main.longest); i < main.start.length && main.start[i]! < view.to; i++) {
      const id = lanes.columns.sample_id[main.row[i]!];
      if (!id || !scene.group.has(id)) continue;
      const known = found.get(id);
      if (known) known.to = Math.max(known.to, main.end[i]!);
      else found.set(id, { from: main.start[i]!, to: main.end[i]! });
    }
    for (const [id, { from, to }] of found) {
      const a = Math.max(LABEL_WIDTH, X(from));
      const b = Math.min(right, X(to));
      if (b <= a) continue;
      // A frame needs room: in a thin slot the request gets an ink line instead.
      if (row.height < 4) {
        context.fillStyle = color("--ink");
        context.globalAlpha = id === scene.sample ? 1 : 0.4;
        context.fillRect(a, y + row.height / 2 - (id === scene.sample ? 1 : 0.5), Math.max(2, b - a), id === scene.sample ? 2 : 1);
        context.globalAlpha = 1;
        continue;
      }
      context.strokeStyle = color("--ink");
      context.lineWidth = id === scene.sample ? 2 : 1;
      context.strokeRect(a - 0.5, y - 1, Math.max(2, b - a + 0.5), row.height + 2);
    }
  };

  // What runs now is paler than what has ended, and has no end: it reaches "now".
  const open = ({ lane: { running }, y, height: h }: Row) => {
    if (!running || scene.now === null) return;
    context.globalAlpha = 0.45;
    const at = rect(running.start, scene.now, y, h, kindColors[KINDS.indexOf("decode")]!, 0);
    context.globalAlpha = 1;
    if (!at) return;
    context.fillStyle = color("--pf");
    if (running.start >= view.from) context.fillRect(at[0], y, 1, h);
    if (!scene.group.has(running.sample)) return;
    context.strokeStyle = color("--ink");
    context.lineWidth = running.sample === scene.sample ? 2 : 1;
    context.strokeRect(at[0] - 0.5, y - 1, Math.max(2, at[1] - at[0] + 0.5), h + 2);
  };

  for (const engine of layout.engines) {
    const top = engine.y;
    const slots = slotsOf(engine.rows.map((row) => row.lane));
    text(`Engine ${engine.server}`, 20, top + 8, "--ink", "left", true);
    text(`${slots} slots`, 20, top + 24);
    if (engine.busy !== null && scene.now !== null) text(`${engine.busy} busy now`, 20, top + 40);
    const every = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512].find((size) => size * engine.slotHeight >= 48) ?? 1024;
    // The number of one slot alone says nothing.
    for (let slot = 0; slot < slots && every < slots; slot += every) text(String(slot), LABEL_WIDTH - 8, top + slot * engine.slotHeight + 6, "--ink3", "right");
    boxes(engine.syncs, top - 3, engine.height + 6, 0.16);
    for (const row of engine.rows) {
      if (row.y + row.height < scroll - AXIS || row.y > scroll + height) continue;
      open(row);
      hatched(boxes(row.lane.main, row.y, row.height), row.y, row.height);
    }
    for (const outage of scene.outages) {
      if (outage.server !== engine.server || outage.to < view.from || outage.from > view.to) continue;
      context.globalAlpha = 0.14;
      const at = rect(outage.from, outage.to, top - 3, engine.height + 6, color("--warn"), 0);
      context.globalAlpha = 1;
      const label = `down for ${duration(outage.to - outage.from)}`;
      context.font = FONT;
      if (at && at[1] - at[0] > context.measureText(label).width + 8) text(label, (at[0] + at[1]) / 2, top + engine.height / 2, "--warn", "center");
    }
    boxes(engine.transfers, top - 3, engine.height + 6, 0.5);
    if (scene.group.size) for (const row of engine.rows) outline(row, row.y);
    rule(top + engine.height + 5);
  }

  for (const row of layout.trainer) {
    text(`Trainer rank ${row.lane.owner}`, 20, row.y + row.height / 2, "--ink", "left", true);
    for (const [a, b, box] of boxes(row.lane.back, row.y, row.height)) {
      context.strokeStyle = color("--line2");
      context.lineWidth = 1;
      if (b - a > 2) context.strokeRect(a + 0.5, row.y + 0.5, b - a - 1.5, row.height - 1);
      const seconds = row.lane.back.end[box.index]! - row.lane.back.start[box.index]!;
      inside(`waits ${seconds.toFixed(seconds < 1 ? 2 : 1)} s`, a, b, row, "--ink2");
    }
    for (const [a, b, box] of boxes(row.lane.main, row.y, row.height)) {
      const kind = KINDS[box.kind]!;
      inside(kind, a, b, row, DARK_KINDS.has(kind) ? "--ground" : "--ink");
    }
    boxes(row.lane.stripe, row.y + row.height - 4, 4);
  }
  if (layout.trainer.length) rule(layout.trainer.at(-1)!.y + 25);

  function inside(label: string, a: number, b: number, row: Row, token: string): void {
    context.font = FONT;
    if (b - a > context.measureText(label).width + 8) text(label, (a + b) / 2, row.y + row.height / 2 + 0.5, token, "center");
  }

  for (const { index, y, height: h } of layout.gauges) {
    const gauge = scene.gauges[index];
    if (!gauge) continue;
    const bottom = y + h - 6;
    const Y = (value: number) => bottom - (h - 12) * Math.max(0, Math.min(1, value / gauge.high));
    text(gauge.title, 20, y + h / 2 - 4, "--ink", "left", true);
    text(cut(context, gauge.unit, LABEL_WIDTH - 28), 20, y + h / 2 + 11);
    text(gauge.read(Math.min(view.to, scene.now ?? view.to)), LABEL_WIDTH - 8, y + h / 2 - 4, "--ink2", "right");
    const line = gauge.role === "trainer" ? "--bw" : gauge.role === "engine" ? "--pf" : "--ink2";
    const fill = gauge.role === "trainer" ? "--bw" : gauge.role === "engine" ? "--dc" : "--line2";
    plotLine(gauge.series, X, Y, bottom, color(line), color(fill), gauge.role === "trainer" ? 0.28 : 0.6);
    context.fillStyle = color("--line2");
    context.fillRect(LABEL_WIDTH, bottom, plot, 1);
  }

  // A reading is drawn until the next one. A sloped line would show values that were not measured.
  function plotLine(series: Readings, x: (t: number) => number, y: (v: number) => number, bottom: number, stroke: string, fill: string, alpha: number): void {
    const points = series.time.flatMap((time, i): [number, number][] => (series.mean[i] == null ? [] : [[x(time), y(series.mean[i]!)]]));
    const held = Math.min(right, x(scene.end));
    const shown = points.filter(([px], i) => (points[i + 1]?.[0] ?? held) >= LABEL_WIDTH && px <= held);
    if (shown.length === 0) return;
    const until = (i: number) => shown[i + 1]?.[0] ?? Math.max(held, shown[i]![0]);
    context.save();
    context.beginPath();
    context.rect(LABEL_WIDTH, 0, plot, layout.height);
    context.clip();
    for (const area of [true, false]) {
      context.beginPath();
      if (area) context.moveTo(shown[0]![0], bottom);
      shown.forEach(([px, py], i) => {
        context.lineTo(px, py);
        context.lineTo(until(i), py);
      });
      if (area) context.lineTo(until(shown.length - 1), bottom);
      context.globalAlpha = area ? alpha : 1;
      context.fillStyle = fill;
      context.strokeStyle = stroke;
      context.lineWidth = 1.2;
      if (area) context.fill();
      else context.stroke();
    }
    context.restore();
  }

  drawPath(context, scene.path, X, right, text);
  if (scene.now !== null && scene.now <= view.to) {
    context.fillStyle = color("--live");
    context.fillRect(X(scene.now), 0, 1.5, layout.height);
  }
  context.restore();

  // The axis, over everything.
  context.fillStyle = color("--ground");
  context.fillRect(0, 0, width, AXIS);
  rule(AXIS - 1);
  text(view.to - scene.origin > 3600 ? "hours : minutes : seconds" : "minutes : seconds", 20, 12);
  for (const time of marks.times) {
    const x = Math.round(X(time));
    if (x < LABEL_WIDTH + 14 || x > right - 24) continue;
    text(timeLabel(time - scene.origin, marks.step), x, 12, "--ink3", "center");
  }
  if (scene.now !== null && scene.now <= view.to) {
    const x = X(scene.now);
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

function drawPath(
  context: CanvasRenderingContext2D,
  path: readonly PathNode[],
  X: (time: number) => number,
  right: number,
  text: (value: string, x: number, y: number, token: string, align: CanvasTextAlign, bold: boolean) => void,
): void {
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
      context.fillStyle = color("--ground");
      context.beginPath();
      context.arc(x, node.y, 9.5, 0, 7);
      context.fill();
      context.fillStyle = color("--ink");
      context.beginPath();
      context.arc(x, node.y, 8, 0, 7);
      context.fill();
      text(String(n), x, node.y + 0.5, "--ground", "center", true);
    }
  }
}
