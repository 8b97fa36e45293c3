import { memo, useEffect, useMemo, useRef, useState } from "react";
import { number } from "../../format";
import { ratio, shade, visibleToken, type Token, type TokenView as View } from "./tokens";

const CELLS = 16;
const SHOWN = 4000;
const STEM = 64;

/** The numbers of one token, in a fixed place. */
export function Readout({ token }: { token: Token | null }) {
  const cells: [string, string][] = token
    ? [
        ["token", visibleToken(token.text)],
        ["id", token.id === null ? "–" : String(token.id)],
        ["engine logprob", number(token.logprob, 4)],
        ["trainer logprob", number(token.trainerLogprob, 4)],
        ["ratio", number(ratio(token), 4)],
        ["entropy", number(token.entropy, 3)],
        ["version", number(token.version)],
        ["mask", token.trained === null ? "–" : token.trained ? "trained" : "masked"],
      ]
    : [];
  return (
    <dl className="rd" aria-live="off">
      {cells.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd className={name === "token" ? "tok" : undefined}>{value}</dd>
        </div>
      ))}
      {!token && <div><dt>token</dt><dd className="f">point at one</dd></div>}
    </dl>
  );
}

interface TokensProps {
  tokens: readonly Token[];
  view: View;
  /** Flowing text even for few tokens: a part of a longer reply. */
  flows?: boolean;
  /** Index of the token that is read; -1 without one. */
  at: number;
  onPoint: (index: number) => void;
}

function newestOf(tokens: readonly Token[]): number {
  return tokens.reduce((newest, token) => Math.max(newest, token.version ?? -Infinity), -Infinity);
}

const Flow = memo(function Flow({ tokens, view, all }: { tokens: readonly Token[]; view: View; all: boolean }) {
  const newest = newestOf(tokens);
  return (all ? tokens : tokens.slice(0, SHOWN)).map((token, i) => {
    const { color, strength } = shade(token, view, newest);
    return (
      <span key={i} data-i={i} className={color ?? undefined} style={color ? ({ "--a": `${Math.round(100 * strength)}%` } as React.CSSProperties) : undefined}>
        {token.text}
      </span>
    );
  });
});

const indexOf = (target: EventTarget): number => {
  const cell = target instanceof HTMLElement ? target.closest("[data-i]") : null;
  return cell instanceof HTMLElement ? Number(cell.dataset.i) : -1;
};

/** Tokens of one turn: cells with a stem of the logprob when there are few, flowing text otherwise. */
export function TokenView({ tokens, view, flows = false, at, onPoint }: TokensProps) {
  const [all, setAll] = useState(false);
  const box = useRef<HTMLDivElement>(null);
  // Not by rendering: thousands of tokens stand still while one of them is read.
  useEffect(() => {
    const cell = box.current?.querySelector(`[data-i="${at}"]`);
    cell?.classList.add("cur");
    if (document.activeElement === box.current) cell?.scrollIntoView({ block: "nearest" });
    return () => cell?.classList.remove("cur");
  });
  const step = (event: React.KeyboardEvent) => {
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.nativeEvent.stopPropagation();
    onPoint(Math.min(Math.max(to, 0), tokens.length - 1));
  };
  const point = (event: React.SyntheticEvent) => {
    const index = indexOf(event.target);
    if (index >= 0 && index !== at) onPoint(index);
  };
  const lowest = useMemo(() => Math.min(-0.5, ...tokens.slice(0, CELLS).map((token) => Math.min(token.logprob ?? 0, token.trainerLogprob ?? 0))), [tokens]);
  const keyboard = { ref: box, tabIndex: 0, role: "group", "aria-label": "Tokens: arrow keys go through them", onKeyDown: step };
  if (tokens.length <= CELLS && !flows) {
    const newest = newestOf(tokens);
    const y = (logprob: number) => 4 + (logprob / lowest) * (STEM - 8);
    return (
      <div className="cells" {...keyboard} onPointerMove={point} onClick={point}>
        {tokens.map((token, i) => {
          const { color, strength } = shade(token, view, newest);
          return (
            <div key={i} data-i={i} className="tk">
              <span className={`tkt ${color ?? ""}`} style={{ "--a": `${Math.round(100 * strength)}%` } as React.CSSProperties}>{visibleToken(token.text)}</span>
              <svg aria-hidden="true" preserveAspectRatio="none">
                <line className="ax" x1="0" x2="100%" y1="4.5" y2="4.5" />
                {token.logprob !== null && <rect x="38%" width="24%" y={4} height={Math.max(0, y(token.logprob) - 4)} fill="var(--neg)" />}
                {token.trainerLogprob !== null && <line className="tick" x1="26%" x2="74%" y1={Math.round(y(token.trainerLogprob)) + 0.5} y2={Math.round(y(token.trainerLogprob)) + 0.5} />}
              </svg>
              <div className="n">{number(token.logprob, 3)}</div>
              <div className="n f">{token.id ?? ""}</div>
            </div>
          );
        })}
      </div>
    );
  }
  return (
    <div className="flow" {...keyboard} onPointerMove={point} onClick={point}>
      <Flow tokens={tokens} view={view} all={all} />
      {!all && tokens.length > SHOWN && (
        <button className="link fold" onClick={() => setAll(true)}>
          {" "}{tokens.length - SHOWN} more tokens, show all
        </button>
      )}
    </div>
  );
}

/** The scale of the colors, in words and numbers. */
export function ColorKey({ view }: { view: View }) {
  if (view === "surprise") return <span className="key">0 <i className="ramp neg" /> −1.6</span>;
  if (view === "ratio") return <span className="key">0.78 <i className="ramp both" /> 1.28</span>;
  if (view === "entropy") return <span className="key">0 <i className="ramp heat" /> 2 nats</span>;
  if (view === "mask") return <span className="key"><s>masked</s> trained</span>;
  return <span className="key">newest <i className="ramp heat" /> oldest</span>;
}
