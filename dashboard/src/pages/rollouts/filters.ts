/** Which samples the list of all steps shows: from the address to the parameters of the API. */

import type { Query } from "../../api";
import { parseList, type Range as StepRange } from "../../state/url";

/** Facets that the server filters by: the parameter of the address has its name. */
export const FACETS: [name: string, title: string][] = [
  ["status", "Status"],
  ["environment", "Environment"],
  ["reward", "Reward"],
  ["age", "Age"],
  ["stop_reason", "Stop"],
  ["eval_name", "Eval"],
];

/** Numbers of a sample that a range can limit, beside the metrics of its environment. */
export const NUMBERS: [name: string, title: string][] = [
  ["reward", "reward"],
  ["advantage", "advantage"],
  ["completion_tokens", "answer tokens"],
  ["prompt_tokens", "prompt tokens"],
  ["total_tokens", "all tokens"],
  ["num_turns", "turns"],
  ["age", "age"],
];

type Params = Record<string, string>;

/** Ends are numbers as they were typed; an empty one is open. */
export interface NumberRange {
  name: string;
  low: string;
  high: string;
}

export function parseRange(text: string): NumberRange | null {
  const match = /^(.+)=([^=]*)\.\.([^=]*)$/.exec(text);
  return match ? { name: match[1]!, low: match[2]!, high: match[3]! } : null;
}

export const formatRange = ({ name, low, high }: NumberRange): string => `${name}=${low.trim()}..${high.trim()}`;

/** Returns why a range cannot be used; null if it can. */
export function problemOf({ low, high }: NumberRange): string | null {
  if (!low.trim() && !high.trim()) return "Give one end at least.";
  const bad = [low, high].find((end) => end.trim() !== "" && !Number.isFinite(Number(end)));
  if (bad !== undefined) return `“${bad}” is not a number.`;
  return low.trim() && high.trim() && Number(low) > Number(high) ? "The first end is larger than the second." : null;
}

/** Returns a range in words: `advantage −1 to 0`, `answer tokens from 800`. */
export function rangeWords({ name, low, high }: NumberRange): string {
  const title = NUMBERS.find(([column]) => column === name)?.[1] ?? name;
  const minus = (text: string) => text.replace("-", "−");
  if (!high) return `${title} from ${minus(low)}`;
  return low ? `${title} ${minus(low)} to ${minus(high)}` : `${title} to ${minus(high)}`;
}

const OWN = [...FACETS.map(([name]) => name), "tags", "ranges", "search"];

/** Returns the parameters of the API for what the address chooses. */
export function queryOf(params: Params, steps: StepRange | null): Query {
  return {
    ...Object.fromEntries(FACETS.map(([name]) => [name, params[name] ?? ""])),
    search: params.search ?? "",
    tag: parseList(params.tags),
    range: parseList(params.ranges),
    sort: params.sort ?? "step",
    step_min: steps?.from ?? null,
    step_max: steps?.to ?? null,
  };
}

/** Returns the change of the address that ends all filters. */
export const noFilters = (): Record<string, null> => Object.fromEntries(OWN.map((name) => [name, null]));

/** Returns how many filters are on, beside the search. */
export const numChosen = (params: Params): number => OWN.filter((name) => name !== "search").reduce((sum, name) => sum + parseList(params[name]).length, 0);

/** Most samples in an export. */
export const MOST_EXPORTED = 100_000;
