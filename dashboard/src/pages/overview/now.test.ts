import { expect, test } from "vitest";
import { serversOf } from "./Now";

const servers = (...doing: string[]) => doing.map((text, i) => ({ name: `server ${i}`, doing: text }));

test("servers that all serve are counted", () => {
  expect(serversOf(servers("serving"))).toEqual({ text: "1 serving", bad: false });
  expect(serversOf(servers("serving", "ready", "serving evals"))).toEqual({ text: "all 3 serving", bad: false });
  expect(serversOf([])).toEqual({ text: "–", bad: false });
});

test("a server that takes weights serves as well", () => {
  expect(serversOf(servers("serving", "receiving weights"))).toEqual({ text: "1 of 2 receiving weights", bad: false });
});

test("a server that is down is named", () => {
  expect(serversOf(servers("serving", "down: no answer for 10 s"))).toEqual({ text: "1 of 2 serving, server 1: down: no answer for 10 s", bad: true });
  expect(serversOf(servers("starting vLLM: loading (3 s)"))).toMatchObject({ bad: false });
});
