import { expect, test } from "vitest";
import { wrapped } from "./picture";

test("a legend goes on in the next line, and a label that is wider than the picture has its own", () => {
  const labels = ["aa", "bb", "cccccccccccc", "d"].map((text) => ({ text, color: "--c1" }));
  const lines = wrapped(labels, 80, (text) => 10 * text.length);
  expect(lines.map((line) => line.map((label) => label.text).join(" "))).toEqual(["aa bb", "cccccccccccc", "d"]);
});
