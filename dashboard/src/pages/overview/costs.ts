/** Divides tokens and time into the segments of bars. */

import type { Costs } from "../../types";

export interface Part {
  name: string;
  value: number;
  color: string;
  /** Explains the name. */
  title: string;
}

const ORDER: [name: string, color: string, title: string][] = [
  ["kept", "--bw", "answers that were trained on"],
  ["discarded", "--neg", "answers of groups with equal rewards, or filtered"],
  ["stale", "--rw", "answers of groups that became too old"],
  ["cancelled", "--red", "answers that were stopped"],
  ["masked", "--opt", "answers that failed or were masked"],
  ["lost", "--env", "tokens of requests that failed and were repeated"],
  ["eval", "--pf", "answers of evals"],
  ["backward", "--bw", "backward pass"],
  ["forward", "--fw", "forward pass"],
  ["optimizer", "--opt", "gradient norm, clipping, optimizer"],
  ["weight sync", "--sync", "sending weights"],
  ["other", "--red", "the rest of the steps"],
  ["waits", "--q", "waiting for a batch"],
  ["idle", "--q", "without a request"],
  ["start", "--line2", "before the first request"],
  ["outside steps", "--line2", "start, evals before training, restarts"],
];

/** Returns the parts with a value, in a fixed order. */
export function partsOf(values: Record<string, number>): Part[] {
  const known = ORDER.flatMap(([name, color, title]) => ((values[name] ?? 0) > 0 ? [{ name, color, title, value: values[name]! }] : []));
  const others = Object.entries(values).filter(([name, value]) => value > 0 && !ORDER.some(([one]) => one === name));
  return [...known, ...others.map(([name, value]) => ({ name, value, color: "--ink3", title: name }))];
}

export interface Bar {
  title: string;
  unit: "tokens" | "hours";
  parts: Part[];
  total: number;
}

/** Returns the bars of a run: generated tokens, engine hours and trainer hours. */
export function barsOf(costs: Costs): Bar[] {
  const bar = (title: string, unit: Bar["unit"], values: Record<string, number>): Bar => {
    const parts = partsOf(values);
    return { title, unit, parts, total: parts.reduce((sum, part) => sum + part.value, 0) };
  };
  const hours = (values: Record<string, number>) => Object.fromEntries(Object.entries(values).map(([name, seconds]) => [name, seconds / 3600]));
  return [bar("Generated", "tokens", costs.tokens), bar("Engines", "hours", hours(costs.engines)), bar("Trainer", "hours", hours(costs.trainer))].filter((one) => one.total > 0);
}

/** Parses a price per hour; null if it is not a positive number. */
export function priceOf(text: string): number | null {
  const price = Number(text.trim().replace(",", "."));
  return text.trim() !== "" && Number.isFinite(price) && price > 0 ? price : null;
}
