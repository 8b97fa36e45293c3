/** Text of models and tools, made harmless for a page: it shows what is there and never acts on it. */

export interface Piece {
  text: string;
  /** Set for a character or sequence that a browser would hide or obey. */
  mark?: string;
}

/** Characters shown before "show all". A page stays quick with answers of 10 MB. */
export const CLIP_CHARS = 20_000;

const NAMES: Record<number, string> = {
  0x061c: "Arabic letter mark",
  0x200b: "zero width space",
  0x200e: "left-to-right mark",
  0x200f: "right-to-left mark",
  0x2028: "line separator",
  0x2029: "paragraph separator",
  0x202a: "left-to-right embedding",
  0x202b: "right-to-left embedding",
  0x202c: "pop directional formatting",
  0x202d: "left-to-right override",
  0x202e: "right-to-left override",
  0x2060: "word joiner",
  0x2066: "left-to-right isolate",
  0x2067: "right-to-left isolate",
  0x2068: "first strong isolate",
  0x2069: "pop directional isolate",
  0xfeff: "byte order mark",
};

/* An ANSI sequence (colors, cursor, titles), or one control, bidi or invisible character. */
const HIDDEN =
  // eslint-disable-next-line no-control-regex
  /\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007\u001b]{0,200}(?:\u0007|\u001b\\)|[@-_])|[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff]/g;

function describe(sequence: string): Piece {
  const code = sequence.codePointAt(0) ?? 0;
  if (sequence.length > 1) return { text: "ESC" + sequence.slice(1).replace(/[^ -~]/g, "·"), mark: "ANSI sequence" };
  if (code < 0x20) return { text: String.fromCodePoint(0x2400 + code), mark: "control character" };
  const label = "U+" + code.toString(16).toUpperCase().padStart(4, "0");
  return { text: label, mark: NAMES[code] ?? "control character" };
}

/** Splits a text into plain pieces and marks. Joined marks and pieces cover the whole text. */
export function pieces(text: string): Piece[] {
  const out: Piece[] = [];
  let at = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > at) out.push({ text: text.slice(at, match.index) });
    out.push(match[0] === "\r" && text[match.index + 1] === "\n" ? { text: "" } : describe(match[0]));
    at = match.index + match[0].length;
  }
  if (at < text.length) out.push({ text: text.slice(at) });
  return out;
}

/** Whether a text has characters that `pieces` would mark. */
export function hasHidden(text: string): boolean {
  // Not test(): it leaves a lastIndex behind, from which matchAll would go on.
  return text.search(HIDDEN) >= 0;
}

/** Returns the start of a text and how many characters were left out. Never splits a surrogate pair. */
export function clip(text: string, limit = CLIP_CHARS): { shown: string; hidden: number } {
  if (text.length <= limit) return { shown: text, hidden: 0 };
  const high = text.charCodeAt(limit - 1);
  const end = high >= 0xd800 && high <= 0xdbff ? limit - 1 : limit;
  return { shown: text.slice(0, end), hidden: text.length - end };
}

/** Splits a text at the matches of a search, ignoring case. Every second part is a match. */
export function splitMatches(text: string, search: string): string[] {
  if (!search) return [text];
  const lower = text.toLowerCase();
  const wanted = search.toLowerCase();
  if (lower.length !== text.length) return [text];
  const out: string[] = [];
  let at = 0;
  for (let i = lower.indexOf(wanted); i >= 0; i = lower.indexOf(wanted, at)) {
    out.push(text.slice(at, i), text.slice(i, i + wanted.length));
    at = i + wanted.length;
  }
  out.push(text.slice(at));
  return out;
}

/** Returns a text with hidden characters written out, for places that hold no elements: titles, options, labels. */
export function visible(text: string): string {
  return hasHidden(text)
    ? pieces(text)
        .map((piece) => piece.text)
        .join("")
    : text;
}
