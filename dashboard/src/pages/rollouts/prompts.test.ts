import { expect, test } from "vitest";
import type { Prompt, SampleRow } from "../../types";
import { groupsOf, markOf, verdict } from "./prompts";
import { fillingBy, squareValue } from "./squares";

const row = (step: number, group: number, reward: number | null, more: Partial<SampleRow> = {}) =>
  ({ attempt: 1, step, group_id: group, sample_id: `${group}-${reward}`, eval_name: null, environment: "e", status: "kept", reason: null, reward, advantage: null, completion_tokens: 5, metrics: {}, ...more }) as SampleRow;

test("the answers of a prompt stand by step and group, those of an eval in one", () => {
  const rows = [row(9, 4, 1), row(2, 1, 0, { status: "masked", reason: "model" }), row(2, 1, 1), row(-1, -8, 0, { eval_name: "held" }), row(-1, -9, 1, { eval_name: "held" })];
  const groups = groupsOf(rows);
  expect(groups.map((one) => [one.step, one.eval, one.samples.length, one.reward_mean])).toEqual([[-1, "held", 2, 0.5], [2, null, 2, 0.5], [9, null, 1, 1]]);
  expect(groups[1]).toMatchObject({ status: "kept", reason: null });
});

test("a prompt says how often it was solved, and since when", () => {
  const prompt = (counts: number[], rights: number[], first: number | null) => {
    const [n, right] = [counts, rights].map((all) => all.reduce((a, b) => a + b, 0)) as [number, number];
    return { n, num_right: right, pass_rate: right / n, first_right: first, steps: counts.map((_, i) => 3 * i), counts, rights } as Prompt;
  };
  expect(verdict(prompt([4, 4], [0, 0], null))).toBe("Never solved in 8 answers at 2 steps.");
  expect(verdict(prompt([4], [4], 0))).toBe("Always solved in 4 answers at 1 step.");
  expect(verdict(prompt([4, 4], [0, 2], 3)).replace(/\s/g, " ")).toBe("25 % of 8 answers at 2 steps are right, the first at step 3.");
  expect([[0, 4], [4, 4], [1, 4]].map(([num_right, n]) => markOf({ n: n!, num_right: num_right! }))).toEqual(["never solved", "always solved", ""]);
});

test("squares are filled by any number, between the ends of what is shown", () => {
  const answers: Parameters<typeof squareValue>[0][] = [{ reward: 0, advantage: -1, length: 4, metrics: { tools: 2 } }, { reward: 1, advantage: null, completion_tokens: 20, metrics: {} }];
  const rewards = () => ({ low: 0, high: 1 });
  expect(fillingBy("reward", rewards, answers).scaleOf("e")).toEqual({ low: 0, high: 1 });
  expect(fillingBy("length", rewards, answers).scaleOf("e")).toEqual({ low: 4, high: 20 });
  expect(answers.map((answer) => squareValue(answer, "metric:tools"))).toEqual([2, null]);
  expect(fillingBy("metric:tools", rewards, []).scaleOf("e")).toEqual({ low: 0, high: 1 });
});
