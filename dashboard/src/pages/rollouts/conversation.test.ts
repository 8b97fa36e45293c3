import { expect, test } from "vitest";
import { conversation, parsePrompt, promptLine, splitAnswer } from "./conversation";

const CHATML = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n5 7 9 -> 7<|im_end|>\n<|im_start|>assistant\n";

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
  expect(conversation(CHATML, "7", turns).map((m) => [m.role, m.turn])).toEqual([
    ["system", undefined],
    ["user", undefined],
    ["assistant", 1],
    ["environment", 2],
  ]);
});

test("a prompt is listed by its last user message", () => {
  expect(promptLine(CHATML)).toBe("5 7 9 -> 7");
});
