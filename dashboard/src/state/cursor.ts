/** The crosshair that all charts with the same axis share. */

import { useSyncExternalStore } from "react";

export interface Cursor {
  axis: string;
  x: number;
}

let cursor: Cursor | null = null;
const listeners = new Set<() => void>();

export const cursorNow = (): Cursor | null => cursor;

export function setCursor(next: Cursor | null): void {
  if (cursor?.x === next?.x && cursor?.axis === next?.axis) return;
  cursor = next;
  for (const listener of listeners) listener();
}

export function onCursor(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Returns the place of the crosshair on an axis, or null. */
export function useCursor(axis: string): number | null {
  return useSyncExternalStore(onCursor, () => (cursor?.axis === axis ? cursor.x : null));
}
