import { expect, test } from "vitest";

const STYLES = import.meta.glob<string>("./pages/**/*.css", { query: "?raw", import: "default", eager: true });
const VIEWS = import.meta.glob<string>("./**/*.tsx", { query: "?raw", import: "default", eager: true });
/** Styles that several pages import. */
const SHARED = ["./pages/panes.css"];

/** Returns the part of the dashboard that a file belongs to: `rollouts`, or the folder outside of the pages. */
const partOf = (path: string): string => /^\.\/(?:pages\/)?([^/.]+)/.exec(path)![1]!.toLowerCase();

/** Returns the classes that begin a selector: what they style need not be inside of anything else. */
const outermost = (css: string): string[] => [...css.replace(/\/\*.*?\*\//gs, "").matchAll(/(?:^|[{},])\s*\.([\w-]+)/g)].map((match) => match[1]!);

/** Returns the classes in the attributes of a view, also those of conditions. */
function used(view: string): Set<string> {
  const quoted = (code: string) => [...code.matchAll(/"([^"]*)"/g)].map((match) => match[1]!).join(" ");
  const words = [...view.matchAll(/className=(?:"([^"]*)"|\{`([^`]*)`\}|\{([^{}`]*)\})/g)].map(
    ([, plain, template, code]) => plain ?? (template === undefined ? quoted(code!) : `${template.replace(/\$\{.*?\}/g, " ")} ${quoted(template)}`),
  );
  return new Set(words.join(" ").split(/\s+/));
}

test("styles of a page, which stay when another one opens, style nothing there", () => {
  const collisions = Object.entries(STYLES).flatMap(([sheet, css]) => {
    if (SHARED.includes(sheet)) return [];
    const names = new Set(outermost(css));
    return Object.entries(VIEWS).flatMap(([path, view]) => {
      const imported = view.includes(`/${sheet.split("/").at(-1)}"`);
      if (partOf(path) === partOf(sheet) || imported) return [];
      return [...used(view)].filter((name) => names.has(name)).map((name) => `${path} uses .${name} of ${sheet}`);
    });
  });
  expect(collisions).toEqual([]);
});
