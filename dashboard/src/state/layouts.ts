/** Layouts of the metrics page. */

import { useMemo } from "react";
import { useDocument } from "./documents";

export interface Section {
  title: string;
  metrics: string[];
}

export interface Layout {
  name: string;
  sections: Section[];
}

interface Kept {
  layouts: Layout[];
}

/** Returns what is kept; what has another form is left out. */
export function parseKept(value: unknown): Kept {
  const raw = (value ?? {}) as Partial<Kept>;
  const strings = (list: unknown): string[] => (Array.isArray(list) ? list.filter((item) => typeof item === "string") : []);
  const layouts = (Array.isArray(raw.layouts) ? raw.layouts : [])
    .filter((layout) => typeof layout?.name === "string" && Array.isArray(layout.sections))
    .map((layout) => ({
      name: layout.name,
      sections: layout.sections.map((section) => ({ title: String(section?.title ?? ""), metrics: strings(section?.metrics) })),
    }));
  return { layouts };
}

/** Returns the layout with a metric added to its last section, or without it where it was. */
export function toggleMetric(layout: Layout, metric: string): Layout {
  const there = layout.sections.some((section) => section.metrics.includes(metric));
  if (there)
    return {
      ...layout,
      sections: layout.sections
        .map((section) => ({ ...section, metrics: section.metrics.filter((other) => other !== metric) }))
        .filter((section) => section.metrics.length > 0),
    };
  if (layout.sections.length === 0) return { ...layout, sections: [{ title: "Charts", metrics: [metric] }] };
  const sections = layout.sections.map((section, i) => (i === layout.sections.length - 1 ? { ...section, metrics: [...section.metrics, metric] } : section));
  return { ...layout, sections };
}

/** Returns the layout with a metric moved in front of another one, which may be in another section; null is the end. */
export function moveMetric(layout: Layout, metric: string, section: number, before: string | null): Layout {
  if (metric === before) return layout;
  const without = layout.sections.map((one) => ({ ...one, metrics: one.metrics.filter((other) => other !== metric) }));
  const target = without[section];
  if (!target) return layout;
  const at = before === null ? -1 : target.metrics.indexOf(before);
  const place = at < 0 ? target.metrics.length : at;
  target.metrics = [...target.metrics.slice(0, place), metric, ...target.metrics.slice(place)];
  return { ...layout, sections: without.filter((one) => one.metrics.length > 0) };
}

/** Returns the layout with a metric one place earlier or later, also across sections. */
export function stepMetric(layout: Layout, metric: string, by: 1 | -1): Layout {
  const flat = layout.sections.flatMap((section, i) => section.metrics.map((name) => ({ name, section: i })));
  const at = flat.findIndex((entry) => entry.name === metric);
  const other = flat[at + by];
  if (at < 0 || !other) return layout;
  if (by < 0) return moveMetric(layout, metric, other.section, other.name);
  const after = flat[at + 2];
  return moveMetric(layout, metric, other.section, after?.section === other.section ? after.name : null);
}

/** Returns the layouts with this one saved under its name. */
export function saveLayout(layouts: Layout[], layout: Layout): Layout[] {
  const rest = layouts.filter((other) => other.name !== layout.name);
  return [...rest, layout].sort((a, b) => a.name.localeCompare(b.name));
}

export function useLayouts() {
  const { value, change } = useDocument<unknown>("layouts");
  const { layouts } = useMemo(() => parseKept(value), [value]);
  const keep = (next: (old: Kept) => Partial<Kept>) =>
    change((old) => {
      const kept = parseKept(old);
      return { ...kept, ...next(kept) };
    });
  return {
    layouts,
    save: (layout: Layout) => keep((old) => ({ layouts: saveLayout(old.layouts, layout) })),
    remove: (name: string) => keep((old) => ({ layouts: old.layouts.filter((layout) => layout.name !== name) })),
  };
}

/** Returns sections as one text for the address: `Learning:reward/total/mean,entropy;Time:timing_step_total`. */
export const formatSections = (sections: Section[]): string =>
  sections.map((section) => [encodeURIComponent(section.title), section.metrics.map(encodeURIComponent).join(",")].join(":")).join(";");

export function parseSections(text: string): Section[] {
  const decode = (part: string): string => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  };
  return text
    .split(";")
    .filter(Boolean)
    .map((part) => {
      const [title = "", metrics = ""] = part.split(":");
      return { title: decode(title), metrics: metrics.split(",").filter(Boolean).map(decode) };
    });
}
