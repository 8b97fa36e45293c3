/** The names of metrics as a tree: section, group, metric. */

import { groups, sort } from "d3-array";
import { statisticOf } from "../../charts/sources";
import type { Section } from "../../state/layouts";
import { visible } from "../../text/hostile";

interface TreeRow {
  kind: "section" | "group" | "metric";
  label: string;
  /** Name of the metric, or of the section. */
  name: string;
  depth: number;
  count?: number;
}

const FIRST = ["reward", "general", "evals", "loss", "advantage", "sample_metrics", "rollouts", "staleness", "mismatch", "kept", "discarded", "timing"];

/** Returns section, group and metric of a name; a name without a section belongs to General, `timing_x` to Timing. */
export function place(name: string): [section: string, group: string, metric: string] {
  if (name.startsWith("eval/")) return placed(["evals", ...name.split("/").slice(1)]);
  if (name.startsWith("timing_")) return ["timing", "", name.slice("timing_".length)];
  const parts = name.split("/");
  return parts.length === 1 ? ["general", "", name] : placed(parts);
}

function placed(parts: string[]): [string, string, string] {
  if (parts.length === 2) return [parts[0]!, "", parts[1]!];
  return [parts[0]!, parts[1]!, parts.slice(2).join("/")];
}

/** Sections of the metrics that every run may have (docs/metrics.md). Others are those of a user's training backend. */
const OWN_TO_TELESCOPE = new Set([
  ...FIRST,
  ...["router_replay", "tokens", "clip", "tis", "masked", "environment", "cancelled", "returned", "retried", "lost", "packing", "performance", "weight_sync"],
]);

const LONGEST_TITLE = 18;
const STATISTIC = /\/(mean|std|min|max|gini|pct)$/;

/** Returns the end of a name that tells it from others as the title of its chart, what it leaves out, and its unit. */
export function titleOf(name: string): { title: string; unit: string; name: string } {
  const statistic = STATISTIC.exec(name)?.[1] ?? "";
  const base = name.replace(STATISTIC, "").replace(/^timing_/, "");
  const [section = "", ...rest] = base.split("/");
  const ofGroup = ["sample_metrics", "environment", "eval"].includes(section) && rest.length > 1;
  const whole = rest.length === 0 || (!ofGroup && base.length <= LONGEST_TITLE);
  const title = whole ? base : rest.slice(ofGroup ? 1 : 0).join("/");
  const unit = [whole ? "" : ofGroup ? (section === "eval" ? `eval ${rest[0]}` : rest[0]) : section, statistic === "pct" ? "%" : statistic, unitOf(name)].filter(Boolean).join(", ");
  return { title: visible(title), unit: visible(unit), name: visible(name) };
}

/** Returns the unit that a metric's name tells. */
export function unitOf(metric: string): string {
  if (metric.startsWith("timing_") || /_seconds(\/|$)/.test(metric)) return "s";
  if (/_pct$/.test(metric)) return "%";
  if (/(^|\/)tokens(_mean|_std|_min|_max)?$|rollouts\/tokens_/.test(metric)) return "tokens";
  if (/bytes$/.test(metric)) return "bytes";
  return "";
}

function order(a: string, b: string): number {
  const at = (name: string) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
  return at(a) - at(b) || a.localeCompare(b);
}

/** Returns whether a name contains every word of a search. */
export const fitsSearch = (name: string, search: string): boolean => search.toLowerCase().split(/\s+/).every((word) => name.toLowerCase().includes(word));

/** Returns the rows of the tree that fit the search, without those of closed sections. */
export function treeRows(names: string[], search: string, closed: Set<string>): TreeRow[] {
  const found = names.filter((name) => fitsSearch(name, search)).sort();
  const out: TreeRow[] = [];
  for (const { title: section, metrics } of allSections(found)) {
    out.push({ kind: "section", label: visible(section), name: section, depth: 0, count: metrics.length });
    if (closed.has(section) && !search.trim()) continue;
    for (const [group, own] of sort(groups(metrics, (name) => place(name)[1]), ([group]) => group)) {
      if (group) out.push({ kind: "group", label: visible(group), name: `${section}/${group}`, depth: 1 });
      for (const name of own) out.push({ kind: "metric", label: visible(place(name)[2]), name, depth: group ? 2 : 1 });
    }
  }
  return out;
}

/** Returns all metrics as sections of charts. */
export function allSections(names: string[]): Section[] {
  return groups([...names].sort(), (name) => place(name)[0])
    .sort(([a], [b]) => order(a, b))
    .map(([title, metrics]) => ({ title, metrics }));
}

/** Returns the charts to begin with, of those that the runs have. */
export function mainSections(names: string[]): Section[] {
  const evals = names.filter((name) => /^eval\/[^/]+\/accuracy$/.test(name) || (/^eval\/[^/]+\/reward$/.test(name) && !names.includes(name.replace(/reward$/, "accuracy")))).slice(0, 3);
  const sample = names.filter((name) => name.startsWith("sample_metrics/") && statisticOf(name)?.statistic === "mean").slice(0, 8);
  const wanted: Section[] = [
    { title: "Learning", metrics: ["reward/all_groups/mean", "reward/total/mean", ...evals, "reward/gini_mean", ...sample] },
    { title: "Optimizer", metrics: ["entropy", "kl_divergence_inference", "grad_norm", "loss/policy"] },
    {
      title: "Samples",
      metrics: ["rollouts/tokens_completion/mean", "stop_reason_length_pct", "discarded/zero_advantage/pct", "staleness/steps/mean"],
    },
    { title: "Time", metrics: ["timing_step_total", "timing_waiting_for_data", "timing_step_active", "timing_weight_sync_total"] },
  ];
  const there = new Set(names);
  const ofBackend = allSections(names.filter((name) => !OWN_TO_TELESCOPE.has(place(name)[0])));
  return [...wanted, ...ofBackend]
    .map((section) => ({ ...section, metrics: section.metrics.filter((name) => there.has(name)) }))
    .filter((section) => section.metrics.length > 0);
}
