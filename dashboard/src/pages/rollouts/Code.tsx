import { Fragment, useMemo } from "react";
import { pieces } from "../code/highlight";

/** Longer code is shown without colors. */
const LONGEST = 20_000;

/** Code with colors of its language; plain when the language is unknown. */
export default function Code({ code, language }: { code: string; language: string }) {
  const shown = useMemo(() => (code.length > LONGEST ? null : pieces(code, language)), [code, language]);
  if (!shown) return <>{code}</>;
  return (
    <>
      {shown.map((piece, i) => (
        <Fragment key={i}>{piece.className ? <span className={piece.className}>{piece.text}</span> : piece.text}</Fragment>
      ))}
    </>
  );
}
