/** Draws the lanes of the timeline: orchestrator, engines, trainer. */

import { bisectLeft } from "d3-array";
import { duration } from "../../format";
import { color, FONT } from "../../state/theme";
import type { Brush } from "./brush";
import { ALERT_Y, AXIS, LABEL_WIDTH, type Layout, type Row, slotsOf, stripeTop, THIN } from "./layout";
import type { Scene } from "./scene";
import { COLOR, KINDS } from "./spans";

const DARK_KINDS = new Set(["backward", "optimizer", "prefill", "checkpoint"]);

/** Draws groups becoming ready, batches, checkpoints, evals and alerts. */
export function drawOrchestrator({ context, X, right, text, rule, boxes }: Brush, { view, layout, lanes, ready, alerts, batches }: Scene): void {
  text("Orchestrator", 20, 25, "--ink", "left", true);
  const readyFrom = bisectLeft(ready, view.from);
  context.fillStyle = color("--ink2");
  let lastX = -10;
  for (let i = readyFrom; i < ready.length && ready[i]! <= view.to; i++) {
    const x = X(ready[i]!);
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
  for (const alert of alerts) {
    if (alert.time < view.from || alert.time > view.to) continue;
    const x = X(alert.time);
    context.fillStyle = color(alert.quiet ? "--ink3" : "--warn");
    context.strokeStyle = color("--ground");
    context.lineWidth = 2;
    const triangle = new Path2D(`M${x} ${ALERT_Y - 5}l5 9h-10z`);
    context.stroke(triangle);
    context.fill(triangle);
  }
  const shown = batches.filter((mark) => mark.time >= view.from && mark.time <= view.to);
  shown.forEach((mark, i) => {
    const x = X(mark.time);
    const room = (shown[i + 1] ? X(shown[i + 1]!.time) : right) - x;
    context.fillStyle = color("--ink");
    // Diamonds that would touch are drawn as ticks.
    if (room < 12 && i + 1 < shown.length) context.fillRect(Math.round(x), 4, 1, 10);
    else context.fill(new Path2D(`M${x} 3l5 6l-5 6l-5-6z`));
    if (context.measureText(mark.label).width + 24 < room) text(mark.label, x + 10, 9, "--ink2");
  });
  rule(layout.orchestrator.height);
}

/** Draws the engines whose rows are seen at a scroll position. */
export function drawEngines(brush: Brush, scene: Scene, height: number, scroll: number): void {
  const { context, text, rule, rect, boxes, hatched } = brush;
  for (const engine of scene.layout.engines) {
    const top = engine.y;
    const slots = slotsOf(engine.rows.map((row) => row.lane));
    text(`Engine ${engine.server}`, 20, top + 8, "--ink", "left", true);
    text(`${slots} slots`, 20, top + 24);
    if (engine.busy !== null && scene.now !== null) text(`${engine.busy} busy now`, 20, top + 40);
    const every = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512].find((size) => size * engine.slotHeight >= 48) ?? 1024;
    // The number of one slot alone says nothing.
    for (let slot = 0; slot < slots && every < slots; slot += every) text(String(slot), LABEL_WIDTH - 8, top + slot * engine.slotHeight + 6, "--ink3", "right");
    boxes(engine.syncs, top - 3, engine.height + 6, 0.16);
    const rows = engine.rows.filter((row) => row.y + row.height >= scroll - AXIS && row.y <= scroll + height);
    for (const row of rows) {
      drawRunning(brush, scene, row);
      hatched(boxes(row.lane.main, row.y, row.height), row.y, row.height);
      const { stripe } = row.lane;
      if (row.height >= THIN) boxes(stripe, stripeTop(row), row.y + row.height - stripeTop(row));
      else if (scene.sample) stripe.row.forEach((span, i) => scene.lanes.columns.sample_id[span] === scene.sample && rect(stripe.start[i]!, stripe.end[i]!, row.y, row.height, color(`--${COLOR.sandbox}`), 0));
    }
    for (const outage of scene.outages) {
      if (outage.server !== engine.server || outage.to < scene.view.from || outage.from > scene.view.to) continue;
      context.globalAlpha = 0.14;
      const at = rect(outage.from, outage.to, top - 3, engine.height + 6, color("--warn"), 0);
      context.globalAlpha = 1;
      const label = `down for ${duration(outage.to - outage.from)}`;
      context.font = FONT;
      if (at && at[1] - at[0] > context.measureText(label).width + 8) text(label, (at[0] + at[1]) / 2, top + engine.height / 2, "--warn", "center");
    }
    boxes(engine.transfers, top - 3, engine.height + 6, 0.5);
    if (scene.group.size) for (const row of rows) outline(brush, scene, row);
    rule(top + engine.height + 5);
  }
}

/** Draws the request that runs in a slot, paler than those that have ended. It has no end: it reaches "now". */
function drawRunning({ context, rect }: Brush, scene: Scene, { lane: { running }, y, height: h }: Row): void {
  if (!running || scene.now === null) return;
  context.globalAlpha = 0.45;
  const at = rect(running.start, scene.now, y, h, color(`--${COLOR.decode}`), 0);
  context.globalAlpha = 1;
  if (!at) return;
  context.fillStyle = color("--pf");
  if (running.start >= scene.view.from) context.fillRect(at[0], y, 1, h);
  if (!scene.group.has(running.sample)) return;
  context.strokeStyle = color("--ink");
  context.lineWidth = running.sample === scene.sample ? 2 : 1;
  context.strokeRect(at[0] - 0.5, y - 1, Math.max(2, at[1] - at[0] + 0.5), h + 2);
}

/** Outlines the requests of the selected group in a row. */
function outline({ context, X, right }: Brush, { view, lanes, group, sample }: Scene, { lane: { main }, y, height }: Row): void {
  const found = new Map<string, { from: number; to: number }>();
  for (let i = bisectLeft(main.start, view.from - main.longest); i < main.start.length && main.start[i]! < view.to; i++) {
    const id = lanes.columns.sample_id[main.row[i]!];
    if (!id || !group.has(id)) continue;
    const known = found.get(id);
    if (known) known.to = Math.max(known.to, main.end[i]!);
    else found.set(id, { from: main.start[i]!, to: main.end[i]! });
  }
  for (const [id, { from, to }] of found) {
    const a = Math.max(LABEL_WIDTH, X(from));
    const b = Math.min(right, X(to));
    if (b <= a) continue;
    // A frame needs room: in a thin slot the request gets an ink line instead.
    if (height < 4) {
      context.fillStyle = color("--ink");
      context.globalAlpha = id === sample ? 1 : 0.4;
      context.fillRect(a, y + height / 2 - (id === sample ? 1 : 0.5), Math.max(2, b - a), id === sample ? 2 : 1);
      context.globalAlpha = 1;
      continue;
    }
    context.strokeStyle = color("--ink");
    context.lineWidth = id === sample ? 2 : 1;
    context.strokeRect(a - 0.5, y - 1, Math.max(2, b - a + 0.5), height + 2);
  }
}

/** Draws the phases of each rank over its waits. */
export function drawTrainer({ context, text, rule, boxes }: Brush, { trainer }: Layout): void {
  const inside = (label: string, a: number, b: number, row: Row, token: string) => {
    context.font = FONT;
    if (b - a > context.measureText(label).width + 8) text(label, (a + b) / 2, row.y + row.height / 2 + 0.5, token, "center");
  };
  for (const row of trainer) {
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
  if (trainer.length) rule(trainer.at(-1)!.y + 25);
}
