import { useEffect, useRef } from "react";
import { useSize } from "../../shell/size";
import { color, useTheme } from "../../state/theme";
import type { GaugeSeries } from "../gauges";
import { LABEL_WIDTH, MINIMAP, RIGHT } from "./layout";
import type { View } from "./viewport";

interface MinimapProps {
  from: number;
  to: number;
  view: View;
  /** Request slots in use. */
  used: GaugeSeries | null;
  waits: readonly { from: number; to: number }[];
  setView: (view: View) => void;
  label: string;
}

/** The whole run: slots in use above, waits of the trainer below, the view as a frame that can be dragged. */
export function Minimap({ from, to, view, used, waits, setView, label }: MinimapProps) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const { host, width } = useSize();
  const grab = useRef<number | null>(null);
  const { dark } = useTheme();
  const plot = Math.max(1, width - LABEL_WIDTH - RIGHT);
  const X = (time: number) => LABEL_WIDTH + (Math.min(Math.max(time, from), to) - from) / Math.max(to - from, 1e-9) * plot;
  useEffect(() => {
    const element = canvas.current!;
    const ratio = devicePixelRatio || 1;
    element.width = width * ratio;
    element.height = MINIMAP * ratio;
    const context = element.getContext("2d")!;
    context.scale(ratio, ratio);
    context.clearRect(0, 0, width, MINIMAP);
    if (used) {
      const most = Math.max(1, ...used.max.map((value) => value ?? 0));
      context.fillStyle = color("--dc");
      used.time.forEach((time, i) => {
        // Whole pixels: neighbours that share one would have a seam.
        const [left, right] = [Math.floor(X(time)), Math.floor(X(used.time[i + 1] ?? to))];
        const height = (20 * (used.mean[i] ?? 0)) / most;
        context.fillRect(left, 28 - height, right - left, height);
      });
    }
    context.fillStyle = color("--sync");
    for (const wait of waits) context.fillRect(X(wait.from), 31, Math.max(1, X(wait.to) - X(wait.from)), 7);
    context.strokeStyle = color("--ink");
    context.lineWidth = 1.5;
    const [a, b] = [X(view.from), X(view.to)];
    context.strokeRect(a + 0.5, 4.75, Math.max(3, b - a), 36);
  }, [width, from, to, view, used, waits, dark]);
  const timeAt = (x: number) => from + ((x - LABEL_WIDTH) / plot) * (to - from);
  const center = (time: number) => setView({ from: time - (view.to - view.from) / 2, to: time + (view.to - view.from) / 2 });
  return (
    <div className="mini" ref={host}>
      <span className="lab">
        <b>{label}</b>
        <span className="f s">slots used, waits</span>
      </span>
      <canvas
        ref={canvas}
        style={{ width, height: MINIMAP }}
        role="img"
        aria-label="The whole run"
        onPointerDown={(event) => {
          const time = timeAt(event.nativeEvent.offsetX);
          event.currentTarget.setPointerCapture(event.pointerId);
          const inside = time >= view.from && time <= view.to;
          grab.current = inside ? time - (view.from + view.to) / 2 : 0;
          if (!inside) center(time);
        }}
        onPointerMove={(event) => grab.current !== null && center(timeAt(event.nativeEvent.offsetX) - grab.current)}
        onPointerUp={() => (grab.current = null)}
        onPointerCancel={() => (grab.current = null)}
      />
    </div>
  );
}
