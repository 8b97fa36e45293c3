import { expect, test } from "vitest";
import { availableViews, ratio, shade, tokenParts, tokensOf, visibleToken, type Token } from "./tokens";

const turn = { turn: 0, role: "assistant", text: "ab", token_ids: [5, 6], tokens: ["a", "b"], logprobs: [-0.01, -1.6], versions: [3, 4] };

test("a turn without kept tokens has none", () => {
  expect(tokensOf({ turn: 0, role: "user", text: "hi" })).toEqual([]);
});

test("only views with numbers are offered", () => {
  expect(availableViews(tokensOf(turn))).toEqual(["surprise", "version"]);
});

test("likely tokens have no color, and surprise grows to full", () => {
  const [likely, rare] = tokensOf(turn) as [Token, Token];
  expect(shade(likely, "surprise", 4).color).toBeNull();
  expect(shade(rare, "surprise", 4)).toEqual({ color: "neg", strength: 1 });
});

test("the ratio compares the trainer with the engine", () => {
  const [token] = tokensOf({ ...turn, logprobs: [-2], trainer_logprobs: [-1], tokens: ["a"], token_ids: [5] }) as [Token];
  expect(ratio(token)).toBeCloseTo(Math.E);
  expect(shade(token, "ratio", 4).color).toBe("pos");
});

test("older versions are colored", () => {
  const [old, newest] = tokensOf(turn) as [Token, Token];
  expect(shade(old, "version", 4).color).toBe("heat");
  expect(shade(newest, "version", 4).color).toBeNull();
});

test("a token without text shows its id, and blanks are visible", () => {
  expect(tokensOf({ turn: 0, role: "assistant", text: "", token_ids: [7] })[0]?.text).toBe("#7");
  expect(visibleToken(" a\n")).toBe("␣a↵");
});

test("the tokens of a reply stand in its parts, and the end of the turn in the last", () => {
  const tokens = tokensOf({ turn: 0, role: "assistant", text: "", tokens: ["<think>", "hm", "</think>", "\n", "4", "<tool_call>{}</tool_call>", "<|im_end|>"] });
  const texts = (most: number) => tokenParts(tokens, most).map((part) => [part.from, part.tokens.map((token) => token.text).join("")]);
  expect(texts(3)).toEqual([[0, "<think>hm</think>"], [3, "\n4"], [5, "<tool_call>{}</tool_call><|im_end|>"]]);
  expect(texts(1)).toEqual([[0, tokens.map((token) => token.text).join("")]]);
});
