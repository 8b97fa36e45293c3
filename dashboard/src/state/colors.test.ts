import { expect, test } from "vitest";
import type { RunRow } from "../types";
import { colorsOf } from "./colors";

const run = (id: string, started_at: number) => ({ id, key: `key of ${id}`, started_at }) as unknown as RunRow;
const runs = [run("newest", 30), run("oldest", 10), run("middle", 20)];

test("runs get different colors in the order of their starts, whatever the order of the list", () => {
  const first = [["oldest", "--c1"], ["middle", "--c2"], ["newest", "--c3"]];
  expect([...colorsOf(runs, {})]).toEqual(first);
  expect([...colorsOf([...runs].reverse(), {})]).toEqual(first);
});

test("a run that was given a color keeps it when others come or go, also earlier ones", () => {
  const kept = Object.fromEntries(runs.map((one) => [one.key, colorsOf(runs, {}).get(one.id)]));
  const more = colorsOf([run("before all", 1), ...runs.slice(0, 2), run("later", 40)], kept);
  expect(["oldest", "newest"].map((id) => more.get(id))).toEqual(["--c1", "--c3"]);
  expect(new Set(more.values()).size).toBe(4);
  // Alone, as in a file of one run.
  expect(colorsOf([run("newest", 30)], kept).get("newest")).toBe("--c3");
});

test("a chosen color goes before, and one that does not exist is none", () => {
  expect(colorsOf(runs, { "key of middle": "--c5", "key of oldest": "red" })).toEqual(new Map([["middle", "--c5"], ["oldest", "--c1"], ["newest", "--c2"]]));
});
