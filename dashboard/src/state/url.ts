/** The state of a view is its address: `#/RUN/PAGE?range=10-40&smooth=0.6`. */

import { useEffect, useState, useSyncExternalStore } from "react";
import { Listeners } from "./listeners";

export interface Place {
  /** Null on the pages of all runs. */
  run: string | null;
  page: string;
  params: Record<string, string>;
}

export interface Range {
  from: number;
  to: number;
}

/** Parameters that stay when the page changes. */
const SHARED = ["range", "theme", "with", "step", "group", "baseline"] as const;

export function parse(hash: string): Place {
  const [path = "", query = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
  const parts = path.split("/").filter(Boolean).map(decode);
  const params = Object.fromEntries(new URLSearchParams(query));
  if (parts.length === 0) return { run: null, page: "runs", params };
  return { run: parts[0]!, page: parts[1] ?? "overview", params };
}

/** Decodes a part of an address; a broken one stays as it is. */
export function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** Returns the parts of a list in the address; a part may have commas. */
export const parseList = (text: string | undefined): string[] => (text ?? "").split(",").filter(Boolean).map(decode);

export const formatList = (parts: string[]): string => parts.map(encodeURIComponent).join(",");

export function format(place: Place): string {
  const path = place.run === null ? "#/" : `#/${encodeURIComponent(place.run)}/${place.page}`;
  const query = new URLSearchParams(Object.entries(place.params).filter(([, value]) => value !== "")).toString();
  return query ? `${path}?${query.replaceAll("%2C", ",")}` : path;
}

/** Returns the place of another page: shared parameters stay, those of the page go. */
export function elsewhere(place: Place, change: { run?: string | null; page?: string }, params: Record<string, string> = {}): Place {
  const run = change.run === undefined ? place.run : change.run;
  const kept = SHARED.filter((name) => name in place.params && (run === place.run || name === "theme"));
  const shared = Object.fromEntries(kept.map((name) => [name, place.params[name]!]));
  return { run, page: change.page ?? place.page, params: { ...shared, ...params } };
}

/** Returns the first and last step of `10-40`, or null. */
export function parseRange(text: string | undefined): Range | null {
  const match = /^(\d+)-(\d+)$/.exec(text ?? "");
  if (!match) return null;
  const [a, b] = [Number(match[1]), Number(match[2])];
  return { from: Math.min(a, b), to: Math.max(a, b) };
}

const formatRange = (range: Range | null): string => (range ? `${range.from}-${range.to}` : "");

let current = parse(typeof location === "undefined" ? "" : location.hash);
const { subscribe, notify } = new Listeners();

function changed(): void {
  current = parse(location.hash);
  notify();
}

if (typeof window !== "undefined") {
  window.addEventListener("hashchange", changed);
  window.addEventListener("popstate", changed);
}

/** Goes to a place. `replace` keeps the history short while a control is dragged. */
export function go(place: Place, replace = false): void {
  const hash = format(place);
  if (hash === format(current)) return;
  try {
    if (replace) history.replaceState(null, "", hash);
    else history.pushState(null, "", hash);
  } catch {
    location.hash = hash; // Safari allows 100 changes in 10 seconds, and a frame without an origin none
  }
  changed();
}

/** Changes parameters of this page; an empty string or null removes one. */
export function setParams(change: Record<string, string | null>, replace = false): void {
  const params = { ...current.params };
  for (const [name, value] of Object.entries(change)) {
    if (value === null || value === "") delete params[name];
    else params[name] = value;
  }
  go({ ...current, params }, replace);
}

export const place = (): Place => current;

export const usePlace = (): Place => useSyncExternalStore(subscribe, place);

/** Returns one parameter and its setter. The default is not written into the address. */
export function useParam(name: string, fallback = ""): [string, (value: string | null, replace?: boolean) => void] {
  const value = usePlace().params[name] ?? fallback;
  return [value, (next, replace) => setParams({ [name]: next === fallback ? null : next }, replace)];
}

const TYPING_WAIT_MS = 180;

/** Returns the text of a search field and its setter. The address follows when typing pauses, with what `change` makes of it. */
export function useSearchText(change = (search: string): Record<string, string | null> => ({ search })): [string, (text: string) => void] {
  const search = usePlace().params.search ?? "";
  const [text, setText] = useState(search);
  useEffect(() => setText(search), [search]);
  useEffect(() => {
    if (text === search) return;
    const timer = setTimeout(() => setParams(change(text), true), TYPING_WAIT_MS);
    return () => clearTimeout(timer);
  }, [text, search]);
  return [text, setText];
}

/** Returns the step that an address selects, or null. */
export const parseStep = (text: string | undefined): number | null => (/^\d+$/.test(text ?? "") ? Number(text) : null);

/** Returns the range of steps that ruler and charts show, and its setter. */
export function useRange(): [Range | null, (range: Range | null) => void] {
  const range = parseRange(usePlace().params.range);
  return [range, (next) => setParams({ range: formatRange(next) })];
}

/** Most runs in one view, which is the limit of the server's event stream. */
export const MOST_RUNS = 100;

/** Returns the runs that are drawn over the one of a place. */
export function othersOf({ run, params }: Place): string[] {
  return [...new Set(parseList(params.with))].filter((id) => id !== run).slice(0, MOST_RUNS - 1);
}

export const useOthers = (): string[] => othersOf(usePlace());

export const setOthers = (runs: string[]): void => setParams({ with: formatList(runs) });
