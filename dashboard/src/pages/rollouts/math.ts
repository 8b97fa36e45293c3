/** Finds LaTeX in its four delimiters: $…$, $$…$$, \(…\), \[…\]. */

export interface Tex {
  raw: string;
  tex: string;
  display: boolean;
}

/* A dollar opens inline math when no blank follows it, and closes it when no blank precedes and no digit follows,
   so that prices ("$5 and $6") stay text. */
const FORMS: [RegExp, boolean][] = [
  [/^\$\$([^$][\s\S]{0,4000}?)\$\$/, true],
  [/^\\\[([\s\S]{1,4000}?)\\\]/, true],
  [/^\\\(([\s\S]{1,4000}?)\\\)/, false],
  [/^\$(?![\s$])((?:\\.|[^$\\\n]){1,1000}?)(?<![\s\\])\$(?!\d)/, false],
];

/** Returns the formula at the start of a text, or null. */
export function texAt(text: string): Tex | null {
  for (const [form, display] of FORMS) {
    const match = form.exec(text);
    if (match?.[1]?.trim()) return { raw: match[0], tex: match[1].trim(), display };
  }
  return null;
}

/** Index of the next possible start of a formula, or -1. */
export function nextTex(text: string): number {
  return text.search(/\$|\\\(|\\\[/);
}

/** How formulas of a model are set: no links, files or classes, and a bound on macros and sizes. */
export const KATEX = { trust: false, strict: "ignore", maxExpand: 300, maxSize: 20, throwOnError: true } as const;
