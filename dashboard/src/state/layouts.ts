/** Layouts of the metrics page. */

import { useMemo } from "react";
import { moved } from "../lists";
import { useDocument } from "./documents";
import { decode, formatList, parseList } from "./url";

export interface Section {
  title: string;
  metrics: string[];
}

/** Axes of one chart that differ from those of all charts. */
export interface Scale {
  log?: boolean;
  low?: number;
  high?: number;
  /** The metric of the x axis. */
  x?: string;
}

export type Scales = Record<string, Scale>;

export interface Layout {
  name: string;
  sections: Section[];
  scales?: Scales;
}

/** Returns what is kept; what has another form is left out. */
export function parseKept(value: unknown): Layout[] {
  const { layouts } = (value ?? {}) as { layouts?: Layout[] };
  const strings = (list: unknown): string[] => (Array.isArray(list) ? list.filter((item) => typeof item === "string") : []);
  return (Array.isArray(layouts) ? layouts : [])
    .filter((layout) => typeof layout?.name === "string" && Array.isArray(layout.sections))
    .map((layout) => ({
      name: layout.name,
      sections: layout.sections.map((section) => ({ title: String(section?.title ?? ""), metrics: strings(section?.metrics) })),
      ...(layout.scales ? { scales: parseScales(formatScales(layout.scales)) } : {}),
    }));
}

const changed = (layout: Layout, metrics: (section: Section, at: number) => string[]): Layout => ({
  ...layout,
  sections: layout.sections.map((section, at) => ({ ...section, metrics: metrics(section, at) })),
});

/** Returns the section where a new metric goes: the one with most metrics of the same section of names, else the last. */
export function sectionFor(layout: Layout, metric: string, sectionOf: (name: string) => string): number {
  const like = layout.sections.map((section) => section.metrics.filter((other) => sectionOf(other) === sectionOf(metric)).length);
  const most = Math.max(0, ...like);
  return most > 0 ? like.indexOf(most) : layout.sections.length - 1;
}

/** Returns the layout with a metric added to a section, or without it where it was. */
export function toggleMetric(layout: Layout, metric: string, section = layout.sections.length - 1): Layout {
  if (layout.sections.some((one) => one.metrics.includes(metric))) return changed(layout, (one) => one.metrics.filter((other) => other !== metric));
  if (layout.sections.length === 0) return { ...layout, sections: [{ title: "Charts", metrics: [metric] }] };
  return changed(layout, (one, at) => (at === section ? [...one.metrics, metric] : one.metrics));
}

/** Returns the layout with a metric, which may be new in it, in front of another one of a section; null is the end. */
export function moveMetric(layout: Layout, metric: string, section: number, before: string | null): Layout {
  if (metric === before || !layout.sections[section]) return layout;
  return changed(layout, (one, at) => {
    const rest = one.metrics.filter((other) => other !== metric);
    if (at !== section) return rest;
    const place = before !== null && rest.includes(before) ? rest.indexOf(before) : rest.length;
    return rest.toSpliced(place, 0, metric);
  });
}

export const addSection = (layout: Layout, title: string): Layout => ({ ...layout, sections: [...layout.sections, { title, metrics: [] }] });

export const renameSection = (layout: Layout, at: number, title: string): Layout => ({ ...layout, sections: layout.sections.map((section, i) => (i === at ? { ...section, title } : section)) });

export const removeSection = (layout: Layout, at: number): Layout => ({ ...layout, sections: layout.sections.filter((_, i) => i !== at) });

/** Returns the layout with a section at another place; a place outside changes nothing. */
export const moveSection = (layout: Layout, from: number, to: number): Layout => ({ ...layout, sections: moved(layout.sections, from, to) });

/** Returns the layout with a metric one place earlier or later, also across sections. */
export function stepMetric(layout: Layout, metric: string, by: 1 | -1): Layout {
  const section = layout.sections.findIndex((one) => one.metrics.includes(metric));
  if (section < 0) return layout;
  const { metrics } = layout.sections[section]!;
  const next = metrics.indexOf(metric) + by;
  if (next >= 0 && next < metrics.length) return moveMetric(layout, metric, section, metrics[by < 0 ? next : next + 1] ?? null);
  return moveMetric(layout, metric, section + by, by > 0 ? (layout.sections[section + 1]?.metrics[0] ?? null) : null);
}

/** Returns the layouts with this one saved under its name. */
export function saveLayout(layouts: Layout[], layout: Layout): Layout[] {
  const rest = layouts.filter((other) => other.name !== layout.name);
  return [...rest, layout].sort((a, b) => a.name.localeCompare(b.name));
}

export function useLayouts() {
  const { value, change, error } = useDocument<unknown>("layouts");
  const layouts = useMemo(() => parseKept(value), [value]);
  return {
    layouts,
    error,
    save: (layout: Layout) => change((old) => ({ layouts: saveLayout(parseKept(old), layout) })),
    remove: (name: string) => change((old) => ({ layouts: parseKept(old).filter((layout) => layout.name !== name) })),
  };
}

/** Returns sections as one text for the address: `Learning:reward/total/mean,entropy;Time:timing_step_total`. No section is `;`. */
export const formatSections = (sections: Section[]): string =>
  sections.map((section) => [encodeURIComponent(section.title), formatList(section.metrics)].join(":")).join(";") || ";";

export function parseSections(text: string): Section[] {
  return text
    .split(";")
    .filter(Boolean)
    .map((part) => {
      const [title = "", metrics = ""] = part.split(":");
      return { title: decode(title), metrics: parseList(metrics) };
    });
}

const NO_SCALES = "none";

/** Formats the axes of charts for the address: `entropy:log;grad_norm:0..2;reward/total/mean:linear,x=entropy`. */
export function formatScales(scales: Scales): string {
  const parts = Object.entries(scales).flatMap(([metric, scale]) => {
    const { log, low, high, x } = scale ?? {};
    const range = low === undefined && high === undefined ? "" : `${low ?? ""}..${high ?? ""}`;
    const own = [log === undefined ? "" : log ? "log" : "linear", range, x ? `x=${encodeURIComponent(x)}` : ""].filter(Boolean);
    return own.length > 0 ? [`${encodeURIComponent(metric)}:${own.join(",")}`] : [];
  });
  return parts.join(";") || NO_SCALES;
}

export function parseScales(text: string): Scales {
  const scales: Scales = {};
  for (const part of text.split(";")) {
    const [metric = "", own = ""] = part.split(":");
    const scale: Scale = {};
    for (const one of own.split(",")) {
      const [, low = "", high = ""] = /^(.*)\.\.(.*)$/.exec(one) ?? [];
      if (one === "log" || one === "linear") scale.log = one === "log";
      if (low.trim() && Number.isFinite(Number(low))) scale.low = Number(low);
      if (high.trim() && Number.isFinite(Number(high))) scale.high = Number(high);
      if (one.startsWith("x=")) scale.x = decode(one.slice(2));
    }
    if (Object.keys(scale).length > 0) scales[decode(metric)] = scale;
  }
  return scales;
}
