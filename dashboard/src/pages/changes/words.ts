/** Describes a comparison of steps in words. */

import { sum } from "d3-array";
import { number, signed } from "../../format";
import { visible } from "../../text/hostile";
import type { ChangedCell, Changes, Effect } from "../../types";
import { titleOf } from "../metrics/tree";

export interface Change {
  before: number;
  after: number;
}

/** Returns the means of a metric before and after: over the samples if it is decomposed, else over the steps. */
export function changeOf(found: Changes, metric: string): Change | null {
  if (found.decomposed === metric) {
    const mean = (n: "n_before" | "n_after", m: "mean_before" | "mean_after") => {
      const samples = sum(found.cells, (cell) => cell[n]);
      return samples > 0 ? sum(found.cells, (cell) => cell[n] * (cell[m] ?? 0)) / samples : null;
    };
    const [before, after] = [mean("n_before", "mean_before"), mean("n_after", "mean_after")];
    return before === null || after === null ? null : { before, after };
  }
  const own = found.effects.find((effect) => effect.name === metric);
  return own && own.before !== null && own.after !== null ? { before: own.before, after: own.after } : null;
}

/** Returns a sentence about the change. */
export function sentence(metric: string, change: Change | null, step: number): string {
  const { title, unit } = titleOf(metric);
  const name = visible(metric === "reward/all_groups/mean" ? "Reward of all groups" : `${title}${unit ? ` (${unit})` : ""}`);
  if (!change) return `${name} has no values on both sides of step ${step}.`;
  const by = change.after - change.before;
  if (by === 0) return `${name} stayed at ${number(change.after)} at step ${step}.`;
  return `${name} ${by > 0 ? "rose" : "fell"} from ${number(change.before)} to ${number(change.after)} (${signed(by)}) at step ${step}.`;
}

export const cellName = (cell: Pick<ChangedCell, "environment" | "cell">): string => visible([cell.environment, cell.cell].filter(Boolean).join(", ")) || "all";

/** Returns the name of a metric, or of the time that a kind of span takes. */
export function effectName({ name, kind }: Pick<Effect, "name" | "kind">): string {
  if (kind === "span") return visible(`seconds of ${name.replaceAll("_", " ").replace(" server ", ", server ")}`);
  const { title, unit } = titleOf(name);
  return visible(unit ? `${title} (${unit})` : title);
}
