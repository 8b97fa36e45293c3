/** The conversation of a sample: from recorded texts to the messages that the page shows. */

import type { Conversation, Info, PromptMessage, Sample, ToolCall, Turn } from "../../types";

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
  /** What the environment attached to this answer: on its last message. */
  notes?: Info[];
}

function roleOf(name: string): Role {
  return name === "system" || name === "user" || name === "tool" || name === "assistant" || name === "prompt" ? name : "environment";
}

/** The messages of a prompt, its example answers in their parts. */
export function promptParts(messages: readonly PromptMessage[]): Message[] {
  return messages.flatMap(({ role, content, tool_calls }) => {
    const text = content ?? JSON.stringify(tool_calls ?? "");
    return role === "assistant" ? splitAnswer(text) : [{ role: roleOf(role), text }];
  });
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

type Said = Pick<Turn, "role" | "text"> & Partial<Turn>;
type Recorded = Pick<Sample, "messages" | "tool_calls" | "info"> & { turns: readonly (Said & { turn: number })[] };

/** Whether a turn is an answer of the model, not a message of a prompt with the role of one. */
const isAnswer = (turn: Said) => turn.role === "assistant" && turn.restarts == null;

/** All messages of a sample: those of its prompt, then its turns. A call and its result are one message. */
export function conversation({ messages: prompt, turns, tool_calls, info }: Recorded): Message[] {
  const said = promptParts(prompt);
  let answers = 0;
  for (const row of turns) {
    const { turn, role, text: recorded, turn_type } = row;
    const text = recorded ?? ""; // a damaged row does not hide the other turns
    if (isAnswer(row)) {
      const answer = answers++;
      const messages = withRecords(splitAnswer(text), tool_calls.filter((call) => call.turn === answer)).map((message): Message => ({ ...message, turn }));
      said.push(...noted(messages, info.filter((note) => note.turn === answer)));
    } else if (!tool_calls.some((call) => call.reply === turn)) {
      said.push({ role: roleOf(role), text, turn, ...(turn_type ? { name: turn_type } : {}) });
    }
  }
  return noted(said, info.filter((note) => note.turn === null || note.turn < 0 || note.turn >= answers));
}

/** What the model wrote in all turns. */
export const completion = (turns: readonly Said[]) => turns.filter(isAnswer).map((turn) => turn.text ?? "").join("\n");

/** Splits lines by the conversations of a sample, in their order; all are one without a conversation if it has at most one. */
export function sections<Line extends { message: Message }>(conversations: readonly Conversation[], lines: Line[]): { conversation?: Conversation; lines: Line[] }[] {
  if (conversations.length < 2) return [{ lines }];
  return conversations.map((conversation) => {
    const own = new Set<number | undefined>(conversation.turns);
    return { conversation, lines: lines.filter(({ message }) => own.has(message.turn)) };
  });
}

/** Returns the messages with notes on the last one. */
function noted(messages: Message[], notes: readonly Info[]): Message[] {
  const last = messages.at(-1);
  return last && notes.length > 0 ? [...messages.slice(0, -1), { ...last, notes: [...(last.notes ?? []), ...notes] }] : messages;
}

/** A text in one line, for a list. */
export const inLine = (text: string) => text.replace(/\s+/g, " ").trim();
