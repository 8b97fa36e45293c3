import { expect, test } from "vitest";
import { curveOf } from "../../state/run";
import type { EvalRow, EvalSample } from "../../types";
import { blockOf, isInRange, joinItems, pairedDifference, passCurve, recordedGain, slicesOf } from "./items";

const sample = (item: number, score: number | null, completion = 0, tags = {}): EvalSample => ({
  attempt: 1,
  sample_id: `${item}-${completion}`,
  item,
  completion,
  score,
  step: 0,
  stop_reason: "stop",
  completion_tokens: 1,
  golden: {},
  prompt: "",
  answer: "",
  tags,
});

const before = [sample(0, 1), sample(1, 0), sample(2, 1), sample(3, 0)];
const after = [sample(3, 0), sample(2, 1), sample(1, 1), sample(0, 0)];

test("an item is lost, gained, right twice or wrong twice", () => {
  expect(joinItems(before, after).map(blockOf)).toEqual(["lost", "gained", "right", "wrong"]);
});

test("items of one eval alone are left out", () => {
  expect(joinItems(before, [sample(7, 1), sample(1, 1)]).map((item) => item.item)).toEqual([1]);
});

test("the interval of a difference is paired over items", () => {
  const result = pairedDifference(joinItems(before, after))!;
  expect([result.before, result.after, result.gain, result.items]).toEqual([0.5, 0.5, 0, 4]);
  expect(result.high).toBeCloseTo(1.959964 * Math.sqrt(2 / 3 / 4));
  expect(result.low).toBeCloseTo(-result.high);
});

test("an answer that failed counts as wrong, and never as better than the worst", () => {
  expect(pairedDifference(joinItems([sample(0, null), sample(1, 1)], [sample(0, 1), sample(1, 1)]))).toMatchObject({ before: 0.5, after: 1, items: 2 });
  expect(joinItems([sample(0, null), sample(1, -2)], before).map((item) => item.before.score)).toEqual([-2, -2]);
  expect(passCurve([sample(0, 1, 0), sample(0, null, 1), sample(1, 1, 0), sample(1, 1, 1)])).toMatchObject({ k: [1, 2], one: [0.75, 1], all: [0.75, 0.5] });
});

test("pass@k and pass^k end at the answers that every item has", () => {
  const curve = passCurve([sample(0, 1, 0), sample(0, 0, 1), sample(1, 0, 0), sample(1, 0, 1), sample(1, 0, 2)]);
  expect(curve).toMatchObject({ k: [1, 2], one: [0.25, 0.5], all: [0.25, 0] });
  expect(passCurve([sample(0, 1, 0), sample(0, 1, 1), sample(1, 1, 0), sample(1, 0, 1)]).all).toEqual([0.75, 0.5]);
});

test("pass@k has the interval of a mean over items, between 0 and 1", () => {
  const answers = (items: number, right: number) => Array.from({ length: items }, (_, item) => sample(item, item < right ? 1 : 0));
  const { one, low, high } = passCurve(answers(20, 12));
  // The quantile of Student's t for 19 degrees of freedom, and the variance of 12 ones among 20.
  const half = 2.093 * Math.sqrt((0.6 * 0.4 * 20) / 19 / 20);
  expect([low[0], one[0], high[0]].map((value) => value!.toFixed(4))).toEqual([0.6 - half, 0.6, 0.6 + half].map((value) => value.toFixed(4)));
  expect([passCurve(answers(5, 3)), passCurve(answers(1, 1))].map((curve) => [curve.low, curve.high])).toEqual([[[0], [1]], [[null], [null]]]);
});

test("an eval in training stands before one made later, and failed ones are left out", () => {
  const row = (version: number, source: string, status = "finished") => ({ version, source, status, accuracy: 0.5, eval_id: `${source}${version}` }) as EvalRow;
  const curve = curveOf([row(4, "standalone"), row(4, "live"), row(0, "live"), row(2, "live", "failed"), row(4, "standalone")]);
  expect(curve.map((one) => one.eval_id)).toEqual(["live0", "live4"]);
});

test("the recorded gain is that to the first eval, and a range has the evals at its ends", () => {
  const row = (version: number, gain: number | null) => ({ version, gain, gain_low: gain, gain_high: gain }) as EvalRow;
  const [first, second, third] = [row(0, null), row(5, 0.1), row(10, 0.2)] as const;
  expect(recordedGain(first, third, first)).toEqual({ gain: 0.2, low: 0.2, high: 0.2 });
  expect([recordedGain(second, third, first), recordedGain(first, first, first)]).toEqual([null, null]);
  expect([first, second, third].map((one) => isInRange(one, { from: 1, to: 4 }))).toEqual([false, true, false]);
});

test("items are sliced by tags with few values", () => {
  const items = joinItems(
    Array.from({ length: 12 }, (_, i) => sample(i, 0, 0, { kind: i % 2 ? "b" : "a", id: String(i) })),
    Array.from({ length: 12 }, (_, i) => sample(i, 1)),
  );
  expect(slicesOf(items).map((slice) => [slice.name, slice.items.length])).toEqual([
    ["all", 12],
    ["kind a", 6],
    ["kind b", 6],
  ]);
});
