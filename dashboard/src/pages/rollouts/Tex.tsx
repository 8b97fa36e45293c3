import katex from "katex";
import "katex/dist/katex.min.css";
import { useLayoutEffect, useRef, useState } from "react";
import { hasHidden } from "../../text/hostile";
import { Plain } from "../../text/SafeText";
import { KATEX } from "./math";

/** A formula, set by KaTeX into its own element: no HTML of a model is parsed. Shows the source when it is not LaTeX. */
export default function Tex({ tex, raw, display }: { tex: string; raw: string; display: boolean }) {
  const box = useRef<HTMLSpanElement>(null);
  const [failed, setFailed] = useState(false);
  useLayoutEffect(() => {
    if (!box.current) return;
    try {
      katex.render(tex, box.current, { ...KATEX, displayMode: display });
    } catch {
      setFailed(true);
    }
  }, [tex, display]);
  if (failed || hasHidden(raw))
    return (
      <code>
        <Plain text={raw} />
      </code>
    );
  return <span ref={box} className={display ? "tex block" : "tex"} />;
}
