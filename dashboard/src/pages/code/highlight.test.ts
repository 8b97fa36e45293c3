import { expect, test } from "vitest";
import { languageOf, lines, pieces } from "./highlight";

test("a text over several lines keeps its color on each", () => {
  const [first, second] = lines('x = """a\nb"""', "python");
  expect(first!.at(-1)).toEqual({ text: '"""a', className: "hljs-string" });
  expect(second).toEqual([{ text: 'b"""', className: "hljs-string" }]);
});

test("the pieces are the code", () => {
  const code = "def f(x: int) -> str:\n    return f'{x}'  # why\n";
  expect(pieces(code, "py").map((piece) => piece.text).join("")).toBe(code);
  expect(lines(code, "py").map((line) => line.map((piece) => piece.text).join("")).join("\n")).toBe(code);
});

test("a language that is not known has no colors", () => {
  expect(pieces("a < b", "brainfuck")).toEqual([{ text: "a < b", className: "" }]);
});

test("the language is that of the file's name", () => {
  expect(["a/b.py", "Makefile", "x.test.ts", ".gitignore"].map(languageOf)).toEqual(["py", "makefile", "ts", "gitignore"]);
});
