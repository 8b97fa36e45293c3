/** Changes of lists, and moves in them. */

/** Returns the list with an item added at the end, or without it where it was. */
export const toggled = <T>(list: readonly T[], item: T): T[] => (list.includes(item) ? list.filter((other) => other !== item) : [...list, item]);

/** Returns the list with the item at one place moved to another; the list itself if a place lies outside. */
export function moved<T>(list: T[], from: number, to: number): T[] {
  const outside = (at: number) => at < 0 || at >= list.length;
  return outside(from) || outside(to) ? list : list.toSpliced(from, 1).toSpliced(to, 0, list[from]!);
}

/** Returns the item so many places from another, at most the first or last one; undefined without items. */
export const neighbor = <T>(list: readonly T[], at: number, by: number): T | undefined => list[Math.min(Math.max(at + by, 0), list.length - 1)];
