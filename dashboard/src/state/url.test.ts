import { expect, test } from "vitest";
import { elsewhere, format, MOST_RUNS, othersOf, parse, parseRange, parseStep } from "./url";

test("a place survives its address", () => {
  const place = { run: "demo 1/ä", page: "metrics", params: { range: "10-40", smooth: "0.6", search: "a&b=c" } };
  expect(parse(format(place))).toEqual(place);
});

test("an empty address is the page of runs", () => {
  expect(parse("")).toEqual({ run: null, page: "runs", params: {} });
  expect(parse("#/?search=x").params).toEqual({ search: "x" });
});

test("a run without a page is its overview", () => {
  expect(parse("#/run1").page).toBe("overview");
});

test("a broken escape does not break the page", () => {
  expect(parse("#/%E0%A4%A/metrics").page).toBe("metrics");
});

test("range, step and theme go along to another page, its own parameters do not", () => {
  const from = parse("#/a/metrics?range=1-2&theme=dark&step=3&smooth=0.9");
  expect(elsewhere(from, { page: "evals" }).params).toEqual({ range: "1-2", theme: "dark", step: "3" });
});

test("only the theme goes along to another run", () => {
  const from = parse("#/a/metrics?range=1-2&theme=dark&with=b");
  expect(elsewhere(from, { run: "c", page: "overview" }).params).toEqual({ theme: "dark" });
});

test("a range is read in either direction, and nonsense is none", () => {
  expect(parseRange("40-10")).toEqual({ from: 10, to: 40 });
  expect(parseRange("x")).toBeNull();
  expect(parseRange(undefined)).toBeNull();
});

test("a step is a number from 0 on, and nonsense is none", () => {
  expect(["0", "12", "", "-1", "1e3", "x", undefined].map(parseStep)).toEqual([0, 12, null, null, null, null, null]);
});

test("runs are drawn over another one once each, and no more than a view holds", () => {
  const many = Array.from({ length: 150 }, (_, i) => `r${i}`).join(",");
  expect(othersOf(parse(`#/a/metrics?with=b,a,b,lr%253D1%252C2`))).toEqual(["b", "lr=1,2"]);
  expect(othersOf(parse(`#/a/metrics?with=${many}`)).length).toBe(MOST_RUNS - 1);
});
