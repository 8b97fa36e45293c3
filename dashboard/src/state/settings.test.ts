import { expect, test } from "vitest";
import { comparedRows, settingRows } from "./settings";

const environments = [{ name: "countdown", weight: 1, kwargs: { max_number: 10, note: null } }, { name: "add_up", weight: 2, kwargs: {} }];

test("a nested setting has a row for each value that is set", () => {
  expect(settingRows("environments", environments)).toEqual([
    ["environments.0.name", "countdown"],
    ["environments.0.weight", 1],
    ["environments.0.kwargs.max_number", 10],
    ["environments.1.name", "add_up"],
    ["environments.1.weight", 2],
  ]);
});

test("plain values, lists of them and what is empty stay one row", () => {
  expect(settingRows("stop", ["a", "b"])).toEqual([["stop", ["a", "b"]]]);
  expect(settingRows("lora", null)).toEqual([["lora", null]]);
  expect(settingRows("kwargs", {})).toEqual([["kwargs", null]]);
});

test("differences name the values inside of a setting that differ", () => {
  const other = [{ ...environments[0]!, kwargs: { max_number: 20 } }];
  expect(comparedRows("environments", [environments.slice(0, 1), other])).toEqual([["environments.0.kwargs.max_number", [10, 20]]]);
  expect(comparedRows("evals", [[], [{ name: "math" }]])).toEqual([["evals.0.name", [undefined, "math"]]]);
  expect(comparedRows("lr", [1, 2])).toEqual([["lr", [1, 2]]]);
  expect(comparedRows("environments", [environments, environments], true).length).toBe(5);
});
