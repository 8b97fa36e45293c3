/** The rows of a long list that are in view. All have one height, so their places need no list of their own. */

import { type RefObject, useCallback, useLayoutEffect, useState } from "react";

/** Rows beside those in view, so that a short scroll shows no gap. */
const OVERSCAN = 16;

export interface Rows {
  first: number;
  /** One behind the last row. */
  end: number;
  /** Shows a row, and scrolls no further than needed. */
  reveal: (row: number) => void;
}

/** Returns the part [first, end) of `count` rows to draw in a box that scrolls. */
export function rowsInView(top: number, room: number, count: number, height: number): [number, number] {
  const first = Math.max(0, Math.floor(top / height) - OVERSCAN);
  return [Math.min(first, count), Math.min(count, Math.ceil((top + room) / height) + OVERSCAN)];
}

export function useRows(box: RefObject<HTMLElement | null>, count: number, height: number): Rows {
  const [{ top, room }, setView] = useState({ top: 0, room: 0 });
  useLayoutEffect(() => {
    const element = box.current;
    if (!element) return;
    const look = () => setView({ top: element.scrollTop, room: element.clientHeight });
    look();
    element.addEventListener("scroll", look, { passive: true });
    const watch = new ResizeObserver(look);
    watch.observe(element);
    return () => (element.removeEventListener("scroll", look), watch.disconnect());
  }, []);
  const reveal = useCallback(
    (row: number) => {
      const element = box.current;
      if (!element) return;
      const [above, below] = [row * height, (row + 1) * height - element.clientHeight];
      if (element.scrollTop > above) element.scrollTop = above;
      else if (element.scrollTop < below) element.scrollTop = below;
    },
    [height],
  );
  const [first, end] = rowsInView(top, room, count, height);
  return { first, end, reveal };
}
