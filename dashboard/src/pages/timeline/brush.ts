/** Draws shapes at times: the tools that all layers of the timeline share. */

import { color, FONT } from "../../state/theme";
import { LABEL_WIDTH, RIGHT } from "./layout";
import { type Box, boxesWithin, pixelBoxes } from "./pixels";
import type { Scene } from "./scene";
import { COLOR, KINDS, type Outcome, OUTCOMES, type Track } from "./spans";

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

type Shown = [left: number, right: number, box: Box];

export type Brush = ReturnType<typeof brushOf>;

/** Returns the tools for one frame. The transform of the context says how many device pixels a pixel has. */
export function brushOf(context: CanvasRenderingContext2D, { view, lanes, hidden }: Scene, width: number) {
  const plot = width - LABEL_WIDTH - RIGHT;
  const perPixel = (view.to - view.from) / plot;
  const X = (time: number) => LABEL_WIDTH + (time - view.from) / perPixel;
  const right = width - RIGHT;
  const kindColors = KINDS.map((kind) => color(`--${COLOR[kind]}`));

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

  // Spans are drawn in whole device pixels.
  const ratio = context.getTransform().a;
  const narrow = perPixel / ratio;
  const first = Math.round((lanes.start - view.from) / narrow) + LABEL_WIDTH * ratio;
  const [leftmost, rightmost] = [LABEL_WIDTH * ratio - first, right * ratio - first];
  const shownOf = (track: Track): Shown[] =>
    track.start.length === 0
      ? []
      : boxesWithin(pixelBoxes(track, lanes.start, narrow), leftmost, rightmost)
          .filter((box) => !hidden.has(OUTCOMES[box.outcome]!))
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

  return { context, plot, X, right, text, rule, rect, boxes, hatched };
}
