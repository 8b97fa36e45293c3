/** A run in one HTML file (`telescope ui --export`): the answers that these pages would ask a server for. */

import type { Group } from "./types";

interface Embedded {
  run: string;
  name: string;
  /** Unix seconds. */
  written_at: number;
  /** By address, with the parameters in the order of their names. */
  answers: Record<string, unknown>;
  /** Groups of some steps, and whole samples by `attempt/sample_id`. */
  examples: { steps: { step: number; groups: Group[] }[]; samples: Record<string, unknown> };
  /** What the file has a part of, in words. */
  left_out: string[];
}

/** The run of this file; null in the pages of a server. */
export const embedded = ((globalThis as { telescopeExport?: Embedded }).telescopeExport ?? null) as Embedded | null;

/** Returns an address whose parameters are in the order of their names, and set. */
export function canonical(address: string): string {
  const [path = "", query = ""] = address.split("?");
  const pairs = [...new URLSearchParams(query)].filter(([, value]) => value !== "").sort(([a], [b]) => (a < b ? -1 : 1));
  const text = new URLSearchParams(pairs).toString();
  return text ? `${path}?${text}` : path;
}
