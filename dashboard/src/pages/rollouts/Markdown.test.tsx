import katex from "katex";
import { renderToStaticMarkup } from "react-dom/server";
import { prerender } from "react-dom/static";
import { expect, test, vi } from "vitest";
import Markdown, { parse, parsedLength } from "./Markdown";
import { KATEX } from "./math";
import { Clipped, Plain } from "../../text/SafeText";

vi.mock("./Tex", () => ({ default: ({ tex, display }: { tex: string; display: boolean }) => <var className={display ? "block" : "inline"}>{tex}</var> }));

const html = (text: string, search = "") => renderToStaticMarkup(<Markdown text={text} search={search} />);

test("HTML of a model is shown, not parsed", () => {
  const page = html("<script>alert(1)</script>\n\nhi <img src=x onerror=alert(1)> <b onclick=x>bold</b>");
  expect(page).not.toMatch(/<(script|img|b)\b/);
  expect(page).toContain("&lt;script&gt;");
});

test("remote images are not loaded", () => {
  const page = html("![a cat](https://example.org/cat.png)");
  expect(page).not.toContain("<img");
  expect(page).toContain("a cat, not loaded");
});

test("links are http only, and leak no referrer", () => {
  expect(html("[x](javascript:alert(1))")).not.toContain("href");
  expect(html("[x](data:text/html,1)")).not.toContain("href");
  expect(html("[x](https://example.org)")).toContain('rel="noreferrer noopener"');
});

test.each(["9*5*7", "x**2 + y**2", "(2+3)*4*(5-1)", "a*(b+c)*d"])("%s keeps its asterisks", (text) => {
  expect(html(text)).toBe(`<div class="md"><p>${text}</p></div>`);
});

test.each([
  ["so *this* and **that**", "so <em>this</em> and <b>that</b>"],
  ["**Answer:** 42", "<b>Answer:</b> 42"],
  ["答案**42**是", "答案<b>42</b>是"],
])("%s is emphasized", (text, shown) => {
  expect(html(text)).toBe(`<div class="md"><p>${shown}</p></div>`);
});

/** The page when its formulas and code have arrived. */
async function whole(text: string): Promise<string> {
  const { prelude } = await prerender(<Markdown text={text} />);
  return (await new Response(prelude).text()).replaceAll("<!--$-->", "").replaceAll("<!--/$-->", "");
}

test.each([
  ["$x^2$", "inline"],
  ["\\(x^2\\)", "inline"],
  ["$$x^2$$", "block"],
  ["\\[x^2\\]", "block"],
])("%s within a sentence is a formula, %s", async (text, kind) => {
  expect(await whole(`before ${text} after`)).toBe(`<div class="md"><p>before <var class="${kind}">x^2</var> after</p></div>`);
});

test.each(["$$\na\n+ b\n$$", "\\[\na\n+ b\n\\]"])("%s over several lines is one block", async (text) => {
  expect(await whole(`so\n${text}\nend`)).toContain('<var class="block">a\n+ b</var>');
});

test("what stands in a formula is no Markdown", async () => {
  expect(await whole("$a_1*b_2*c$ and $d_3$")).toBe('<div class="md"><p><var class="inline">a_1*b_2*c</var> and <var class="inline">d_3</var></p></div>');
  expect(await whole("- **so** \\(x\\)")).toContain('<b>so</b> <var class="inline">x</var>');
});

test("formulas in code, prices and escaped dollars are text", async () => {
  for (const text of ["`$x$`", "```\n$x$\n```", "It costs $5 or $6.", "\\$x\\$", "an open $x"]) expect(await whole(text), text).not.toContain("<var");
  expect(await whole("It costs $5 or $6.")).toContain("It costs $5 or $6.");
});

test("a formula cannot link, load, or expand without end", () => {
  const set = (tex: string) => katex.renderToString(tex, { ...KATEX, displayMode: false });
  expect(set("x^2")).toContain("katex");
  expect(set("\\href{javascript:alert(1)}{x}")).not.toMatch(/<a[\s>]/);
  expect(set("\\includegraphics{https://example.org/x.png}")).not.toContain("<img");
  expect(set("\\htmlClass{a}{x}")).not.toContain('class="a"');
  expect(() => set("\\def\\a{\\a\\a}\\a")).toThrow();
});

test("Markdown of answers becomes elements", async () => {
  const page = await whole("# T\n\n1. **a**\n2. `b`\n\n| x |\n|---|\n| 1 |\n\n```python\nprint(1)\n```");
  for (const part of ["<ol start=\"1\">", "<b>a</b>", "<code>b</code>", "<table>", '<pre><span class="hljs-built_in">print</span>']) expect(page).toContain(part);
});

test("bidi controls in Markdown are marks", () => {
  expect(html("a\u202eb")).toContain("U+202E");
});

test("matches of the search are marked", () => {
  expect(html("the answer is 5", "Answer")).toContain("<mark>answer</mark>");
});

test("a line of 10 MB renders its start and offers the rest", () => {
  const page = renderToStaticMarkup(<Clipped text={"x".repeat(10_000_000)}>{(shown) => <Plain text={shown} />}</Clipped>);
  expect(page.split("<p")[0]).toBe("x".repeat(20_000));
  expect(page).toContain("9\u202f980\u202f000 more characters.");
  expect(page).toContain("Show all");
});

test("a text at its limit offers nothing", () => {
  const page = (length: number) => renderToStaticMarkup(<Clipped text={"x".repeat(length)} limit={100}>{(shown) => <Plain text={shown} />}</Clipped>);
  expect(page(100)).toBe("x".repeat(100));
  expect(page(101)).toContain("1 more characters");
});

// Marks, quotes, lists and formulas in numbers that no person writes. Without limits, the first takes 2 s.
test.each(["[", "*a**b_", "_a", "a*", "> ", "1. ", "- a\n", "a\n\n", "$a$ ", "|a|\n", "[a]("])("%j repeated does not block the page, and nothing of it is lost", (mark) => {
  const text = "First, **one**.\n\n" + mark.repeat(60_000 / mark.length);
  const began = performance.now();
  const { tokens, end } = parse(text);
  expect(performance.now() - began).toBeLessThan(1000); // 0.1 s on a quiet machine
  expect(tokens.length).toBeGreaterThan(0);
  expect(end).toBe(parsedLength(text));
  expect(html(text).replace(/<[^>]*>/g, "")).toContain("First, one.");
});

test("a long answer of many paragraphs is parsed to its end", () => {
  const answer = "We set $x_1 = \\frac{a}{b}$ and use `f(x)`, see [the *rule*](https://example.org).\n- so **x** is 4\n\n".repeat(400);
  expect(parsedLength(answer)).toBe(answer.length);
});
