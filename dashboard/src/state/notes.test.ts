import { expect, test } from "vitest";
import { parseNotes, setNote } from "./notes";

const note = (id: number, step: number | null, text = "x") => ({ id, step, text });

test("notes of the whole run come first, then by step and time", () => {
  expect(parseNotes([note(3, 10), note(2, 4), note(4, null), note(1, 10)]).map((one) => one.id)).toEqual([4, 2, 1, 3]);
});

test("what is no note is left out", () => {
  expect(parseNotes([{ id: "a" }, null, note(1, 2)])).toEqual([note(1, 2)]);
  expect(parseNotes("nonsense")).toEqual([]);
});

test("a note is changed, and goes with its text", () => {
  const both = setNote([note(1, 2)], note(2, 3, "  why? "))!;
  expect(both).toEqual([note(1, 2), note(2, 3, "why?")]);
  expect(setNote(both, note(2, 3, "  "))).toEqual([note(1, 2)]);
  expect(setNote([note(1, 2)], note(1, 2, ""))).toBeNull();
});
