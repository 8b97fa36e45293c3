import { expect, test } from "vitest";

const FILES = import.meta.glob<string>(["./**/*.{ts,tsx}", "!./**/*.test.ts"], { query: "?raw", import: "default", eager: true });

/** Returns the files that a file imports, also for their types and when a page is opened. */
function importsOf(path: string, code: string, files: Set<string>): string[] {
  return [...code.matchAll(/(?:\bfrom|\bimport\(?)\s*"(\.[^"]+)"/g)].flatMap(([, name]) => {
    const module = `.${new URL(name!, `file://${path.slice(1)}`).pathname}`;
    return [module, `${module}.ts`, `${module}.tsx`].filter((file) => files.has(file));
  });
}

/** Returns the first circle of imports that is found, from a file back to itself. */
function findCircle(code: Record<string, string>): string[] | null {
  const files = new Set(Object.keys(code));
  const done = new Set<string>();
  const visit = (file: string, way: string[]): string[] | null => {
    if (way.includes(file)) return [...way.slice(way.indexOf(file)), file];
    if (done.has(file)) return null;
    for (const imported of importsOf(file, code[file]!, files)) {
      const circle = visit(imported, [...way, file]);
      if (circle) return circle;
    }
    done.add(file);
    return null;
  };
  for (const file of files) {
    const circle = visit(file, []);
    if (circle) return circle;
  }
  return null;
}

test("no module imports itself through others: what two of them need is in a file of its own", () => {
  expect(Object.keys(FILES).length).toBeGreaterThan(80);
  expect(findCircle(FILES)?.join(" imports ") ?? null).toBeNull();
});

test("a circle is found through types and through pages that load later", () => {
  const code = {
    "./main.tsx": `import "./base.css";\nimport { App } from "./shell/App";`,
    "./shell/App.tsx": `import { type Route } from "../routes";`,
    "./routes.ts": `const load = () => import("./pages/runs/Runs");`,
    "./pages/runs/Runs.tsx": `import type { Opened } from "../../shell/App";`,
  };
  expect(findCircle(code)).toEqual(["./shell/App.tsx", "./routes.ts", "./pages/runs/Runs.tsx", "./shell/App.tsx"]);
});
