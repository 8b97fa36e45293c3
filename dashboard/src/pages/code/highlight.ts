/** Colors of code, line by line. */

import bash from "highlight.js/lib/languages/bash";
import cpp from "highlight.js/lib/languages/cpp";
import css from "highlight.js/lib/languages/css";
import ini from "highlight.js/lib/languages/ini";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import makefile from "highlight.js/lib/languages/makefile";
import markdown from "highlight.js/lib/languages/markdown";
import python from "highlight.js/lib/languages/python";
import sql from "highlight.js/lib/languages/sql";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";
import { createLowlight } from "lowlight";
import "./highlight.css";

const lowlight = createLowlight({ bash, cpp, css, ini, javascript, json, makefile, markdown, python, sql, xml, yaml });
lowlight.registerAlias({
  javascript: ["js", "ts", "typescript", "jsx", "tsx", "mjs"],
  python: ["py", "pyi"],
  bash: ["sh", "shell", "zsh"],
  cpp: ["c", "c++", "cc", "h", "hpp", "cu"],
  ini: ["toml", "cfg", "conf"],
  markdown: ["md"],
  xml: ["html", "svg"],
  yaml: ["yml"],
});

/** A piece of code with the class of its color. */
export interface Piece {
  text: string;
  className: string;
}

interface Node {
  type: string;
  value?: string;
  properties?: { className?: unknown };
  children?: Node[];
}

/** Returns the pieces of code, in order; one without a class for a language that is not known. */
export function pieces(code: string, language: string): Piece[] {
  if (!lowlight.registered(language)) return [{ text: code, className: "" }];
  const out: Piece[] = [];
  const walk = (nodes: Node[], outer: string) => {
    for (const node of nodes) {
      if (node.type === "text") out.push({ text: node.value ?? "", className: outer });
      else walk(node.children ?? [], Array.isArray(node.properties?.className) ? node.properties.className.join(" ") : outer);
    }
  };
  walk(lowlight.highlight(language, code).children as Node[], "");
  return out;
}

/** Returns the pieces of each line. */
export function lines(code: string, language: string): Piece[][] {
  const out: Piece[][] = [[]];
  for (const { text, className } of pieces(code, language)) {
    text.split("\n").forEach((part, i) => {
      if (i > 0) out.push([]);
      if (part) out.at(-1)!.push({ text: part, className });
    });
  }
  return out;
}

/** Returns the language of a file by its name: the end, or the whole name of a Makefile. */
export function languageOf(path: string): string {
  const name = path.split("/").at(-1)!.toLowerCase();
  return name.includes(".") ? name.split(".").at(-1)! : name;
}
