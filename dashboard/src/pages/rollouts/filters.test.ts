import { expect, test } from "vitest";
import { address } from "../../api";
import { formatList, parseList } from "../../state/url";
import { formatRange, noFilters, numChosen, parseRange, problemOf, queryOf, rangeWords } from "./filters";

test("a list survives the address, with commas and percent signs in its parts", () => {
  const parts = ["level=a,b", "share=50 %"];
  expect(parseList(formatList(parts))).toEqual(parts);
  expect(parseList("level=1,%E0%A4%A")).toEqual(["level=1", "%E0%A4%A"]);
  expect(parseList(undefined)).toEqual([]);
});

test("a range survives its text, also of a metric with dots and equal signs", () => {
  const range = { name: "a=b..c", low: "-1.5", high: "" };
  expect(parseRange(formatRange(range))).toEqual(range);
  expect(parseRange("reward")).toBeNull();
});

test("a range that cannot be used says why", () => {
  const problem = (low: string, high: string) => problemOf({ name: "reward", low, high });
  expect(problem("0", "1")).toBeNull();
  expect(problem(" ", "1e-3")).toBeNull();
  expect(problem("", "")).toContain("one end");
  expect(problem("x", "")).toContain("“x”");
  expect(problem("2", "1")).toContain("larger");
});

test("a range is described in words", () => {
  expect(rangeWords({ name: "advantage", low: "-1", high: "0" })).toBe("advantage −1 to 0");
  expect(rangeWords({ name: "completion_tokens", low: "800", high: "" })).toBe("answer tokens from 800");
  expect(rangeWords({ name: "steps", low: "", high: "3" })).toBe("steps to 3");
});

test("the address becomes the parameters of the API, tags and ranges one by one", () => {
  const params = { status: "kept", tags: formatList(["level=1", "level=2"]), ranges: formatList(["reward=0..1"]), view: "text" };
  expect(address("/samples", queryOf(params, { from: 3, to: 9 }))).toBe(
    "/samples?status=kept&tag=level%3D1&tag=level%3D2&range=reward%3D0..1&sort=step&step_min=3&step_max=9",
  );
});

test("every value that filters counts, and all filters end together", () => {
  expect(numChosen({ status: "kept,eval", tags: formatList(["level=1,2"]), ranges: "reward%3D0..1", search: "x", sort: "-reward", step: "3" })).toBe(4);
  expect(Object.keys(noFilters())).toEqual(expect.arrayContaining(["search", "status", "tags", "ranges", "eval_name"]));
  expect(Object.keys(noFilters())).not.toContain("step");
});
