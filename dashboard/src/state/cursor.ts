/** The crosshair that all charts with the same axis share: at the pointer, else at the selected step. */

import { useEffect, useSyncExternalStore } from "react";
import { Listeners } from "./listeners";

interface Cursor {
  axis: string;
  x: number;
}

let pointed: Cursor | null = null;
let selected: Cursor | null = null;
const { subscribe, notify } = new Listeners();

const on = (cursor: Cursor | null, axis: string): number | null => (cursor?.axis === axis ? cursor.x : null);

/** Returns where charts with this axis are read, and where the selected step lies on it. */
export const cursorOn = (axis: string): { at: number | null; selected: number | null } => ({ at: on(pointed, axis) ?? on(selected, axis), selected: on(selected, axis) });

/** Moves the crosshair to the pointer; null leaves it at the selected step. */
export function setCursor(next: Cursor | null): void {
  if (pointed?.x === next?.x && pointed?.axis === next?.axis) return;
  pointed = next;
  notify();
}

function setSelected(next: Cursor | null): void {
  if (selected?.x === next?.x && selected?.axis === next?.axis) return;
  selected = next;
  notify();
}

export const onCursor = subscribe;

/** Returns the place of the crosshair on an axis, or null. */
export function useCursor(axis: string): number | null {
  return useSyncExternalStore(onCursor, () => cursorOn(axis).at);
}

/** Marks the selected step on all charts with this axis while the page is shown. */
export function useSelected(axis: string, x: number | null): void {
  useEffect(() => setSelected(x === null ? null : { axis, x }), [axis, x]);
  useEffect(() => () => setSelected(null), []);
}
