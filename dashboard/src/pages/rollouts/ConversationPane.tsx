import { extent, least } from "d3-array";
import { Fragment, lazy, Suspense, useEffect, useMemo, useRef, useState } from "react";
import { loaded } from "../../api";
import { count, duration } from "../../format";
import { wordDiff } from "./compare";
import { neighbor } from "../../lists";
import { Segments } from "../../shell/controls";
import { useKeys } from "../../shell/keys";
import { completion, conversation, sections, type Message, type Role } from "./conversation";
import Markdown from "./Markdown";
import { clip, visible } from "../../text/hostile";
import { Clipped, Plain } from "../../text/SafeText";
import { ColorKey, Readout, TokenView } from "./TokenView";
import { availableViews, tokenParts, tokensOf, type Token, type TokenView as View } from "./tokens";
import type { Sample, Turn } from "../../types";

const Code = lazy(() => loaded(() => import("./Code")));

/** Longer gold answers, in characters, are shown in the conversation. */
const SHORT_GOLD = 80;
/** A reply with at most this many tokens is first shown by token, a longer one as text. */
const FEW_TOKENS = 64;
/** In a tree of conversations, longer calls, results and messages of prompts are first folded, in characters. */
const LONG_MESSAGE = 400;
/** Deeper conversations are not indented further. */
const MAX_DEPTH = 4;
/** Longer thinking is first folded after this many characters. */
const THINKING_CHARS = 4000;

export type Shown = View | "text" | "raw" | "diff";

interface PaneProps {
  detail: Sample;
  title: React.ReactNode;
  shown: string;
  setShown: (shown: Shown) => void;
  search: string;
  /** The answer beside this one, and whether it stands first. */
  against?: { text: string; isFirst: boolean };
  folded: Folded;
  /** Rendered below the conversation, outside its scroll area. */
  children?: React.ReactNode;
}

/** Folded messages by role and index, so that all answers of a group fold the same ones. */
export interface Folded {
  keys: ReadonlySet<string>;
  set: (keys: ReadonlySet<string>) => void;
}

const has = (text: string | null | undefined, search: string) => search !== "" && (text ?? "").toLowerCase().includes(search.toLowerCase());

/** The view that an address asks for, as far as the record has its numbers. */
function viewOf(wanted: string, views: readonly View[], tokens: number): Shown {
  if (wanted === "text" || wanted === "raw") return wanted;
  const known = views.find((view) => view === wanted);
  return known ?? (views[0] && tokens <= FEW_TOKENS ? views[0] : "text");
}

export function ConversationPane({ detail, title, shown, setShown, search, against, folded, children }: PaneProps) {
  const tokens = useMemo(() => new Map(detail.turns.map((turn) => [turn.turn, tokensOf(turn)])), [detail]);
  const all = useMemo(() => [...tokens.values()].flat(), [tokens]);
  const views = useMemo(() => availableViews(all), [all]);
  const view = shown === "diff" && against ? "diff" : viewOf(shown || (search ? "text" : ""), views, all.length);
  const [at, point] = useState<{ turn: number; index: number } | null>(null);
  const messages = useMemo(() => conversation(detail), [detail]);
  useEffect(() => point(leastLikely(tokens)), [tokens]);
  const parts = useMemo(() => new Map([...tokens].map(([turn, list]) => [turn, tokenParts(list, messages.filter((message) => message.turn === turn).length)])), [tokens, messages]);
  const colored = view !== "text" && view !== "raw" && view !== "diff";
  const token = at ? (tokens.get(at.turn)?.[at.index] ?? null) : null;
  const box = useRef<HTMLDivElement>(null);
  // Scrolls to the first match of a search.
  useEffect(() => void box.current?.querySelector("mark")?.scrollIntoView({ block: "center" }), [detail, search]);
  const places: Record<string, number> = {};
  const named = messages.map((message, i) => ({ message, i, key: `${message.role} ${(places[message.role] = (places[message.role] ?? 0) + 1)}` }));
  const foldable = view === "raw" || view === "diff" ? [] : named.flatMap(({ message, key }) => (message.call ? [key, `result of ${key}`] : [key]));
  const chats = sections(detail.conversations, named);
  const isTree = chats.length > 1;
  // These are folded unless their key is in the set.
  const long = new Set(!isTree ? [] : named.flatMap(({ message: { role, text, call }, key }) => [...(text.length > LONG_MESSAGE && role !== "assistant" ? [key] : []), ...((call?.result ?? "").length > LONG_MESSAGE ? [`result of ${key}`] : [])]));
  const folds = (key: string) => folded.keys.has(key) !== long.has(key);
  const isFolded = (key: string, text: string | null | undefined) => folds(key) && !has(text, search);
  const fold = (keys: string[], on: boolean) => folded.set(new Set([...[...folded.keys].filter((key) => !keys.includes(key)), ...keys.filter((key) => long.has(key) !== on)]));
  const allFolded = foldable.length > 0 && foldable.every(folds);
  const jump = (by: number) => {
    const headings = [...(box.current?.querySelectorAll<HTMLElement>(".chat > h3 > button") ?? [])];
    const at = headings.indexOf(document.activeElement as HTMLElement);
    neighbor(headings, at, by)?.focus();
  };
  useKeys("Conversation", [
    { keys: ["z"], does: "fold all messages, or unfold them", run: () => fold(foldable, !allFolded) },
    ...(isTree ? [{ keys: ["."], does: "next conversation", run: () => jump(1) }, { keys: [","], does: "conversation before", run: () => jump(-1) }] : []),
  ]);

  const line = ({ message, key, i }: (typeof named)[number]) => {
    const turn = detail.turns.find((one) => one.turn === message.turn);
    const first = messages.findIndex((other) => other.turn === message.turn) === i;
    const pieces = colored ? (parts.get(message.turn ?? -1) ?? []) : [];
    // The nth part of a reply is its nth message.
    const piece = pieces[i - messages.findIndex((other) => other.turn === message.turn)];
    const reply = detail.turns.find((one) => one.turn === message.call?.reply);
    return (
      <Line key={key} message={message} turn={first ? turn : undefined} tokens={piece?.tokens.length} reply={reply} folded={isFolded(key, `${message.text}${message.notes?.map((note) => note.value).join("\n") ?? ""}`)} onFold={(on) => fold([key], on)}>
        {piece && turn ? (
          <TokenView tokens={piece.tokens} flows={pieces.length > 1} view={view as View} at={at?.turn === turn.turn ? at.index - piece.from : -1} onPoint={(index) => point({ turn: turn.turn, index: piece.from + index })} />
        ) : pieces.length === 0 || message.call ? (
          <Body message={message} search={search} />
        ) : null}
        <Result message={message} search={search} folded={isFolded(`result of ${key}`, `${message.call?.result}${message.call?.error}`)} onFold={(on) => fold([`result of ${key}`], on)} />
        <Notes message={message} search={search} />
      </Line>
    );
  };

  return (
    <section className="p2" aria-label="Conversation">
      <div className="hd">
        {title}
        <Segments label="How the answer is shown" value={view} options={(["text", ...views, "raw", ...(against ? ["diff"] : [])] as Shown[]).map((one) => [one, one])} choose={setShown} />
        {foldable.length > 0 && <button className="link d" onClick={() => fold(foldable, !allFolded)}>{allFolded ? "unfold all" : "fold all"}</button>}
        {colored && <ColorKey view={view} />}
        {views.length === 0 && <span className="s f" title="record_tokens sets for how many samples of a step">no numbers of tokens recorded</span>}
      </div>
      <div className="conv" ref={box} tabIndex={0} role="group" aria-label="Messages">
        {detail.failure_message && (
          <div className="msg">
            <span className="w">{visible(detail.failure_kind ?? "failure")}</span>
            <Clipped text={detail.failure_message}>{(text) => <div className="verbatim w"><Plain text={text} /></div>}</Clipped>
          </div>
        )}
        {view === "diff" && against ? <Differences text={completion(detail.turns)} against={against} /> : view === "raw" ? <Raw detail={detail} search={search} /> : chats.map(({ conversation: chat, lines }, number) => {
          if (!chat) return lines.map(line);
          const key = `conversation ${number}`;
          const isShown = !folds(key) || search !== "";
          return (
            <section key={key} className="chat" style={{ "--depth": Math.min(chat.depth, MAX_DEPTH) } as React.CSSProperties}>
              <h3>
                <button className="fb" aria-expanded={isShown} onClick={() => fold([key], isShown)}><Plain text={chat.name} /></button> <span className="d">{chat.about}</span>
              </h3>
              {isShown && lines.map(line)}
            </section>
          );
        })}
        <Gold golden={detail.golden} search={search} />
      </div>
      {colored && <div className="rdb"><Readout token={token} /></div>}
      {children && <div className="dock">{children}</div>}
    </section>
  );
}

/** The least likely token: the first one whose numbers are shown. */
function leastLikely(tokens: Map<number, Token[]>): { turn: number; index: number } | null {
  const all = [...tokens].flatMap(([turn, list]) => list.map(({ logprob }, index) => ({ turn, index, logprob })));
  return least(all.filter(({ logprob }) => logprob !== null), ({ logprob }) => logprob!) ?? null;
}

function versions(turn: Turn): string | null {
  const [low, high] = extent(turn.versions ?? []);
  return low === undefined ? null : low === high ? `version ${low}` : `versions ${low} to ${high}`;
}

interface LineProps {
  message: Message;
  turn?: Turn;
  /** Tokens of this part of the reply; those of the whole reply without it. */
  tokens?: number;
  /** The turn that gave the model the result of the call. */
  reply?: Turn;
  folded: boolean;
  onFold: (on: boolean) => void;
  children: React.ReactNode;
}

/** Characters that a folded text shows. */
const FOLDED_CHARS = 200;

function Line({ message, turn, tokens = turn?.num_tokens || undefined, reply, folded, onFold, children }: LineProps) {
  const seconds = turn?.started_at != null && turn.ended_at != null ? turn.ended_at - turn.started_at : null;
  const { call } = message;
  return (
    <div className={`msg ${message.role === "thinking" ? "think" : ""}`}>
      <span>
        <button className="fb" aria-expanded={!folded} onClick={() => onFold(!folded)}>{message.role}</button>
        {message.name && <small className="m"><Plain text={message.name} /></small>}
        {tokens !== undefined && <small>{count(tokens)} tokens</small>}
        {turn && versions(turn) && <small>{versions(turn)}</small>}
        {!!seconds && <small>{duration(seconds)}</small>}
        {call?.seconds != null && <small>ran {duration(call.seconds)}</small>}
        {call?.sandbox && <small className="m" title="The sandbox that it used">sandbox <Plain text={call.sandbox} /></small>}
        {call?.error != null && <small className="w">failed</small>}
        {reply?.num_tokens != null && <small>result {count(reply.num_tokens)} tokens</small>}
        {[turn?.divergence, reply?.divergence].map((divergence, i) => divergence && <small key={i} className="w" title="How this join differs from the chat template, or why a conversation begins or branches">{divergence.replaceAll("_", " ")}</small>)}
      </span>
      <div>{folded ? <p className="fold cut"><Plain text={message.text.slice(0, FOLDED_CHARS)} /></p> : children}</div>
    </div>
  );
}

const VERBATIM: readonly Role[] = ["tool", "environment", "prompt"];

function Body({ message, search }: { message: Message; search: string }) {
  const { role, text } = message;
  if (role === "tool call") {
    return (
      <Clipped text={text} search={search}>
        {(shown) => <pre className="code">{search ? <Plain text={shown} search={search} /> : <Suspense fallback={<Plain text={shown} />}><Code code={shown} language={message.name === "bash" ? "bash" : shown.startsWith("{") ? "json" : "python"} /></Suspense>}</pre>}
      </Clipped>
    );
  }
  if (VERBATIM.includes(role)) return <Clipped text={text} search={search}>{(shown) => <div className="tool"><Plain text={shown} search={search} /></div>}</Clipped>;
  return (
    <Clipped text={text} search={search} limit={role === "thinking" ? THINKING_CHARS : undefined}>
      {(shown) => <Markdown text={shown} search={search} />}
    </Clipped>
  );
}

function Raw({ detail, search }: { detail: Sample; search: string }) {
  const parts: [string, string][] = [["prompt", detail.prompt_text ?? ""], ["completion", completion(detail.turns)]];
  return parts.map(([name, text]) => (
    <div className="msg" key={name}>
      <span>
        {name}
        <small>{count(text.length)} characters</small>
      </span>
      <div className="verbatim"><Clipped text={text} search={search}>{(shown) => <Plain text={shown} search={search} />}</Clipped></div>
    </div>
  ));
}

/** The answer with the words that the one beside it does not have. */
function Differences({ text, against }: { text: string; against: { text: string; isFirst: boolean } }) {
  const { shown, hidden } = clip(text);
  const other = clip(against.text).shown;
  const pieces = useMemo(() => (against.isFirst ? wordDiff(other, shown)[1] : wordDiff(shown, other)[0]), [shown, other, against.isFirst]);
  return (
    <div className="msg">
      <span>
        answer
        <small>marked: words of this one alone</small>
        {hidden > 0 && <small>{count(hidden)} more characters are not compared</small>}
      </span>
      <div className="verbatim" aria-label="Differences">
        {pieces.map((piece, i) => (piece.own ? <mark key={i}><Plain text={piece.text} /></mark> : <Plain key={i} text={piece.text} />))}
      </div>
    </div>
  );
}

/** What a call gave back, under it. */
function Result({ message: { call }, search, folded, onFold }: { message: Message; search: string; folded: boolean; onFold: (on: boolean) => void }) {
  if (!call) return null;
  const told = call.error !== null && call.result === `Error: ${call.error}` ? null : call.result;
  if (!told && !call.error) return null;
  return (
    <div className="res">
      <button className="fb s d" aria-expanded={!folded} onClick={() => onFold(!folded)}>result</button>
      {folded ? <p className="fold cut"><Plain text={(told ?? call.error ?? "").slice(0, FOLDED_CHARS)} /></p> : (
        <>
          {told && <Clipped text={told} search={search}>{(shown) => <div className="tool"><Plain text={shown} search={search} /></div>}</Clipped>}
          {call.error && <Clipped text={call.error} search={search}>{(shown) => <div className="tool w"><Plain text={shown} search={search} /></div>}</Clipped>}
        </>
      )}
    </div>
  );
}

/** What the environment attached to an answer. */
function Notes({ message: { notes }, search }: { message: Message; search: string }) {
  if (!notes) return null;
  return (
    <dl className="gold notes" aria-label="Notes of the environment">
      {notes.map((note) => (
        <Fragment key={`${note.number}/${note.key}`}>
          <dt title={visible(note.type ?? "")}><Plain text={note.key || "note"} /></dt>
          <dd><Clipped text={note.value ?? ""} search={search} limit={2000}>{(shown) => <Plain text={shown} search={search} />}</Clipped></dd>
        </Fragment>
      ))}
    </dl>
  );
}

function Gold({ golden, search }: { golden: Record<string, string>; search: string }) {
  const entries = Object.entries(golden ?? {});
  // Short gold answers stand in the pane of numbers.
  if (!entries.some(([, value]) => String(value).length > SHORT_GOLD)) return null;
  return (
    <div className="msg">
      <span>gold</span>
      <dl className="gold">
        {entries.map(([name, value]) => (
          <Fragment key={name}>
            <dt>{visible(name)}</dt>
            <dd><Clipped text={String(value)} search={search} limit={2000}>{(shown) => <Plain text={shown} search={search} />}</Clipped></dd>
          </Fragment>
        ))}
      </dl>
    </div>
  );
}
