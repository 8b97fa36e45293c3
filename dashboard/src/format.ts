/** Numbers and times as text: true minus, thin spaces between thousands. */

import { visible } from "./text/hostile";
import { STATUS_WORDS } from "./types";

const MINUS = "\u2212";
const THIN = "\u202f"; // narrow, and no place to break a line
export const NONE = "–";

const minus = (text: string) => text.replaceAll("-", MINUS);

/** Decimals of numbers from a size on. */
const DECIMALS = [[100, 0], [10, 1], [1, 2], [0.1, 3], [0.001, 4], [0.0001, 5]] as const;

/** Returns about three significant digits, or `digits` decimals. */
export function number(value: number | null | undefined, digits?: number): string {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  if (!Number.isFinite(value)) return value > 0 ? "∞" : `${MINUS}∞`;
  if (digits !== undefined) {
    const text = value.toFixed(digits);
    return Number(text) === 0 ? text.replace("-", "") : minus(text);
  }
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e15) return minus(value.toExponential(1).replace("+", ""));
  if (size >= 999.95e6) return minus(`${(value / 1e9).toFixed(1)}G`);
  if (size >= 999.5e3) return minus(`${(value / 1e6).toFixed(1)}M`);
  if (size >= 1e5) return minus(`${(value / 1e3).toFixed(0)}k`);
  if (Number.isInteger(value)) return count(value);
  if (size >= 1e4) return minus(`${(value / 1e3).toFixed(1)}k`);
  const decimals = DECIMALS.find(([least]) => size >= least)?.[1];
  return minus(decimals === undefined ? value.toExponential(1) : value.toFixed(decimals));
}

/** Returns a number with its sign, also when it is positive. */
export function signed(value: number | null, digits?: number): string {
  return value !== null && value > 0 ? `+${number(value, digits)}` : number(value, digits);
}

/** Returns a difference with its sign and two significant digits. */
export function difference(value: number): string {
  const digits = value === 0 ? 0 : 1 - Math.floor(Math.log10(Math.abs(value)));
  return digits > 4 ? signed(value) : signed(value, Math.max(0, digits));
}

/** Returns the label of a tick with the digits that tell it from one `step` further; without a step as any number. */
export function tick(value: number, step?: number): string {
  const size = Math.abs(value);
  if (step === undefined || size >= 1e15) return number(value);
  const [unit, name] = size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : size >= 1e5 ? [1e3, "k"] : [1, ""];
  const digits = Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9));
  if (digits > 4 && size < 20 * step) return number(value); // such as learning rates
  return digits === 0 && size >= 1e4 && unit === 1 ? count(value) : `${number(value / unit, digits)}${name}`;
}

/** Returns a whole number with thin spaces between thousands. */
export function count(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  return minus(Math.round(value).toString().replace(/\B(?=(\d{3})+(?!\d))/g, THIN));
}

/** Returns a share from 0 to 1 in percent. */
export function percent(share: number | null | undefined, digits = 1): string {
  return share === null || share === undefined || Number.isNaN(share) ? NONE : `${number(100 * share, digits)}${THIN}%`;
}

/**
 * Returns how the results of an eval's metric are written: `correct` and pass@k are shares, in percent and percentage points;
 * others, such as `reward`, are plain numbers.
 */
export function resultFormat(metric: string | null | undefined) {
  const isAccuracy = metric == null || metric === "correct";
  const isShare = isAccuracy || /^pass[@^]/.test(metric);
  const [scale, digits] = isShare ? [100, 1] : [1, 3];
  const scaled = (value: number | null | undefined) => (value == null ? NaN : scale * value);
  return {
    isShare,
    label: isAccuracy ? "accuracy" : visible(metric),
    /** The label where it is no accuracy, to follow an eval's name. */
    suffix: isAccuracy ? "" : `, ${visible(metric)}`,
    points: isShare ? " points" : "",
    value: (value: number | null | undefined, decimals = digits): string => (isShare ? percent(value, decimals) : number(value, decimals)),
    bare: (value: number | null | undefined): string => number(scaled(value), digits),
    change: (value: number | null | undefined): string => signed(scaled(value), digits),
  };
}

/** Returns a sentence whose numbers stay on the line of their percent signs, with hidden characters written out. */
export const unbroken = (text: string): string => visible(text).replace(/(\d) %/g, "$1\u202f%");

/** Returns how much of something has come: `12 of 40 MB`. */
export function megabytes(done: number, total: number): string {
  const digits = total < 10e6 ? 1 : 0;
  return `${(done / 1e6).toFixed(digits)} of ${(total / 1e6).toFixed(digits)} MB`;
}

/** Returns seconds in the two largest units: `1 h 5 min`. */
export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  if (seconds < 10) return minus(`${seconds.toFixed(Math.abs(seconds) < 1 ? 2 : 1)} s`);
  const whole = Math.round(seconds);
  const units: [number, string][] = [
    [86400, "d"],
    [3600, "h"],
    [60, "min"],
    [1, "s"],
  ];
  const first = units.findIndex(([size]) => whole >= size);
  const [size, unit] = units[first]!;
  const rest = units[first + 1];
  const text = `${Math.floor(whole / size)} ${unit}`;
  const left = rest ? Math.floor((whole % size) / rest[0]) : 0;
  return rest && left ? `${text} ${left} ${rest[1]}` : text;
}

/** Returns the local date and time; without the date when it is today. */
export function moment(time: number | null | undefined, now = Date.now()): string {
  if (time === null || time === undefined) return NONE;
  const date = new Date(time * 1000);
  const clock = date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  if (date.toDateString() === new Date(now).toDateString()) return clock;
  const sameYear = date.getFullYear() === new Date(now).getFullYear();
  const day = date.toLocaleDateString("en-GB", { day: "numeric", month: "short", year: sameYear ? undefined : "numeric" });
  return `${day} ${clock}`;
}

/** Returns a value of the config as one line. Fields inside of it that are not set are left out. */
export function setting(value: unknown): string {
  if (value === null || value === undefined) return "none";
  if (typeof value === "number") return minus(Math.abs(value) >= 1e-3 || value === 0 ? String(value) : value.toExponential());
  if (typeof value === "string") return value === "" ? '""' : visible(value);
  if (Array.isArray(value)) return value.length ? value.map(setting).join(value.some((part) => part !== null && typeof part === "object") ? "; " : ", ") : "none";
  if (typeof value === "object") {
    const inside = Object.entries(value).flatMap(([name, part]) => (setting(part) === "none" ? [] : [`${visible(name)}: ${setting(part)}`]));
    return inside.length ? inside.join(", ") : "none";
  }
  return String(value);
}

export const statusWord = (status: string): string => STATUS_WORDS[status] ?? status;
export const statusClass = (status: string): string => (status === "live" ? "live" : status === "failed" || status === "dead" ? "bad" : "");
