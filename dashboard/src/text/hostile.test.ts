import { expect, test } from "vitest";
import { CLIP_CHARS, clip, hasHidden, pieces, splitMatches } from "./hostile";

test("bidi controls become visible marks", () => {
  expect(pieces("a\u202eb")).toEqual([
    { text: "a" },
    { text: "U+202E", mark: "right-to-left override" },
    { text: "b" },
  ]);
});

test("an ANSI sequence is one mark and cannot reach a terminal", () => {
  const [mark] = pieces("\u001b[31mred");
  expect(mark).toEqual({ text: "ESC[31m", mark: "ANSI sequence" });
  expect(pieces("\u001b]0;title\u0007x")[0]?.mark).toBe("ANSI sequence");
});

test("line ends and tabs stay as they are", () => {
  expect(pieces("a\tb\r\nc").map((p) => p.text).join("")).toBe("a\tb\nc");
  expect(hasHidden("a\tb\nc")).toBe(false);
});

test("script text stays text", () => {
  const hostile = "<script>alert(1)</script><img src=x onerror=alert(1)>";
  expect(pieces(hostile)).toEqual([{ text: hostile }]);
});

test("a line of 10 MB is clipped and says by how much", () => {
  const { shown, hidden } = clip("x".repeat(10_000_000));
  expect(shown.length).toBe(CLIP_CHARS);
  expect(hidden).toBe(10_000_000 - CLIP_CHARS);
});

test("a text of the limit is whole, one character more is not", () => {
  expect(clip("abc", 3)).toEqual({ shown: "abc", hidden: 0 });
  expect(clip("abcd", 3)).toEqual({ shown: "abc", hidden: 1 });
  expect(clip("", 3)).toEqual({ shown: "", hidden: 0 });
  expect(clip("abcd", Infinity)).toEqual({ shown: "abcd", hidden: 0 });
});

test("clipping keeps surrogate pairs whole, and counts what it leaves out", () => {
  expect(clip("ab😀", 3)).toEqual({ shown: "ab", hidden: 2 });
  expect(clip("ab😀c", 4)).toEqual({ shown: "ab😀", hidden: 1 });
});

test("matches alternate with the text between them", () => {
  expect(splitMatches("Foo bar foo", "foo")).toEqual(["", "Foo", " bar ", "foo", ""]);
  expect(splitMatches("abc", "")).toEqual(["abc"]);
});
