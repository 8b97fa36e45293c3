import { useMemo } from "react";
import { Plain } from "../../text/SafeText";
import { pieces } from "../code/highlight";

/** Longer code is shown without colors. */
const LONGEST = 20_000;

/** Code with colors of its language; plain when the language is unknown. */
export default function Code({ code, language }: { code: string; language: string }) {
  const shown = useMemo(() => (code.length > LONGEST ? [{ text: code, className: "" }] : pieces(code, language)), [code, language]);
  return shown.map((piece, i) => (
    <span key={i} className={piece.className || undefined}>
      <Plain text={piece.text} />
    </span>
  ));
}
