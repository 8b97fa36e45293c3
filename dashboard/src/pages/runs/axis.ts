/** Computes the axis of any field of runs: numeric, on a log scale if it spans decades, or categorical. Draws nothing. */

import { logTicks, ticks } from "../../charts/math";
import { compare, type Sortable } from "../../state/groups";

/** Numbers that span at least this factor, such as learning rates, are on a log scale. */
const LOG_FROM = 20;
const MOST_TICKS = 12;
/** Margin beyond the outermost numbers, as a share of the axis. */
const ROOM = 0.05;

export interface Axis {
  /** Position of a value from 0 to 1; null if it is not on the axis. */
  place: (value: Sortable) => number | null;
  ticks: { at: number; text: string }[];
  log: boolean;
}

/** Returns the axis of some values. `write` formats numbers. */
export function axisOf(values: Sortable[], write: (value: number) => string, wanted = 5): Axis {
  const known = values.filter((value) => value !== null);
  const numbers = known.filter((value) => typeof value === "number");
  if (numbers.length < known.length || known.length === 0) return namesAxis(known);
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const log = low > 0 && high / low >= LOG_FROM;
  const scale = log ? Math.log10 : (value: number) => value;
  const room = scale(high) > scale(low) ? ROOM * (scale(high) - scale(low)) : Math.abs(scale(low)) / 2 || 0.5;
  const [from, to] = [scale(low) - room, scale(high) + room];
  const place = (value: Sortable) => (typeof value === "number" && (!log || value > 0) ? (scale(value) - from) / (to - from) : null);
  const distinct = [...new Set(numbers)].sort((a, b) => a - b);
  // If a setting has few values, they are the ticks, unless their labels would overlap.
  const isApart = distinct.every((value, i) => i === 0 || place(value)! - place(distinct[i - 1]!)! > 0.06);
  const marks = distinct.length <= 8 && isApart ? distinct : log ? logTicks(10 ** from, 10 ** to) : ticks(from, to, wanted).filter((tick) => tick >= from && tick <= to);
  return { place, ticks: marks.map((value) => ({ at: place(value)!, text: write(value) })), log };
}

function namesAxis(known: Sortable[]): Axis {
  const names = [...new Set(known)].sort((a, b) => compare(a, b, false));
  const at = new Map(names.map((name, i) => [name, (i + 0.5) / names.length]));
  const every = Math.ceil(names.length / MOST_TICKS);
  return {
    place: (value) => at.get(value) ?? null,
    ticks: names.flatMap((name, i) => (i % every === 0 ? [{ at: at.get(name)!, text: String(name) }] : [])),
    log: false,
  };
}
