import { Fragment, useState } from "react";
import { count } from "../format";
import { CLIP_CHARS, clip, hasHidden, pieces, splitMatches } from "./hostile";

/** Plain text with matches of the search marked, and hidden characters shown as marks. */
export function Plain({ text, search = "" }: { text: string; search?: string }) {
  const parts = splitMatches(text, search);
  return parts.map((part, i) => (i % 2 ? <mark key={i}>{marked(part)}</mark> : <Fragment key={i}>{marked(part)}</Fragment>));
}

function marked(text: string) {
  if (!hasHidden(text)) return text;
  return pieces(text).map((piece, i) =>
    piece.mark ? (
      <span key={i} className="ctl" title={piece.mark}>
        {piece.text}
      </span>
    ) : (
      <Fragment key={i}>{piece.text}</Fragment>
    ),
  );
}

interface ClippedProps {
  text: string;
  limit?: number;
  /** A search whose match is shown even beyond the limit. */
  search?: string;
  children: (shown: string) => React.ReactNode;
}

/** Calls its child with the start of a long text, and offers the rest. */
export function Clipped({ text, limit = CLIP_CHARS, search = "", children }: ClippedProps) {
  const [all, setAll] = useState(false);
  const at = search && text.length > limit ? text.toLowerCase().indexOf(search.toLowerCase()) : -1;
  const { shown, hidden } = clip(text, all ? Infinity : Math.max(limit, at + search.length));
  return (
    <>
      {children(shown)}
      {hidden > 0 && (
        <p className="fold">
          {count(hidden)} more characters.{" "}
          <button className="link" onClick={() => setAll(true)}>
            Show all
          </button>
        </p>
      )}
    </>
  );
}
