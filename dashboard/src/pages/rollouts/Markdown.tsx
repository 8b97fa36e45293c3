/** Markdown as React elements. No HTML string reaches the page, images stay links in text, and links are http only. */

import { Marked, type Token, type Tokens } from "marked";
import { lazy, Suspense, useMemo } from "react";
import { loaded } from "../../api";
import { nextTex, texAt, type Tex as Formula } from "./math";
import { visible } from "../../text/hostile";
import { Plain } from "../../text/SafeText";

const Tex = lazy(() => loaded(() => import("./Tex")));
const Code = lazy(() => loaded(() => import("./Code")));

/** Text beyond this many characters is shown unparsed. */
const LONGEST = 60_000;
/**
 * Limit on the parsing work, about 0.1 s in a browser. The work for a paragraph grows with the square of its marks, such as
 * brackets and asterisks, and with its lines. Text beyond the limit is shown unparsed.
 */
const MOST_WORK = 10_000_000;
const WORK_OF_LINE = 3000;
/** Limits on the number of formulas in a message and on their length. Further ones are shown unparsed. */
const MOST_FORMULAS = 500;
const FORMULA_CHARS = 20_000;
/** Deepest nesting of quotes and lists. */
const DEEPEST = 40;
/** Characters that are searched for the next formula. Searching the whole rest at each mark would take quadratic time. */
const AHEAD = 1000;

const MARKS = /[^\p{L}\p{N}\s.,;:'"]|\d[.)]\s/gu;

/** Returns the length of the text that is parsed. It ends before a paragraph. */
export function parsedLength(text: string): number {
  let [work, at] = [0, 0];
  for (const paragraph of text.slice(0, LONGEST + 1).split(/(?<=\n[ \t]*\n)/)) {
    work += (paragraph.match(MARKS)?.length ?? 0) ** 2 + WORK_OF_LINE * (paragraph.match(/\n/g)?.length ?? 0);
    if (work > MOST_WORK || at + paragraph.length > LONGEST) return at;
    at += paragraph.length;
  }
  return at;
}

let formulas = 0;
let formulaChars = 0;

/** Returns the formula at the start of a text, unless the message already has `MOST_FORMULAS`. */
function formulaAt(src: string): Formula | null {
  const found = formulas < MOST_FORMULAS && formulaChars < FORMULA_CHARS ? texAt(src) : null;
  if (found) [formulas, formulaChars] = [formulas + 1, formulaChars + found.raw.length];
  return found;
}

/** The characters before and from an asterisk that multiplies, as in 9*5*7, or raises to a power. */
const [FACTOR, TIMES] = [/[\w)\]}]$/, /^\*{1,2}(?=[\w([{\\])/];

const parser = new Marked({ breaks: true, gfm: true });
parser.use({
  tokenizer: {
    emStrong: (src, _masked, before = "") => {
      const times = FACTOR.test(before) ? TIMES.exec(src)?.[0] : undefined;
      return times ? ({ type: "text", raw: times, text: times } as unknown as Tokens.Em) : false; // false: as Markdown has it
    },
  },
  extensions: [
    {
      name: "displayTex",
      level: "block",
      start: (src) => {
        const end = src.search(/\n[ \t]*\n/);
        const at = (end < 0 ? src : src.slice(0, end)).search(/^[ \t]*(\$\$|\\\[)/m);
        return at < 0 ? undefined : at;
      },
      tokenizer: (src) => {
        const indent = /^[ \t]*/.exec(src)![0].length;
        const found = formulaAt(src.slice(indent));
        if (!found?.display || !/^[ \t]*(\n|$)/.test(src.slice(indent + found.raw.length))) return undefined;
        return { type: "displayTex", raw: src.slice(0, indent + found.raw.length), formula: found };
      },
    },
    {
      name: "tex",
      level: "inline",
      start: (src) => {
        const at = nextTex(src.slice(0, AHEAD));
        return at >= 0 ? at : src.length > AHEAD ? AHEAD : undefined;
      },
      tokenizer: (src) => {
        const found = formulaAt(src);
        return found ? { type: "tex", raw: found.raw, formula: found } : undefined;
      },
    },
  ],
});

const ENTITIES: Record<string, string> = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

function decoded(text: string): string {
  return text.replace(/&(amp|lt|gt|quot|apos|nbsp|#39);/g, (all, name: string) => (name === "#39" ? "'" : (ENTITIES[name] ?? all)));
}

function safeHref(href: string): string | null {
  try {
    const url = new URL(href);
    return url.protocol === "https:" || url.protocol === "http:" ? url.href : null;
  } catch {
    return null;
  }
}

function Rendered({ tokens, search, depth }: { tokens: Token[] | undefined; search: string; depth: number }) {
  return (tokens ?? []).map((token, i) => <One key={i} token={token} search={search} depth={depth} />);
}

function One({ token, search, depth }: { token: Token; search: string; depth: number }): React.ReactNode {
  const inner = (tokens: Token[] | undefined) => <Rendered tokens={tokens} search={search} depth={depth + 1} />;
  const plain = (text: string) => <Plain text={text} search={search} />;
  if (depth > DEEPEST) return plain(token.raw);
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "paragraph":
      return <p>{inner(token.tokens)}</p>;
    case "heading": {
      return <p className={`h h${Math.min(3, (token as Tokens.Heading).depth)}`}>{inner(token.tokens)}</p>;
    }
    case "blockquote":
      return <blockquote>{inner(token.tokens)}</blockquote>;
    case "hr":
      return <hr />;
    case "br":
      return <br />;
    case "strong":
      return <b>{inner(token.tokens)}</b>;
    case "em":
      return <em>{inner(token.tokens)}</em>;
    case "del":
      return <del>{inner(token.tokens)}</del>;
    case "codespan":
      return <code>{plain(decoded((token as Tokens.Codespan).text))}</code>;
    case "code": {
      const { text, lang } = token as Tokens.Code;
      return (
        <pre>
          {search ? plain(text) : (
            <Suspense fallback={plain(text)}>
              <Code code={text} language={(lang ?? "").trim().toLowerCase().split(/\s/)[0] ?? ""} />
            </Suspense>
          )}
        </pre>
      );
    }
    case "displayTex":
    case "tex": {
      const formula = (token as unknown as { formula: Formula }).formula;
      return (
        <Suspense fallback={<code>{plain(formula.raw)}</code>}>
          <Tex key={formula.raw} {...formula} />
        </Suspense>
      );
    }
    case "list": {
      const list = token as Tokens.List;
      const items = list.items.map((item, i) => (
        <li key={i}>
          {item.task && <span aria-label={item.checked ? "done" : "open"}>{item.checked ? "☑ " : "☐ "}</span>}
          {inner(item.tokens.filter((part) => part.type !== "checkbox"))}
        </li>
      ));
      return list.ordered ? <ol start={list.start === "" ? undefined : list.start}>{items}</ol> : <ul>{items}</ul>;
    }
    case "table": {
      const table = token as Tokens.Table;
      return (
        <div className="scroll">
          <table>
            <thead>
              <tr>{table.header.map((cell, i) => <th key={i}>{inner(cell.tokens)}</th>)}</tr>
            </thead>
            <tbody>
              {table.rows.map((row, i) => (
                <tr key={i}>{row.map((cell, k) => <td key={k}>{inner(cell.tokens)}</td>)}</tr>
              ))}
            </tbody>
          </table>
        </div>
      );
    }
    case "link": {
      const link = token as Tokens.Link;
      const href = safeHref(link.href);
      if (!href) return plain(link.raw);
      return (
        <a className="link" href={href} title={href} target="_blank" rel="noreferrer noopener">
          {inner(link.tokens)}
        </a>
      );
    }
    case "image": {
      const image = token as Tokens.Image;
      return (
        <span className="fold" title={visible(image.href)}>
          [image {plain(image.text || image.href)}, not loaded]
        </span>
      );
    }
    case "escape":
      return plain((token as Tokens.Escape).text);
    case "text":
      return token.tokens ? inner(token.tokens) : plain(decoded((token as Tokens.Text).text));
    default:
      return plain(token.raw);
  }
}

/** Returns the tokens of a text, and how many characters they cover. */
export function parse(text: string): { tokens: Token[]; end: number } {
  const end = parsedLength(text);
  [formulas, formulaChars] = [0, 0];
  try {
    return { tokens: parser.lexer(text.slice(0, end)) as Token[], end };
  } catch {
    return { tokens: [], end: 0 };
  }
}

/** Renders a text as Markdown. HTML is shown as source, and so is the rest of a text that would take long to parse. */
export default function Markdown({ text, search = "" }: { text: string; search?: string }) {
  const { tokens, end } = useMemo(() => parse(text), [text]);
  return (
    <div className="md">
      <Rendered tokens={tokens} search={search} depth={0} />
      {end < text.length && <div className="verbatim"><Plain text={text.slice(end)} search={search} /></div>}
    </div>
  );
}
