/** The visible time of the timeline: zoom, pan, ticks. All times in Unix seconds. */

export interface View {
  from: number;
  to: number;
}

/** The narrowest view, in seconds: the clock of a record has microseconds. */
export const NARROWEST = 1e-4;

/** Keeps a view within what was recorded, with a margin of half a view on both sides. */
export function bound(view: View, start: number, end: number): View {
  const whole = Math.max(end - start, NARROWEST);
  const width = Math.min(Math.max(view.to - view.from, NARROWEST), whole * 1.2);
  const middle = (view.from + view.to) / 2;
  const at = Math.min(Math.max(middle, start), end);
  return { from: at - width / 2, to: at + width / 2 };
}

/** Zooms so that the time under the pointer stays under it. A factor below 1 shows less time. */
export function zoom(view: View, at: number, factor: number): View {
  const width = view.to - view.from;
  const wanted = Math.max(width * factor, NARROWEST);
  const share = (at - view.from) / width;
  return { from: at - share * wanted, to: at + (1 - share) * wanted };
}

export function pan(view: View, seconds: number): View {
  return { from: view.from + seconds, to: view.to + seconds };
}

/** The view of the same width that ends a twelfth of it after the newest time. */
export function follow(view: View, now: number): View {
  const width = view.to - view.from;
  return { from: now + width / 12 - width, to: now + width / 12 };
}

const STEPS = [1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];

/** Times for labels, relative to `origin`, at most about `most` of them, and their distance. */
export function timeTicks(view: View, origin: number, most: number): { times: number[]; step: number } {
  const step = STEPS.find((size) => (view.to - view.from) / size <= most) ?? 86400;
  const first = Math.ceil((view.from - origin) / step - 1e-9);
  const last = Math.floor((view.to - origin) / step + 1e-9);
  return { times: Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => origin + (first + i) * step), step };
}

/** Seconds since the start of the run as `41:05`, `1:02:30` or, below a second, `41:05.25`. */
export function timeLabel(seconds: number, step: number): string {
  const digits = step >= 1 ? 0 : Math.min(4, Math.ceil(-Math.log10(step) - 1e-9));
  const size = 10 ** digits;
  const whole = Math.round(Math.abs(seconds) * size) / size;
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor((whole % 3600) / 60);
  const rest = (whole % 60).toFixed(digits).padStart(digits ? digits + 3 : 2, "0");
  const text = hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
  return seconds < 0 && whole > 0 ? `−${text}` : text;
}
