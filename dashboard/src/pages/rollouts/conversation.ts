/** The conversation of a sample: from recorded texts to the messages that the page shows. */

export type Role = "system" | "user" | "thinking" | "assistant" | "tool call" | "tool" | "environment" | "prompt";

export interface Message {
  role: Role;
  text: string;
  /** Index of its row in `turns`; undefined for the prompt. */
  turn?: number;
  /** Name of the called tool. */
  name?: string;
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

function toolCall(body: string): Message {
  try {
    const call: unknown = JSON.parse(body);
    if (call && typeof call === "object" && "name" in call) {
      const { name, arguments: given } = call as { name: unknown; arguments?: unknown };
      const code = given && typeof given === "object" && "code" in given ? (given as { code: unknown }).code : null;
      const text = typeof code === "string" ? code : JSON.stringify(given ?? {}, null, 2);
      return { role: "tool call", name: String(name), text };
    }
  } catch {
    // Not JSON: shown as the model wrote it.
  }
  return { role: "tool call", text: body.trim() };
}

/** Splits a reply into thinking, answer and tool calls, in their order. */
export function splitAnswer(text: string): Message[] {
  const out: Message[] = [];
  let at = 0;
  // A reply can begin inside the thinking that the template of its prompt opened.
  const close = text.indexOf("</think>");
  if (close >= 0 && !text.slice(0, close).includes("<think>")) {
    if (text.slice(0, close).trim()) out.push({ role: "thinking", text: text.slice(0, close).trim() });
    at = close + "</think>".length;
  }
  const answer = (end: number) => {
    const part = text.slice(at, end).replace(/^\n+|\s+$/g, "");
    if (part) out.push({ role: "assistant", text: part });
  };
  for (const match of text.matchAll(PARTS)) {
    if (match.index < at) continue;
    answer(match.index);
    if (match[1] === undefined) out.push(toolCall(match[2] ?? ""));
    else if (match[1].trim()) out.push({ role: "thinking", text: match[1].trim() });
    at = match.index + match[0].length;
  }
  answer(text.length);
  return out.length > 0 ? out : [{ role: "assistant", text }];
}

export interface RecordedTurn {
  turn: number;
  role: string;
  text: string;
}

/** All messages of a sample: those of its first prompt, then its recorded turns. */
export function conversation(promptText: string, completionText: string, turns: readonly RecordedTurn[]): Message[] {
  const prompt = parsePrompt(promptText);
  if (turns.length === 0) return completionText ? [...prompt, ...splitAnswer(completionText)] : prompt;
  // Turns that repeat the prompt (system, user before the first reply) are shown once.
  const known = new Set(prompt.map((message) => message.text));
  const said = turns.flatMap((turn): Message[] => {
    if (turn.role === "assistant") return splitAnswer(turn.text).map((message) => ({ ...message, turn: turn.turn }));
    const bare = parsePrompt(turn.text);
    const text = bare.length === 1 && bare[0] ? bare[0].text : turn.text;
    return known.has(text) ? [] : [{ role: roleOf(turn.role), text, turn: turn.turn }];
  });
  return [...prompt, ...said];
}

/** The prompt in one line, for a list: the text of its last user message. */
export function promptLine(promptText: string): string {
  const messages = parsePrompt(promptText);
  const last = messages.findLast((message) => message.role === "user") ?? messages.at(-1);
  return (last?.text ?? promptText).replace(/\s+/g, " ").trim();
}
