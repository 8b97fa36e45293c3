import { expect, test } from "vitest";
import type { RunRow } from "../../types";
import { fieldName, fits, matches, parseFilter, renameField, toggleTerm, unknownFields } from "./filter";

const run = {
  id: "a~b", name: "grpo-s1", status: "finished", model: "models/Qwen3-4B", algorithm: "grpo", project: "math", environments: ["countdown", "wordle"],
  steps: 60, attempt: 1, reward_last: 0.42, heldout_before: 0.2, heldout_after: 0.5,
  fields: { "config.learning_rate": 2e-6, "config.share_gpus": true, "config.max_tokens": null, "last.entropy": 0.1 },
} as unknown as RunRow;
const found = (text: string, tags: string[] = []) => matches(run, parseFilter(text), tags);

test("words are looked for in names, model, environments and tags", () => {
  expect(found("grpo qwen3")).toBe(true);
  expect(found("grpo rloo")).toBe(false);
  expect(found("sweep", ["sweep"])).toBe(true);
  expect(found("grpo -rloo")).toBe(true);
  expect(found("-grpo")).toBe(false);
});

test("a comparison that is still being typed hides no run", () => {
  expect(["reward>", "reward>=", "reward>0.4"].map((text) => found(text))).toEqual([true, true, true]);
});

test("a condition compares numbers as numbers", () => {
  expect(found("learning_rate=2e-6")).toBe(true);
  expect(found("learning_rate=0.000002")).toBe(true);
  expect(found("reward>0.4 reward<=0.42")).toBe(true);
  expect(found("reward>0.42")).toBe(false);
  expect(found("entropy>0")).toBe(false);
  expect(found("last.entropy<0.2")).toBe(true);
});

test("a condition on a text ignores case, and a star stands for anything", () => {
  expect(found("model=models/qwen3-4b")).toBe(true);
  expect(found("model=qwen3-4b")).toBe(false);
  expect(found("model=*qwen*")).toBe(true);
  expect(found("name!=grpo-s1")).toBe(false);
});

test("a list fits when one of its items does", () => {
  expect(found("environment=wordle")).toBe(true);
  expect(found("tag=demo", ["sweep", "demo"])).toBe(true);
  expect(found("tag!=demo", ["sweep", "demo"])).toBe(false);
  expect(found("tag=none", [])).toBe(true);
});

test("a setting without a value is none, and a switch is true or false", () => {
  expect(found("max_tokens=none")).toBe(true);
  expect(found("share_gpus=true")).toBe(true);
  expect(found("nothing=1")).toBe(false);
});

test("a number is compared with a number only", () => {
  expect(fits("abc", ">", "1")).toBe(false);
  expect(fits(3, ">", "")).toBe(false);
  expect(fits([1, 5], ">", "4")).toBe(true);
  expect(fits({ name: "countdown", weight: 2 }, "=", "countdown")).toBe(true);
});

test("quotes keep spaces together", () => {
  expect(parseFilter('name="two words" "a=b" c')).toEqual([
    { field: "name", sign: "=", value: "two words" },
    { field: null, sign: "=", value: "a=b" },
    { field: null, sign: "=", value: "c" },
  ]);
});

test("a field is a setting, a metric if it has a slash, and else what it says", () => {
  expect(["tag", "learning_rate", "reward/total/mean", "eval.math500", "config.seed"].map(fieldName)).toEqual([
    null, "config.learning_rate", "last.reward/total/mean", "eval.math500", "config.seed",
  ]);
});

test("a condition is added and taken away", () => {
  expect(toggleTerm("grpo", "tag=a")).toBe("grpo tag=a");
  expect(toggleTerm("grpo tag=a", "tag=a")).toBe("grpo");
});

test("a field that no run has is named with the one that was meant", () => {
  const fields = ["config.learning_rate", "config.seed", "last.entropy", "last.reward/total/mean", "eval.math500"];
  const unknown = (text: string) => unknownFields(parseFilter(text), fields);
  expect(unknown("lerning_rate=1 seed=2 reward>0 tag=a words eval.math500>0.2 reward/total/mean>0")).toEqual([{ field: "lerning_rate", meant: "learning_rate" }]);
  expect(unknown("rewrad>0.5 eval.math50>0 entropy<1")).toEqual([
    { field: "rewrad", meant: "reward" },
    { field: "eval.math50", meant: "eval.math500" },
    { field: "entropy", meant: "last.entropy" },
  ]);
  expect(unknown("zzzzzzzzzz=1")).toEqual([{ field: "zzzzzzzzzz", meant: null }]);
});

test("a field is renamed where it is one", () => {
  expect(renameField("lr_sweep lr=1e-6 -lr", "lr", "learning_rate")).toBe("lr_sweep learning_rate=1e-6 -lr");
});

test("a field with the name of a part of every object is none of a run", () => {
  expect(fieldName("__proto__")).toBe("config.__proto__");
  expect(matches(run, parseFilter("constructor=1"), [])).toBe(false);
});
