/** Notes of a run, the user's own: a text at a step, or about the whole run. */

import { useMemo } from "react";
import { useDocument } from "./documents";

export interface Note {
  /** When it was written first, in milliseconds: its id. */
  id: number;
  /** Null: about the whole run. */
  step: number | null;
  text: string;
}

/** Returns the notes that a document holds, those of the whole run first, then by step; what has another form is left out. */
export function parseNotes(value: unknown): Note[] {
  const known = (note: Partial<Note> | null): note is Note =>
    typeof note?.id === "number" && typeof note.text === "string" && (note.step === null || typeof note.step === "number");
  return (Array.isArray(value) ? value.filter(known) : []).sort((a, b) => (a.step ?? -1) - (b.step ?? -1) || a.id - b.id);
}

/** Returns the notes with one added or changed. One without a text goes; without notes there is no document. */
export function setNote(notes: Note[], note: Note): Note[] | null {
  const rest = notes.filter((other) => other.id !== note.id);
  const text = note.text.trim();
  const all = text ? [...rest, { ...note, text }] : rest;
  return all.length > 0 ? parseNotes(all) : null;
}

export function useNotes(run: string) {
  const { value, change, error } = useDocument<unknown>("notes", run);
  const notes = useMemo(() => parseNotes(value), [value]);
  return { notes, error, set: (note: Note) => change((old) => setNote(parseNotes(old), note)) };
}
