import { renderToStaticMarkup } from "react-dom/server";
import { expect, test } from "vitest";
import Markdown from "./Markdown";
import { Clipped, Plain } from "./SafeText";

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

test.each(["$x^2$", "$$x^2$$", "\\(x^2\\)", "\\[x^2\\]"])("%s is set as a formula", (text) => {
  expect(html(`before ${text} after`)).toContain(`<code>${text}</code>`);
});

test("a formula over several lines is one block", () => {
  expect(html("so\n\\[\na\n+ b\n\\]\nend")).toContain("<code>\\[\na\n+ b\n\\]</code>");
});

test("Markdown of answers becomes elements", () => {
  const page = html("# T\n\n1. **a**\n2. `b`\n\n| x |\n|---|\n| 1 |\n\n```python\nprint(1)\n```");
  for (const part of ["<ol start=\"1\">", "<b>a</b>", "<code>b</code>", "<table>", "<pre>print(1)</pre>"]) expect(page).toContain(part);
});

test("bidi controls in Markdown are marks", () => {
  expect(html("a\u202eb")).toContain("U+202E");
});

test("matches of the search are marked", () => {
  expect(html("the answer is 5", "Answer")).toContain("<mark>answer</mark>");
});

test("a line of 10 MB renders in a moment, with its start", () => {
  const started = performance.now();
  const page = renderToStaticMarkup(<Clipped text={"x".repeat(10_000_000)}>{(shown) => <Plain text={shown} />}</Clipped>);
  expect(page.length).toBeLessThan(30_000);
  expect(page).toContain("Show all");
  expect(performance.now() - started).toBeLessThan(500);
});
