import { useEffect, useLayoutEffect, useRef, useState } from "react";
import { duration } from "../../format";
import { useSize } from "../../shell/size";
import { useTheme } from "../../state/theme";
import { visible } from "../../text/hostile";
import { draw } from "./draw";
import { ALERT_Y, AXIS, LABEL_WIDTH, RIGHT, rowAt, spanAt, stripeTop, THIN } from "./layout";
import type { Scene } from "./scene";
import { KINDS, kindOf, OUTCOMES } from "./spans";
import { pan, timeLabel, zoom, type View } from "./viewport";

const CLICK_PX = 4;
const HIT_PX = 3;
/** Around the middle of a mark. */
const MARK_PX = 8;
const WHEEL = 0.002;

export interface Hit {
  /** Row of the columns; null for a request that still runs. */
  row: number | null;
  sample: string | null;
  step: number | null;
  text: string;
}

interface CanvasProps {
  scene: Scene;
  setView: (view: View) => void;
  onSelect: (hit: Hit | null) => void;
  onFit: (row: number | null) => void;
  onSize: (width: number, height: number) => void;
}

/** The canvas of the timeline: draws once a frame, zooms at the pointer, pans by dragging. */
export function Canvas({ scene, setView, onSelect, onFit, onSize }: CanvasProps) {
  const { host: box, ...size } = useSize();
  useEffect(() => onSize(size.width, size.height), [size.width, size.height]);
  const canvas = useRef<HTMLCanvasElement>(null);
  const [hover, setHover] = useState<{ x: number; hit: Hit | null } | null>(null);
  const latest = useRef({ scene, setView });
  latest.current = { scene, setView };
  const frame = useRef(0);
  const { dark } = useTheme();

  const paint = () => {
    cancelAnimationFrame(frame.current);
    frame.current = requestAnimationFrame(() => {
      const element = canvas.current;
      if (!element || !size.width) return;
      const ratio = devicePixelRatio || 1;
      if (element.width !== Math.round(size.width * ratio) || element.height !== Math.round(size.height * ratio)) {
        element.width = Math.round(size.width * ratio);
        element.height = Math.round(size.height * ratio);
      }
      const context = element.getContext("2d")!;
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      draw(context, latest.current.scene, size.width, size.height, box.current!.scrollTop);
    });
  };
  useLayoutEffect(paint, [scene, size.width, size.height, dark]);
  useEffect(() => () => cancelAnimationFrame(frame.current), []);

  const { view, layout, lanes, origin, now } = scene;
  const plot = Math.max(1, size.width - LABEL_WIDTH - RIGHT);
  const timeAt = (x: number) => latest.current.scene.view.from + ((x - LABEL_WIDTH) / plot) * (latest.current.scene.view.to - latest.current.scene.view.from);

  useEffect(() => {
    const element = canvas.current!;
    const wheel = (event: WheelEvent) => {
      if (event.offsetX < LABEL_WIDTH || event.shiftKey) return;
      event.preventDefault();
      const now = latest.current.scene.view;
      const across = Math.abs(event.deltaX) > Math.abs(event.deltaY) && !event.ctrlKey;
      const pixels = event.deltaMode === 1 ? 16 : 1;
      const next = across
        ? pan(now, ((event.deltaX * pixels) / plot) * (now.to - now.from))
        : zoom(now, timeAt(event.offsetX), Math.exp(event.deltaY * pixels * WHEEL * (event.ctrlKey ? 4 : 1)));
      latest.current.setView(next);
    };
    element.addEventListener("wheel", wheel, { passive: false });
    return () => element.removeEventListener("wheel", wheel);
  }, [plot]);

  const hitAt = (x: number, y: number): Hit | null => {
    if (x < LABEL_WIDTH || y < AXIS) return null;
    const inside = y - AXIS + box.current!.scrollTop;
    const near = (MARK_PX * (view.to - view.from)) / plot;
    const alert = Math.abs(inside - ALERT_Y) <= MARK_PX && scene.alerts.findLast((one) => Math.abs(one.time - timeAt(x)) <= near);
    if (alert) return { row: null, sample: null, step: alert.step, text: visible(alert.text) };
    const row = rowAt(layout, inside);
    if (!row) return null;
    const tolerance = (HIT_PX * (view.to - view.from)) / plot;
    const stripe = row.lane.area === "engine" && row.height >= THIN && inside >= stripeTop(row) ? [row.lane.stripe] : [];
    for (const track of [...stripe, row.lane.main, row.lane.back]) {
      const index = spanAt(track, timeAt(x), track === row.lane.main ? tolerance : 0);
      if (index >= 0 && !scene.hidden.has(OUTCOMES[track.outcome[index]!]!)) return hitOf(track.row[index]!);
    }
    const { running } = row.lane;
    if (!running || now === null || timeAt(x) < running.start || timeAt(x) > now) return null;
    return { row: null, sample: running.sample, step: null, text: `${running.sample}, running for ${duration(now - running.start)}` };
  };
  const hitOf = (row: number): Hit => ({ row, sample: lanes.columns.sample_id[row] ?? null, step: lanes.columns.step[row] ?? null, text: visible(describe(row)) });
  const describe = (row: number): string => {
    const { component, name, sample_id, micro_batch, step, start, end, rank, count, status } = lanes.columns;
    const many = count?.[row] ?? 1;
    const kind = kindOf(component[row]!, name[row]!);
    const seconds = `${(end[row]! - start[row]!).toPrecision(3)} s`;
    const outcome = status?.[row];
    if (many > 1) return [`${many} spans of ${kind}`, seconds, outcome].filter(Boolean).join(", ");
    if (sample_id[row]) return [sample_id[row], outcome, kind === "request" ? "outside the engine" : kind === "environment" ? name[row]! : kind === "sandbox" ? `sandbox ${name[row]!}` : kind, seconds].filter(Boolean).join(", ");
    return [
      KINDS.includes(kind) && kind !== "other" && kind !== "forward" ? kind : name[row]!.replaceAll("_", " "),
      micro_batch[row] !== null ? `micro-batch ${micro_batch[row]! + 1}` : "",
      rank[row] !== null ? `rank ${rank[row]}` : "",
      step[row] !== null ? `step ${step[row]}` : "",
      seconds,
    ].filter(Boolean).join(", ");
  };

  const drag = useRef<{ x: number; y: number; view: View; scroll: number; moved: boolean } | null>(null);
  const pointers = useRef(new Map<number, { x: number; y: number }>());
  const pinch = useRef<{ distance: number; view: View; at: number } | null>(null);
  const offset = (event: React.PointerEvent) => {
    const bounds = canvas.current!.getBoundingClientRect();
    return { x: event.clientX - bounds.left, y: event.clientY - bounds.top };
  };
  const down = (event: React.PointerEvent) => {
    canvas.current!.setPointerCapture(event.pointerId);
    const at = offset(event);
    pointers.current.set(event.pointerId, at);
    const [a, b] = [...pointers.current.values()];
    if (a && b) {
      pinch.current = { distance: Math.abs(a.x - b.x) || 1, view, at: timeAt((a.x + b.x) / 2) };
      drag.current = null;
    } else drag.current = { ...at, view, scroll: box.current!.scrollTop, moved: false };
  };
  const move = (event: React.PointerEvent) => {
    const at = offset(event);
    if (pointers.current.has(event.pointerId)) pointers.current.set(event.pointerId, at);
    const [a, b] = [...pointers.current.values()];
    if (pinch.current && a && b) {
      setView(zoom(pinch.current.view, pinch.current.at, pinch.current.distance / Math.max(8, Math.abs(a.x - b.x))));
      return;
    }
    const start = drag.current;
    if (start) {
      if (!start.moved && Math.hypot(at.x - start.x, at.y - start.y) < CLICK_PX) return;
      start.moved = true;
      setView(pan(start.view, (-(at.x - start.x) / plot) * (start.view.to - start.view.from)));
      box.current!.scrollTop = start.scroll - (at.y - start.y);
      return;
    }
    if (event.pointerType === "touch") return;
    const inside = at.x >= LABEL_WIDTH && at.x <= size.width - RIGHT;
    setHover(inside ? { x: at.x, hit: hitAt(at.x, at.y) } : null);
  };
  const up = (event: React.PointerEvent) => {
    pointers.current.delete(event.pointerId);
    if (pinch.current) {
      if (pointers.current.size === 0) pinch.current = null;
      return;
    }
    const start = drag.current;
    drag.current = null;
    if (start && !start.moved) onSelect(hitAt(start.x, start.y));
  };

  const seconds = view.to - view.from;
  const label = hover ? timeLabel(timeAt(hover.x) - origin, seconds / 2000) : "";
  return (
    <div className="tlc" ref={box} onScroll={paint}>
      <div style={{ height: Math.max(layout.height + AXIS, 1) }}>
        <canvas
          ref={canvas}
          style={{ width: size.width, height: size.height, cursor: hover?.hit ? "pointer" : "default" }}
          tabIndex={0}
          role="img"
          aria-label={`Timeline of ${seconds.toPrecision(3)} seconds. Arrow keys pan, plus and minus zoom, comma and period go through the requests.`}
          onPointerDown={down}
          onPointerMove={move}
          onPointerUp={up}
          onPointerCancel={up}
          onPointerLeave={() => setHover(null)}
          onDoubleClick={(event) => onFit(hitAt(event.nativeEvent.offsetX, event.nativeEvent.offsetY)?.row ?? null)}
        />
      </div>
      {hover && !drag.current && (
        <div className="hair" style={{ left: Math.round(hover.x), height: size.height }} aria-hidden="true">
          <i>{label}</i>
        </div>
      )}
      <output className="said" aria-live="off">{hover?.hit?.text ?? ""}</output>
    </div>
  );
}
