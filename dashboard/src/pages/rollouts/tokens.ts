/** Numbers of single tokens, and how the token view colors them. */

import { replyParts } from "./conversation";
import type { Turn } from "../../types";

export type TokenView = "surprise" | "ratio" | "entropy" | "mask" | "version";
const TOKEN_VIEWS: readonly TokenView[] = ["surprise", "ratio", "entropy", "mask", "version"];

export interface Token {
  text: string;
  id: number | null;
  logprob: number | null;
  trainerLogprob: number | null;
  entropy: number | null;
  version: number | null;
  /** Whether it had a loss; null if the record does not say. */
  trained: boolean | null;
}

/** exp(trainer - engine): how much likelier the trainer found the token. */
export function ratio(token: Token): number | null {
  return token.trainerLogprob === null || token.logprob === null ? null : Math.exp(token.trainerLogprob - token.logprob);
}

const at = <T>(values: readonly T[] | null | undefined, i: number): T | null => values?.[i] ?? null;

/** The tokens of a turn; none when the record kept no token of it. */
export function tokensOf(turn: Partial<Turn>): Token[] {
  const ids = turn.token_ids ?? null;
  const count = Math.max(ids?.length ?? 0, turn.logprobs?.length ?? 0, turn.tokens?.length ?? 0);
  return Array.from({ length: count }, (_, i) => {
    const mask = at(turn.mask, i);
    return {
      text: at(turn.tokens, i) ?? `#${at(ids, i) ?? "?"}`,
      id: at(ids, i),
      logprob: at(turn.logprobs, i),
      trainerLogprob: at(turn.trainer_logprobs, i),
      entropy: at(turn.entropies, i),
      version: at(turn.versions, i),
      trained: mask === null ? null : Boolean(mask),
    };
  });
}

interface TokenPart {
  /** Index of its first token in the reply. */
  from: number;
  tokens: Token[];
}

/**
 * Splits the tokens of a reply as its text: thinking, answer, calls. A token belongs to the part in which it begins. What
 * comes after `most` parts, such as the end of the turn, belongs to the last one.
 */
export function tokenParts(tokens: readonly Token[], most: number): TokenPart[] {
  const ends = replyParts(tokens.map((token) => token.text).join("")).map((part) => part.to);
  const parts: TokenPart[] = [];
  let [at, part] = [0, 0];
  tokens.forEach((token, index) => {
    while (part + 1 < Math.min(most, ends.length) && at >= ends[part]!) part += 1;
    if (parts.length <= part) parts.push({ from: index, tokens: [] });
    parts.at(-1)!.tokens.push(token);
    at += token.text.length;
  });
  return parts;
}

/** What each view shows of a token. */
const SHOWN: Record<TokenView, (token: Token) => number | boolean | null> = {
  surprise: (token) => token.logprob,
  ratio,
  entropy: (token) => token.entropy,
  mask: (token) => token.trained,
  version: (token) => token.version,
};

/** The views that these tokens have numbers for. */
export const availableViews = (tokens: readonly Token[]): TokenView[] => TOKEN_VIEWS.filter((view) => tokens.some((token) => SHOWN[view](token) !== null));

/** Tokens more likely than this get no color, or all text would be tinted. */
const QUIET_LOGPROB = -0.04;
/** Surprise (nats) and entropy (nats) of the full color. */
const FULL_SURPRISE = 1.6;
const FULL_ENTROPY = 2;
/** |log ratio| of the full color. */
const FULL_LOG_RATIO = 0.25;

interface Shade {
  color: "neg" | "pos" | "heat" | "off" | null;
  /** Strength from 0 to 1. */
  strength: number;
}

const NONE: Shade = { color: null, strength: 0 };
const bounded = (value: number) => Math.min(1, Math.max(0, value));

/** Returns color and strength of a token in a view. `newest` is the newest version of the sample. */
export function shade(token: Token, view: TokenView, newest: number): Shade {
  if (view === "surprise") {
    if (token.logprob === null || token.logprob > QUIET_LOGPROB) return NONE;
    return { color: "neg", strength: bounded(-token.logprob / FULL_SURPRISE) };
  }
  if (view === "ratio") {
    const value = ratio(token);
    if (value === null) return NONE;
    const log = Math.log(value);
    return Math.abs(log) < 0.005 ? NONE : { color: log < 0 ? "neg" : "pos", strength: bounded(Math.abs(log) / FULL_LOG_RATIO) };
  }
  if (view === "entropy") {
    return token.entropy === null ? NONE : { color: "heat", strength: bounded(token.entropy / FULL_ENTROPY) };
  }
  if (view === "mask") return token.trained === false ? { color: "off", strength: 1 } : NONE;
  if (token.version === null || token.version === newest) return NONE;
  return { color: "heat", strength: bounded((newest - token.version) / 4 + 0.2) };
}

/** Blanks and line ends of a token, made visible. */
export function visibleToken(text: string): string {
  return text.replace(/ /g, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥") || "∅";
}
