/** Items that two evals share: blocks, paired difference, pass@k, slices. */

import { group, mean, sum, variance } from "d3-array";
import { meanOf, passAtK } from "../../charts/math";
import type { Range } from "../../state/url";
import type { EvalRow, EvalSample, Value } from "../../types";

/** An item with the answers of one eval; `score` is the mean over them, in which those that failed count as wrong. */
export interface Answered {
  score: number;
  answers: EvalSample[];
}

export interface Item {
  item: number;
  prompt: string;
  before: Answered;
  after: Answered;
  tags: Record<string, string>;
}

export type Block = "lost" | "gained" | "right" | "wrong";
const BLOCKS: Block[] = ["lost", "gained", "right", "wrong"];

/** An item counts as right when at least half of its answers are. */
export const isRight = (answered: Answered): boolean => answered.score >= 0.5;

export function blockOf(item: Item): Block {
  const [before, after] = [isRight(item.before), isRight(item.after)];
  if (before) return after ? "right" : "lost";
  return after ? "gained" : "wrong";
}

/** Returns the items of each block. */
export const blocksOf = (items: Item[]): { block: Block; items: Item[] }[] => BLOCKS.map((block) => ({ block, items: items.filter((item) => blockOf(item) === block) }));

function answered(samples: EvalSample[], worst: number): Answered {
  const answers = [...samples].sort((a, b) => a.completion - b.completion);
  return { score: sum(answers, (answer) => answer.score ?? worst) / answers.length, answers };
}

/** The score of an answer that failed, as in the accuracy: 0, or the lowest of the eval if that is below 0. */
const worstOf = (samples: EvalSample[]): number => samples.reduce((worst, { score }) => Math.min(worst, score ?? 0), 0);

const byItem = (samples: EvalSample[]): Map<number, EvalSample[]> => group(samples, (sample) => sample.item);

/** Returns the items that both evals have, in their order. */
export function joinItems(before: EvalSample[], after: EvalSample[]): Item[] {
  const [first, second] = [byItem(before), byItem(after)];
  const [worstBefore, worstAfter] = [worstOf(before), worstOf(after)];
  return [...first.keys()]
    .filter((item) => second.has(item))
    .sort((a, b) => a - b)
    .map((item) => {
      const sample = first.get(item)![0]!;
      return { item, prompt: sample.prompt, tags: sample.tags ?? {}, before: answered(first.get(item)!, worstBefore), after: answered(second.get(item)!, worstAfter) };
    });
}

export interface Difference {
  before: number;
  after: number;
  gain: number;
  low: number;
  high: number;
  items: number;
}

/** Returns the gain that the run recorded of an eval, a bootstrap over items: that to `first`, the first one. Null for another pair. */
export function recordedGain(before: EvalRow, after: EvalRow, first: EvalRow | undefined): Pick<Difference, "gain" | "low" | "high"> | null {
  const { gain, gain_low: low, gain_high: high } = after;
  return before === first && gain !== null && low !== null && high !== null ? { gain, low, high } : null;
}

/** Returns the mean difference over items, with its 95 % interval (normal, paired over items). */
export function pairedDifference(items: Item[]): Difference | null {
  const n = items.length;
  if (n === 0) return null;
  const gains = items.map((item) => item.after.score - item.before.score);
  const gain = mean(gains)!;
  const half = 1.959964 * Math.sqrt((variance(gains) ?? 0) / n);
  return {
    before: mean(items, (item) => item.before.score)!,
    after: mean(items, (item) => item.after.score)!,
    gain,
    low: gain - half,
    high: gain + half,
    items: n,
  };
}

interface PassCurve {
  k: number[];
  /** pass@k: the chance that one of k answers of an item is right. */
  one: number[];
  /** Ends of the 95 % interval of pass@k (Student's t over items); null for one item. */
  low: Value[];
  high: Value[];
  /** pass^k: the chance that all k are. */
  all: number[];
}

/** Returns pass@k and pass^k for k = 1, 2, 4, ... up to the answers that every item has; an answer passes with a full score, and one that failed does not. */
export function passCurve(samples: EvalSample[]): PassCurve {
  const items = [...byItem(samples).values()];
  const most = items.length ? Math.min(...items.map((answers) => answers.length)) : 0;
  const k: number[] = [];
  for (let next = 1; next <= most; next *= 2) k.push(next);
  const counts = items.map((answers) => ({ n: answers.length, right: answers.filter((answer) => (answer.score ?? 0) >= 1).length }));
  const meanOverItems = (of: (n: number, right: number) => number) => meanOf(counts.map(({ n, right }) => of(n, right)))!;
  const one = k.map((tries) => meanOverItems((n, right) => passAtK(n, right, tries)));
  return {
    k,
    one: one.map(({ mean }) => mean),
    low: one.map(({ mean, half }) => (half === null ? null : Math.max(mean - half, 0))),
    high: one.map(({ mean, half }) => (half === null ? null : Math.min(mean + half, 1))),
    // All are right unless one of k is wrong.
    all: k.map((tries) => 1 - meanOverItems((n, right) => passAtK(n, n - right, tries)).mean),
  };
}

/** Returns whether an eval of a version lies in a range of the ruler: after its first step, and up to the end of its last. */
export const isInRange = (row: EvalRow, range: Range | null): boolean => !range || (row.version >= range.from && row.version <= range.to + 1);

interface Slice {
  name: string;
  items: Item[];
}

const LEAST_ITEMS = 5;
const MOST_VALUES = 8;

/** Returns all items, then those of each value of their tags. */
export function slicesOf(items: Item[]): Slice[] {
  const out: Slice[] = [{ name: "all", items }];
  const names = [...new Set(items.flatMap((item) => Object.keys(item.tags)))].sort();
  for (const name of names) {
    const values = [...new Set(items.map((item) => item.tags[name]))].filter((value): value is string => value !== undefined);
    if (values.length < 2 || values.length > MOST_VALUES) continue;
    for (const value of values.sort((a, b) => a.localeCompare(b, undefined, { numeric: true }))) {
      const some = items.filter((item) => item.tags[name] === value);
      if (some.length >= LEAST_ITEMS) out.push({ name: `${name} ${value}`, items: some });
    }
  }
  return out;
}
