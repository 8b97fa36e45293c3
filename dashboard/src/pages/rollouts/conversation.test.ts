import { expect, test } from "vitest";
import { completion, conversation, promptParts, replyParts, sections, splitAnswer } from "./conversation";

const PROMPT = [
  { role: "system", content: "Be brief." },
  { role: "user", content: "5 7 9 -> 7" },
];
const sample = (more: Partial<Parameters<typeof conversation>[0]>) => ({ messages: [], turns: [], tool_calls: [], info: [], ...more });
const call = (turn: number, number: number, result: string | null, reply: number | null, error: string | null = null) => ({ attempt: 1, sample_id: "1-0", turn, call: number, name: "add", arguments: '{"a": 1}', result, error, seconds: 0.5, reply, sandbox: null });
const note = (turn: number, key: string) => ({ attempt: 1, sample_id: "1-0", number: turn, turn, key, value: "x", type: null });
const CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>';

test("a prompt is its messages, and an example answer its parts", () => {
  const call = { role: "assistant", content: null, tool_calls: [{ name: "add" }] };
  expect(promptParts([...PROMPT, { role: "assistant", content: "<think>hm</think>\n7" }, call, { role: "critic", content: "no" }])).toEqual([
    { role: "system", text: "Be brief." },
    { role: "user", text: "5 7 9 -> 7" },
    { role: "thinking", text: "hm" },
    { role: "assistant", text: "7" },
    { role: "assistant", text: '[{"name":"add"}]' },
    { role: "environment", text: "no" },
  ]);
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

test("turns follow the prompt", () => {
  const turns = [
    { turn: 0, role: "assistant", text: "7" },
    { turn: 1, role: "environment", text: "wrong" },
  ];
  expect(conversation(sample({ messages: PROMPT, turns })).map((m) => [m.role, m.turn])).toEqual([
    ["system", undefined],
    ["user", undefined],
    ["assistant", 0],
    ["environment", 1],
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
  const tool_calls = [call(0, 0, "2", 1), call(0, 1, "Error: no", 2, "no")];
  const found = conversation(sample({ turns, tool_calls }));
  expect(found.map((one) => [one.role, one.call?.call, one.call?.reply])).toEqual([
    ["assistant", undefined, undefined],
    ["tool call", 0, 1],
    ["tool call", 1, 2],
    ["assistant", undefined, undefined],
  ]);
});

test("results in one message of the user stand under their calls alone", () => {
  const turns = [{ turn: 0, role: "assistant", text: CALL + CALL }, { turn: 1, role: "user", text: "Tool 1: [add] 2\nTool 2: [add] 3" }];
  const found = conversation(sample({ turns, tool_calls: [call(0, 0, "[add] 2", 1), call(0, 1, "[add] 3", 1)] }));
  expect(found.map((one) => one.role)).toEqual(["tool call", "tool call"]);
});

test("a call that the reply does not show follows it, and another reply of the environment stays", () => {
  const turns = [{ turn: 0, role: "assistant", text: "<call>1+1</call>" }, { turn: 1, role: "tool", text: "something else" }];
  const found = conversation(sample({ turns, tool_calls: [call(0, 0, "2", null)] }));
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
});

test("the completion is what the model wrote, without replies of the environment", () => {
  expect(completion([{ role: "assistant", text: "a" }, { role: "tool", text: "2" }, { role: "assistant", text: "b" }])).toBe("a\nb");
});

test("a message of a prompt with the role of an answer is no answer", () => {
  const turns = [{ turn: 0, role: "user", text: "go", restarts: false }, { turn: 1, role: "assistant", text: "edited", restarts: false }, { turn: 2, role: "assistant", text: CALL, restarts: null }];
  const found = conversation(sample({ turns, tool_calls: [call(0, 0, "2", null)] }));
  expect(found.map((one) => [one.role, one.turn, one.call?.call])).toEqual([["user", 0, undefined], ["assistant", 1, undefined], ["tool call", 2, 0]]);
  expect(completion(turns)).toBe(CALL);
});

test("lines stand under their conversations, repeated messages under none, and a chain has no heading", () => {
  const lines = [0, 1, 2, 3, 4].map((turn) => ({ message: { role: "user" as const, text: `${turn}`, turn } }));
  const [main, judge] = [{ name: "main", depth: 0, about: "", turns: [0, 3] }, { name: "judge", depth: 1, about: "", turns: [2] }];
  const shown = sections([main, judge], lines);
  expect(shown.map((one) => [one.conversation?.name, one.lines.map(({ message }) => message.text)])).toEqual([["main", ["0", "3"]], ["judge", ["2"]]]);
  expect(sections([main], lines)).toEqual([{ lines }]);
});
