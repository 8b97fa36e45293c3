import { expect, test } from "vitest";
import { conversation, parsePrompt, promptLine, replyParts, splitAnswer } from "./conversation";

const CHATML = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n5 7 9 -> 7<|im_end|>\n<|im_start|>assistant\n";

const sample = (more: Partial<Parameters<typeof conversation>[0]>) => ({ prompt_text: null, completion_text: null, turns: [], tool_calls: [], info: [], ...more });
const call = (turn: number, number: number, result: string | null, error: string | null = null) => ({ attempt: 1, sample_id: "1-0", turn, call: number, name: "add", arguments: '{"a": 1}', result, error, seconds: 0.5 });
const note = (turn: number, key: string) => ({ attempt: 1, sample_id: "1-0", number: turn, turn, key, value: "x", type: null });
const CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>';

test("a ChatML prompt is split into messages without its template", () => {
  expect(parsePrompt(CHATML)).toEqual([
    { role: "system", text: "Be brief." },
    { role: "user", text: "5 7 9 -> 7" },
  ]);
});

test("Llama and Gemma templates are known", () => {
  const llama = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n";
  expect(parsePrompt(llama)).toEqual([{ role: "user", text: "Hi" }]);
  expect(parsePrompt("<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n")).toEqual([{ role: "user", text: "Hi" }]);
});

test("a prompt of an unknown template is one message", () => {
  expect(parsePrompt("Once upon")).toEqual([{ role: "prompt", text: "Once upon" }]);
});

test("thinking, tool calls and the answer are apart and in order", () => {
  const text = '<think>\nhm\n</think>\n\nLet me see.\n<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>';
  expect(splitAnswer(text)).toEqual([
    { role: "thinking", text: "hm" },
    { role: "assistant", text: "Let me see." },
    { role: "tool call", name: "python", text: "print(1)" },
  ]);
});

test("thinking that the prompt opened and thinking that was cut off are thinking", () => {
  expect(splitAnswer("so 4\n</think>\n4")).toEqual([
    { role: "thinking", text: "so 4" },
    { role: "assistant", text: "4" },
  ]);
  expect(splitAnswer("<think>cut")).toEqual([{ role: "thinking", text: "cut" }]);
});

test("a tool call that is not JSON is shown as written", () => {
  expect(splitAnswer("<tool_call>oops</tool_call>")).toEqual([{ role: "tool call", text: "oops" }]);
});

test("turns follow the prompt, and a turn that repeats it is shown once", () => {
  const turns = [
    { turn: 0, role: "user", text: "5 7 9 -> 7" },
    { turn: 1, role: "assistant", text: "7" },
    { turn: 2, role: "environment", text: "wrong" },
  ];
  expect(conversation(sample({ prompt_text: CHATML, turns })).map((m) => [m.role, m.turn])).toEqual([
    ["system", undefined],
    ["user", undefined],
    ["assistant", 1],
    ["environment", 2],
  ]);
});

test("a turn without a text hides no other turn", () => {
  const turns = [
    { turn: 0, role: "assistant", text: null as unknown as string },
    { turn: 1, role: "environment", text: null as unknown as string },
    { turn: 2, role: "assistant", text: "7" },
  ];
  expect(conversation(sample({ turns })).at(-1)).toMatchObject({ role: "assistant", text: "7", turn: 2 });
});

test("a prompt is listed by its last user message", () => {
  expect(promptLine(CHATML)).toBe("5 7 9 -> 7");
});

test("the parts of a reply are all of it", () => {
  const text = "\n<think>\n\n</think>\nSum: <tool_call>{}</tool_call>\n<|im_end|>";
  const parts = replyParts(text);
  expect(parts.map((part) => text.slice(part.from, part.to)).join("")).toBe(text);
  expect(parts.map((part) => part.role)).toEqual(["assistant", "tool call", "assistant"]);
});

test("a call, its record and its result are one message", () => {
  const turns = [
    { turn: 0, role: "assistant", text: `first ${CALL}${CALL}` },
    { turn: 1, role: "tool", text: "2" },
    { turn: 2, role: "tool", text: "Error: no" },
    { turn: 3, role: "assistant", text: "Both are 2." },
  ];
  const tool_calls = [call(0, 0, "2"), call(0, 1, "Error: no", "no")];
  const found = conversation(sample({ turns, tool_calls }));
  expect(found.map((one) => [one.role, one.call?.call, one.replied])).toEqual([
    ["assistant", undefined, undefined],
    ["tool call", 0, 1],
    ["tool call", 1, 2],
    ["assistant", undefined, undefined],
  ]);
});

test("results in one message of the user answer all calls of a reply", () => {
  const turns = [{ turn: 0, role: "assistant", text: CALL + CALL }, { turn: 1, role: "user", text: "Tool 1: [add] 2\nTool 2: [add] 3" }];
  const found = conversation(sample({ turns, tool_calls: [call(0, 0, "[add] 2"), call(0, 1, "[add] 3")] }));
  expect(found.map((one) => one.replied)).toEqual([1, 1]);
});

test("a call that the reply does not show follows it, and another reply of the environment stays", () => {
  const turns = [{ turn: 0, role: "assistant", text: "<call>1+1</call>" }, { turn: 1, role: "tool", text: "something else" }];
  const found = conversation(sample({ turns, tool_calls: [call(0, 0, "2")] }));
  expect(found.map((one) => [one.role, one.text])).toEqual([
    ["assistant", "<call>1+1</call>"],
    ["tool call", '{ "a": 1 }'],
    ["tool", "something else"],
  ]);
});

test("notes stand with the answer that they belong to, all others at the end", () => {
  const turns = [{ turn: 0, role: "user", text: "go" }, { turn: 1, role: "assistant", text: "a" }, { turn: 2, role: "user", text: "on" }, { turn: 3, role: "assistant", text: "b" }];
  const found = conversation(sample({ turns, info: [note(0, "guess"), note(1, "guess"), note(9, "late")] }));
  expect(found.map((one) => one.notes?.map((each) => each.turn))).toEqual([undefined, [0], undefined, [1, 9]]);
  expect(conversation(sample({ completion_text: "a", info: [note(0, "guess")] }))[0]!.notes).toHaveLength(1);
});
