/** The conversation of a sample: from recorded texts to the messages that the page shows. */

import type { Info, ToolCall } from "../../types";

export type Role = "system" | "user" | "thinking" | "assistant" | "tool call" | "tool" | "environment" | "prompt";

export interface Message {
  role: Role;
  text: string;
  /** Index of its row in `turns`; undefined for the prompt. */
  turn?: number;
  /** Name of the called tool, or what the environment calls its message. */
  name?: string;
  /** The record of a tool call: its result, error and time. */
  call?: ToolCall;
  /** Index of the turn that gave the model the result of the call. */
  replied?: number;
  /** What the environment attached to this answer: on its last message. */
  notes?: Info[];
}

interface Template {
  /** Matches the start of a message; its first group is the role. */
  open: RegExp;
  close: string;
}

const TEMPLATES: Template[] = [
  { open: /<\|im_start\|>([a-z_]+)\n?/g, close: "<|im_end|>" },
  { open: /<\|start_header_id\|>([a-z_]+)<\|end_header_id\|>\n{0,2}/g, close: "<|eot_id|>" },
  { open: /<start_of_turn>([a-z_]+)\n?/g, close: "<end_of_turn>" },
  { open: /<\|(system|user|assistant|observation)\|>\n?/g, close: "<|endoftext|>" },
];

function roleOf(name: string): Role {
  if (name === "system" || name === "user" || name === "tool" || name === "assistant") return name;
  if (name === "model") return "assistant";
  if (name === "ipython" || name === "observation") return "tool";
  return "environment";
}

/** Splits a rendered prompt into its messages. A prompt of no known template is one message. */
export function parsePrompt(text: string): Message[] {
  for (const { open, close } of TEMPLATES) {
    const starts = [...text.matchAll(open)];
    if (starts.length === 0) continue;
    const messages: Message[] = [];
    const before = text.slice(0, starts[0]?.index ?? 0).replace(/<\|begin_of_text\|>|<bos>/g, "");
    if (before.trim()) messages.push({ role: "prompt", text: before });
    starts.forEach((start, i) => {
      const from = start.index + start[0].length;
      let body = text.slice(from, starts[i + 1]?.index ?? text.length);
      const end = body.indexOf(close);
      if (end >= 0) body = body.slice(0, end);
      const role = roleOf(start[1] ?? "");
      // The last, empty message of a prompt asks the model to answer.
      if (i === starts.length - 1 && role === "assistant" && !body.replace(/<\/?think>/g, "").trim()) return;
      messages.push(...(role === "assistant" ? splitAnswer(body) : [{ role, text: body.trim() }]));
    });
    return messages;
  }
  return text ? [{ role: "prompt", text }] : [];
}

const PARTS = /<think>([\s\S]*?)(?:<\/think>|$)|<tool_call>([\s\S]*?)(?:<\/tool_call>|$)/g;

export interface Part {
  role: "thinking" | "assistant" | "tool call";
  /** Where it begins and ends in the reply, its tags inside. */
  from: number;
  to: number;
  /** What is between its tags. */
  body: string;
}

/** Returns the parts of a reply in their order; together they are the whole reply. */
export function replyParts(text: string): Part[] {
  const parts: Part[] = [];
  let at = 0;
  const add = (role: Part["role"], to: number, body: string) => {
    if (body.trim()) parts.push({ role, from: at, to, body });
    else if (parts.length > 0) parts.at(-1)!.to = to;
    else return; // blanks and empty tags before the first part are its own
    at = to;
  };
  // A reply can begin inside the thinking that the template of its prompt opened.
  const close = text.indexOf("</think>");
  if (close >= 0 && !text.slice(0, close).includes("<think>")) add("thinking", close + "</think>".length, text.slice(0, close));
  for (const match of text.matchAll(PARTS)) {
    if (match.index < at) continue;
    const said = text.slice(at, match.index);
    if (said.replace("</think>", "").trim()) add("assistant", match.index, said);
    add(match[1] === undefined ? "tool call" : "thinking", match.index + match[0].length, match[1] ?? match[2] ?? "");
  }
  if (at < text.length) add("assistant", text.length, text.slice(at));
  return parts;
}

/** Longer arguments, in characters, get a line each. */
const SHORT_ARGUMENTS = 72;

/** Returns the arguments of a call as a person reads them: code as such. */
function argumentText(given: unknown): string {
  const code = given && typeof given === "object" && "code" in given ? given.code : null;
  if (typeof code === "string") return code;
  const lines = JSON.stringify(given ?? {}, null, 2);
  const line = lines.replace(/\n\s*/g, " ");
  return line.length <= SHORT_ARGUMENTS ? line : lines;
}

function parsed(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined; // not JSON: shown as it was written
  }
}

function toolCall(body: string): Message {
  const call = parsed(body);
  if (!call || typeof call !== "object" || !("name" in call)) return { role: "tool call", text: body.trim() };
  return { role: "tool call", name: String(call.name), text: argumentText("arguments" in call ? call.arguments : null) };
}

/** Returns the message of a call that stands in no reply. */
function recordedCall(call: ToolCall): Message {
  const given = parsed(call.arguments ?? "");
  return { role: "tool call", name: call.name, text: given === undefined ? (call.arguments ?? "") : argumentText(given), call };
}

/** Splits a reply into thinking, answer and tool calls, in their order. */
export function splitAnswer(text: string): Message[] {
  const parts = replyParts(text).map(({ role, body }): Message => (role === "tool call" ? toolCall(body) : { role, text: role === "thinking" ? body.trim() : body.replace(/^\n+|\s+$/g, "") }));
  return parts.length > 0 ? parts : [{ role: "assistant", text }];
}

/** Gives the calls of a reply their records, in their order. Calls that its text does not show follow it. */
function withRecords(messages: Message[], calls: readonly ToolCall[]): Message[] {
  const left = [...calls];
  const known = messages.map((message): Message => {
    const call = message.role === "tool call" ? left.shift() : undefined;
    return call ? { ...message, name: call.name, call } : message;
  });
  return [...known, ...left.map(recordedCall)];
}

interface RecordedTurn {
  turn: number;
  role: string;
  text: string;
  turn_type?: string | null;
}

interface Recorded {
  prompt_text: string | null;
  completion_text: string | null;
  turns: readonly RecordedTurn[];
  tool_calls: readonly ToolCall[];
  info: readonly Info[];
}

/** All messages of a sample: those of its first prompt, then its recorded turns. A call and its result are one message. */
export function conversation({ prompt_text, completion_text, turns, tool_calls, info }: Recorded): Message[] {
  const prompt = parsePrompt(prompt_text ?? "");
  if (turns.length === 0) {
    const said = completion_text || tool_calls.length > 0 ? withRecords(completion_text ? splitAnswer(completion_text) : [], tool_calls) : [];
    return noted([...prompt, ...said], info);
  }
  // Turns that repeat the prompt (system, user before the first reply) are shown once.
  const known = new Set(prompt.map((message) => message.text));
  const said: Message[] = [];
  let answers = 0;
  let open: Message[] = []; // calls whose result the model has not been given
  for (const { turn, role, text: recorded, turn_type } of turns) {
    const text = recorded ?? ""; // a damaged row does not hide the other turns
    if (role === "assistant") {
      const answer = answers++;
      const messages = withRecords(splitAnswer(text), tool_calls.filter((call) => call.turn === answer)).map((message): Message => ({ ...message, turn }));
      open = messages.filter((message) => message.call);
      said.push(...noted(messages, info.filter((note) => note.turn === answer)));
      continue;
    }
    const bare = parsePrompt(text);
    const shown = bare.length === 1 && bare[0] ? bare[0].text : text;
    if (known.has(shown)) continue;
    const answered = answeredBy(shown, open);
    for (const message of answered) message.replied = turn;
    open = open.filter((message) => !answered.includes(message));
    if (answered.length === 0) said.push({ role: roleOf(role), text: shown, turn, ...(turn_type ? { name: turn_type } : {}) });
  }
  return noted([...prompt, ...said], info.filter((note) => note.turn === null || note.turn < 0 || note.turn >= answers));
}

/** Returns the calls whose results a turn is: one of them, or all in lines `Tool 1: ...`, as tool environments write them. */
function answeredBy(text: string, open: Message[]): Message[] {
  const told = text.trim();
  const results = open.map(({ call }) => (call!.result ?? "").trim());
  if (open.length > 1 && told === results.map((result, i) => `Tool ${i + 1}: ${result}`).join("\n")) return open;
  const one = open[results.findIndex((result) => result !== "" && result === told)];
  return one ? [one] : [];
}

/** Returns the messages with notes on the last one. */
function noted(messages: Message[], notes: readonly Info[]): Message[] {
  const last = messages.at(-1);
  return last && notes.length > 0 ? [...messages.slice(0, -1), { ...last, notes: [...(last.notes ?? []), ...notes] }] : messages;
}

/** The prompt in one line, for a list: the text of its last user message. */
export function promptLine(promptText: string): string {
  const messages = parsePrompt(promptText);
  const last = messages.findLast((message) => message.role === "user") ?? messages.at(-1);
  return (last?.text ?? promptText).replace(/\s+/g, " ").trim();
}
