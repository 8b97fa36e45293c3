/** The filter of runs: words, `-words` that are excluded, and conditions such as `tag=sweep`, `reward>0.5`, `model=*qwen*`. */

import { setting } from "../../format";
import { toggled } from "../../lists";
import type { RunRow } from "../../types";

type Sign = "=" | "!=" | ">" | ">=" | "<" | "<=";

interface Term {
  /** Null for a word that is looked for everywhere. */
  field: string | null;
  sign: Sign;
  value: string;
}

const CONDITION = /^([\w./@-]+?)(!=|>=|<=|=|>|<)(.*)$/;
const TERM = /"[^"]*"|[^\s"]*"[^"]*"|\S+/g;

const partsOf = (text: string): string[] => text.match(TERM) ?? [];

/** Fields of every run, by the names that a filter and a column use. */
const OWN: Record<string, (run: RunRow) => unknown> = {
  name: (run) => run.name,
  id: (run) => run.id,
  status: (run) => run.status,
  project: (run) => run.project,
  model: (run) => run.model,
  algorithm: (run) => run.algorithm,
  environment: (run) => run.environments,
  steps: (run) => run.steps,
  attempt: (run) => run.attempt,
  duration: (run) => run.duration,
  reward: (run) => run.reward_last,
  heldout: (run) => run.heldout_after ?? run.heldout_before,
  heldout_step: (run) => run.heldout_step,
  checkpoint: (run) => run.best_checkpoint,
  gain: (run) => gain(run),
};

/** Returns how much the held-out result grew; null if it was not measured twice. */
export const gain = (run: RunRow): number | null =>
  run.heldout_before === null || run.heldout_after === null ? null : run.heldout_after - run.heldout_before;

export function parseFilter(text: string): Term[] {
  const terms = partsOf(text).map((part): Term => {
    const match = part.startsWith('"') ? null : CONDITION.exec(part);
    const bare = (value: string) => value.replaceAll('"', "").toLowerCase();
    if (!match) return { field: null, sign: "=", value: bare(part) };
    return { field: match[1]!, sign: match[2] as Sign, value: bare(match[3]!) };
  });
  // A comparison without a number is still being typed.
  return terms.filter(({ sign, value }) => value !== "" || sign === "=" || sign === "!=");
}

/** Returns the name under which the server knows a field: a setting unless it says otherwise; null for a field of every run. */
export function fieldName(field: string): string | null {
  if (field === "tag" || Object.hasOwn(OWN, field)) return null;
  if (/^(config|last|eval)\./.test(field)) return field;
  return field.includes("/") ? `last.${field}` : `config.${field}`;
}

/** Returns the value of a field of a run. `tags` are those of the run and of the user. */
export function valueOf(run: RunRow, field: string, tags: string[]): unknown {
  if (field === "tag") return tags;
  const name = fieldName(field);
  return name === null ? OWN[field]!(run) : run.fields[name];
}

/** Returns whether a value fits a condition. A list fits if one of its items does. */
export function fits(value: unknown, sign: Sign, wanted: string): boolean {
  if (sign === "!=") return !fits(value, "=", wanted);
  if (Array.isArray(value)) return value.length === 0 ? wanted === "" || wanted === "none" : value.some((item) => fits(item, sign, wanted));
  if (value !== null && typeof value === "object") return Object.values(value).some((item) => fits(item, sign, wanted));
  const number = Number(wanted);
  const comparable = wanted !== "" && !Number.isNaN(number) && typeof value === "number";
  if (sign === "=") {
    if (comparable) return value === number;
    const text = (value === null || value === undefined ? "none" : typeof value === "boolean" ? String(value) : setting(value)).toLowerCase();
    if (!wanted.includes("*")) return text === wanted;
    const parts = wanted.split("*").map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
    return new RegExp(`^${parts.join(".*")}$`, "s").test(text);
  }
  if (!comparable) return false;
  return sign === ">" ? value > number : sign === ">=" ? value >= number : sign === "<" ? value < number : value <= number;
}

export function matches(run: RunRow, terms: Term[], tags: string[]): boolean {
  const all = [run.name, run.id, run.status, run.model, run.algorithm, run.project, ...run.environments, ...tags].join(" ").toLowerCase();
  const has = (word: string) => (/^-./.test(word) ? !all.includes(word.slice(1)) : all.includes(word));
  return terms.every((term) => (term.field === null ? has(term.value) : fits(valueOf(run, term.field, tags), term.sign, term.value)));
}

/** Returns the filter with a condition added, or without it if it was there. */
export const toggleTerm = (text: string, term: string): string => toggled(partsOf(text), term).join(" ");

/** Returns the filter with another name for a field. */
export const renameField = (text: string, field: string, name: string): string =>
  partsOf(text).map((part) => (CONDITION.exec(part)?.[1] === field ? name + part.slice(field.length) : part)).join(" ");

/** Returns the fields of a filter that no run has, each with the most similar known name, or null if none is similar. */
export function unknownFields(terms: Term[], fields: string[]): { field: string; meant: string | null }[] {
  const known = new Set(fields);
  const names = ["tag", ...Object.keys(OWN), ...fields.map((name) => name.replace(/^(config\.|last\.(?=.*\/))/, ""))];
  const missing = new Set(terms.flatMap(({ field }) => (field !== null && fieldName(field) !== null && !known.has(fieldName(field)!) ? [field] : [])));
  return [...missing].map((field) => {
    const same = ["last.", "eval."].map((prefix) => prefix + field).find((name) => known.has(name));
    if (same) return { field, meant: same };
    const [meant] = names.map((name) => ({ name, far: distance(field, name) })).sort((a, b) => a.far - b.far);
    return { field, meant: meant && meant.far <= Math.max(2, field.length / 3) ? meant.name : null };
  });
}

/** Returns the Levenshtein distance of two texts. */
function distance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, i) => i);
  for (let i = 0; i < a.length; i += 1) {
    const next = [i + 1];
    for (let j = 0; j < b.length; j += 1) next.push(Math.min(next[j]! + 1, row[j + 1]! + 1, row[j]! + (a[i] === b[j] ? 0 : 1)));
    row = next;
  }
  return row[b.length]!;
}
