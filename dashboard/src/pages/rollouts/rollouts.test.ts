import { expect, test } from "vitest";
import { flightGroups } from "./InFlight";
import { firstTokenRows, timing } from "./Numbers";
import { answerAddress, chosen, moveAnswer, moveGroup, timeAddress } from "./select";
import { fate, gini, level, rewardScale, rewardScales } from "./squares";
import type { Environment, Group, Sample } from "../../types";

const group = (id: number, rewards: number[]): Group => ({
  attempt: 1, id, environment: "e", prompt: "", status: "kept", reason: null, step: 0, reward_mean: null, reward_std: null,
  samples: rewards.map((reward, i) => ({ id: `${id}-${i}`, reward, advantage: 0, status: "kept", length: 1, completion: "", metrics: {}, logprob_sum: null, ratio: null })),
});
const groups = [group(1, [0, 1]), group(2, []), group(3, [1, 1, 1])];

test("without a choice the first answer is chosen, and a choice that no group has stays none", () => {
  expect(chosen(groups, "")).toEqual({ group: 1, sample: "1-0" });
  expect(chosen(groups, "eval0-gsm8k-v0-1-0")).toBeNull();
  expect(moveGroup(groups, "eval0-gsm8k-v0-1-0", 1)).toBe("1-0");
  expect(chosen([], "")).toBeNull();
});

test("an answer's address names its attempt and list, and drops a range that would hide it", () => {
  const place = { run: "r", page: "evals", params: { range: "5-9", step: "7", item: "3" } };
  expect(answerAddress(place, { attempt: 2, sample_id: "e-1", step: -1, eval_name: "gsm8k" })).toBe("#/r/rollouts?attempt=2&sample=e-1&list=answers&status=eval&eval_name=gsm8k");
  expect(answerAddress(place, { attempt: 1, sample_id: "4-0", step: 3, eval_name: null })).toBe("#/r/rollouts?step=3&attempt=1&sample=4-0");
});

test("the time of an answer is that of its request, not of its step", () => {
  const place = { run: "r", page: "rollouts", params: {} };
  const named = { attempt: 1, sample_id: "4-0", step: 3, eval_name: null };
  expect(timeAddress(place, named, 110, 120, 100)).toBe("#/r/timeline?step=3&attempt=1&sample=4-0&t=4.0000-26.0000");
});

test("j and k keep the place in the group and skip empty groups", () => {
  expect(moveGroup(groups, "1-1", 1)).toBe("3-1");
  expect(moveGroup(groups, "3-2", -1)).toBe("1-1");
  expect(moveGroup(groups, "3-0", 1)).toBe("3-0");
});

test("h and l stay in the group", () => {
  expect([moveAnswer(groups, "1-0", -1), moveAnswer(groups, "1-0", 1), moveAnswer(groups, "1-1", 1)]).toEqual(["1-0", "1-1", "1-1"]);
});

test("only the lowest reward is hollow and only the highest is full", () => {
  const scale = rewardScale(undefined, [0, 1]);
  expect([0, 0.01, 0.5, 0.99, 1].map((reward) => level(reward, scale))).toEqual([0, 1, 2, 3, 4]);
  expect(level(null, scale)).toBeNull();
});

test("a scale without a declared range is that of the rewards seen, and 0 to 1 for shares", () => {
  const seen = (...rewards: number[]) => {
    const { low, high } = rewardScale(undefined, rewards);
    return [low, high];
  };
  expect([seen(50, 60), seen(-1, 2), seen(0.2, 0.4), seen(2, 2), seen(-1), seen()]).toEqual([[50, 60], [-1, 2], [0, 1], [0, 2], [-1, 1], [0, 1]]);
});

test("each environment has its own scale, and that of its eval is another one", () => {
  const environment = (name: string, purpose: string, reward_max: number | null) => ({ name, purpose, reward_min: 0, reward_max }) as Environment;
  const environments = [environment("a", "training", 4), environment("a", "eval", 1), environment("b", "training", null), environment("c", "eval", 3)];
  const scaleOf = rewardScales(environments, [{ environment: "a", reward: 100 }, { environment: "b", reward: 2 }, { environment: "b", reward: 1 }]);
  expect(["a", "b", "c"].map((name) => scaleOf(name).high)).toEqual([4, 2, 3]);
});

test("the Gini coefficient follows the documented formula", () => {
  expect(gini([1, 1, 1, 1])).toBe(0);
  expect(gini([0, 0, 0, 1])).toBeCloseTo(0.75);
  expect(gini([-1, 0])).toBeCloseTo(0.5);
});

test("a discarded group says why in words", () => {
  const scale = { low: 0, high: 1 };
  expect(fate({ status: "discarded", reason: "zero_advantage", reward_mean: 1 }, scale)).toBe("all right");
  expect(fate({ status: "discarded", reason: "max_async", reward_mean: 1 }, scale)).toBe("too old");
  expect(fate({ status: "cancelled", reason: "run_ended", reward_mean: null }, scale)).toBe("run ended");
});

test("a group of equal rewards is neither right nor wrong on a scale that is a guess", () => {
  const group = (reward_mean: number) => ({ status: "discarded", reason: "zero_advantage", reward_mean });
  const guessed = rewardScale(undefined, [1.1, 2.1]);
  expect([fate(group(1.1), guessed), fate(group(2.1), guessed)]).toEqual(["all equal", "all equal"]);
  const declared = rewardScale({ reward_min: 0, reward_max: 2.1 } as Environment, [1.1, 2.1]);
  expect([fate(group(0), declared), fate(group(2.1), declared)]).toEqual(["all wrong", "all right"]);
  const half = rewardScale({ reward_min: 0, reward_max: null } as Environment, [0, 2.1]);
  expect([fate(group(0), half), fate(group(2.1), half)]).toEqual(["all wrong", "all equal"]);
});

test("samples in flight stand with their group, the longest first", () => {
  const row = (group: number, index: number, started: number) => ({
    attempt: 1, sample_id: `${group}-${index}`, group_id: group, sample_index: index, environment: "e", start_version: 3, prompt_tokens: 9, server: null, lane: null, started_at: started,
  });
  expect(flightGroups([row(7, 0, 10), row(8, 1, 11), row(7, 2, 12)])).toEqual([
    { attempt: 1, id: 7, environment: "e", running: [0, 2], startedAt: 10, version: 3 },
    { attempt: 1, id: 8, environment: "e", running: [1], startedAt: 11, version: 3 },
  ]);
});

test("the parts of a sample's time add up to it, with tools apart from their environment", () => {
  const span = (name: string, start: number, end: number, first: number | null = null) => ({ name, start, end, first_token_seconds: first });
  const spans = [span("queue", 0, 1), span("prefill", 1, 2, 1.5), span("decode", 2, 4), span("environment", 4, 7), span("tool", 4, 6), span("prefill", 7, 8, 0.5), span("decode", 8, 9)];
  const detail = { started_at: 0, generated_at: 10, finished_at: 12, spans } as unknown as Sample;
  const { intervals, whole } = timing(detail)!;
  expect(intervals.map((one) => [one.name, one.seconds])).toEqual([["queue", 1], ["prefill", 2], ["decode", 3], ["tools", 2], ["environment", 1], ["outside the engine", 1], ["reward", 2]]);
  expect(intervals.reduce((sum, one) => sum + one.seconds, 0)).toBe(whole);
  expect(firstTokenRows(detail)).toEqual([["first token, turn 1", "1.500 s"]]);
});
