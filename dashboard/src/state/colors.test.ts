import { expect, test } from "vitest";
import type { RunRow } from "../types";
import { colorsOf } from "./colors";

const run = (id: string, started_at: number) => ({ id, key: `key of ${id}`, started_at }) as unknown as RunRow;
const runs = [run("newest", 30), run("oldest", 10), run("middle", 20)];

test("a run keeps its color when others are added, whatever the order of the list", () => {
  expect([...colorsOf(runs, {})]).toEqual([["oldest", "--c1"], ["middle", "--c2"], ["newest", "--c3"]]);
  expect(colorsOf([run("later", 40), ...runs].reverse(), {}).get("middle")).toBe("--c2");
});

test("a chosen color goes before, and one that does not exist is none", () => {
  expect(colorsOf(runs, { "key of middle": "--c5", "key of oldest": "red" })).toEqual(new Map([["oldest", "--c1"], ["middle", "--c5"], ["newest", "--c3"]]));
});
