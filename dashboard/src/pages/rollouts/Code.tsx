import bash from "highlight.js/lib/languages/bash";
import cpp from "highlight.js/lib/languages/cpp";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import python from "highlight.js/lib/languages/python";
import sql from "highlight.js/lib/languages/sql";
import { createLowlight } from "lowlight";
import { Fragment, useMemo } from "react";

const lowlight = createLowlight({ bash, cpp, javascript, json, python, sql });
lowlight.registerAlias({ javascript: ["js", "ts", "typescript", "jsx", "tsx"], python: ["py"], bash: ["sh", "shell"], cpp: ["c", "c++"] });

/** Longer code is shown without colors. */
const LONGEST = 20_000;

interface Node {
  type: string;
  value?: string;
  properties?: { className?: unknown };
  children?: Node[];
}

function render(nodes: Node[]): React.ReactNode {
  return nodes.map((node, i) =>
    node.type === "text" ? (
      <Fragment key={i}>{node.value}</Fragment>
    ) : (
      <span key={i} className={Array.isArray(node.properties?.className) ? node.properties.className.join(" ") : undefined}>
        {render(node.children ?? [])}
      </span>
    ),
  );
}

/** Code with colors of its language; plain when the language is unknown. */
export default function Code({ code, language }: { code: string; language: string }) {
  const nodes = useMemo(() => {
    if (code.length > LONGEST || !lowlight.registered(language)) return null;
    return lowlight.highlight(language, code).children as Node[];
  }, [code, language]);
  return <>{nodes ? render(nodes) : code}</>;
}
