/** The drag handle of a chart or section, by pointer or keyboard (space, arrows, space), and its drop targets. */

import { useEffect, useLayoutEffect, useRef, useState } from "react";
import { visible } from "../../text/hostile";

export const DRAGGED_METRIC = "application/x-telescope-metric";
export const DRAGGED_SECTION = "application/x-telescope-section";

/** The handle that keys are moving: it may be made anew in another section, and goes on there. */
let moving: string | null = null;

interface GripProps {
  kind: string;
  /** What is dragged. */
  name: string;
  /** In words, where the name is none. */
  label?: string;
  move: (by: 1 | -1) => void;
}

export function Grip({ kind, name, label = name, move }: GripProps) {
  const [held, setHeld] = useState(false);
  const handle = useRef<HTMLSpanElement>(null);
  useLayoutEffect(() => {
    if (moving !== kind + label) return;
    moving = null;
    setHeld(true);
    handle.current?.focus();
  });
  const key = (event: React.KeyboardEvent) => {
    const by = event.key === "ArrowLeft" || event.key === "ArrowUp" ? -1 : event.key === "ArrowRight" || event.key === "ArrowDown" ? 1 : 0;
    if (event.key === " ") setHeld(!held);
    else if (held && by !== 0) {
      moving = kind + label;
      move(by);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return (
    <span
      ref={handle}
      className={`grip ${held ? "held" : ""}`}
      role="button"
      tabIndex={0}
      draggable
      aria-pressed={held}
      aria-label={`Move ${visible(label)}: space, arrows, space`}
      title="Drag to move. By keyboard: space, arrows, space"
      onKeyDown={key}
      onBlur={() => setHeld(false)}
      onDragStart={(event) => {
        event.dataTransfer.setData(kind, name);
        event.dataTransfer.effectAllowed = "move";
        const whole = (event.target as Element).closest(".chart, h2");
        if (whole) event.dataTransfer.setDragImage(whole, 8, 8);
      }}
    />
  );
}

/** Returns whether something is dragged over a drop target, and the target's handlers. `drop` returns whether it accepted the data. */
export function useDrop(kinds: string[], drop: (data: DataTransfer) => boolean) {
  const [isOver, setOver] = useState(false);
  useEffect(() => {
    if (!isOver) return;
    // A drag may end anywhere, and a target inside this one may accept the drop.
    const end = () => setOver(false);
    for (const name of ["dragend", "drop"]) addEventListener(name, end, true);
    return () => ["dragend", "drop"].forEach((name) => removeEventListener(name, end, true));
  }, [isOver]);
  return {
    isOver,
    handlers: {
      onDragOver: (event: React.DragEvent) => {
        if (!event.dataTransfer.types.some((type) => kinds.includes(type))) return;
        event.preventDefault();
        setOver(true);
      },
      onDragLeave: (event: React.DragEvent) => !event.currentTarget.contains(event.relatedTarget as Node | null) && setOver(false),
      onDrop: (event: React.DragEvent) => {
        setOver(false);
        if (drop(event.dataTransfer)) event.stopPropagation();
      },
    },
  };
}
