/** Markdown as React elements. No HTML string reaches the page, images stay links in text, and links are http only. */

import { Marked, type Token, type Tokens } from "marked";
import { Fragment, lazy, Suspense, useMemo } from "react";
import { loaded } from "../../api";
import { nextTex, texAt, type Tex as Formula } from "./math";
import { Plain } from "../../text/SafeText";

const Tex = lazy(() => loaded(() => import("./Tex")));
const Code = lazy(() => loaded(() => import("./Code")));

/** Longer texts are shown as they are: the grammar of Markdown is not made for them. */
const LONGEST = 60_000;

const parser = new Marked({ breaks: true, gfm: true });
parser.use({
  extensions: [
    {
      name: "displayTex",
      level: "block",
      start: (src) => {
        const at = src.search(/^[ \t]*(\$\$|\\\[)/m);
        return at < 0 ? undefined : at;
      },
      tokenizer: (src) => {
        const indent = /^[ \t]*/.exec(src)![0].length;
        const found = texAt(src.slice(indent));
        if (!found?.display || !/^[ \t]*(\n|$)/.test(src.slice(indent + found.raw.length))) return undefined;
        return { type: "displayTex", raw: src.slice(0, indent + found.raw.length), formula: found };
      },
    },
    {
      name: "tex",
      level: "inline",
      start: (src) => {
        const at = nextTex(src);
        return at < 0 ? undefined : at;
      },
      tokenizer: (src) => {
        const found = texAt(src);
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

function Rendered({ tokens, search }: { tokens: Token[] | undefined; search: string }) {
  return (tokens ?? []).map((token, i) => <One key={i} token={token} search={search} />);
}

function One({ token, search }: { token: Token; search: string }): React.ReactNode {
  const inner = (tokens: Token[] | undefined) => <Rendered tokens={tokens} search={search} />;
  const plain = (text: string) => <Plain text={text} search={search} />;
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
            <Suspense fallback={text}>
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
        <Suspense fallback={<code>{formula.raw}</code>}>
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
        <span className="fold" title={image.href}>
          [image {image.text || image.href}, not loaded]
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

/** Returns a text as Markdown. HTML in it is shown as written. */
export default function Markdown({ text, search = "" }: { text: string; search?: string }) {
  const tokens = useMemo(() => {
    if (text.length > LONGEST) return null;
    try {
      return parser.lexer(text) as Token[];
    } catch {
      return null;
    }
  }, [text]);
  if (!tokens) return <div className="md verbatim"><Plain text={text} search={search} /></div>;
  return (
    <div className="md">
      {tokens.map((token, i) => (
        <Fragment key={i}>
          <One token={token} search={search} />
        </Fragment>
      ))}
    </div>
  );
}
