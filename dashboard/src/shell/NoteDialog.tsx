/** Writes or changes a note at a step of the run, from any page. */

import { useEffect, useState } from "react";
import { type Note, useNotes } from "../state/notes";
import { useSteps } from "../state/steps";
import { parseStep, usePlace } from "../state/url";
import { Dialog } from "./Dialog";
import { useKeys } from "./keys";

type Opened = { note: Note | null } | null;

let show: (opened: Opened) => void = () => {};

/** Opens the dialog; without a note, for a new one. */
export const openNote = (note: Note | null): void => show({ note });

const LONGEST = 4000;

export function NoteDialog({ run }: { run: string }) {
  const [opened, setOpened] = useState<Opened>(null);
  useEffect(() => {
    show = setOpened;
    return () => {
      show = () => {};
    };
  }, []);
  useKeys("Notes", [{ keys: ["n"], does: "write a note at this step", run: () => openNote(null) }]);
  return (
    opened && (
      <Dialog close={() => setOpened(null)} title={opened.note ? "Change the note" : "Write a note"}>
        <Form run={run} note={opened.note} close={() => setOpened(null)} />
      </Dialog>
    )
  );
}

function Form({ run, note, close }: { run: string; note: Note | null; close: () => void }) {
  const { set } = useNotes(run);
  const { steps } = useSteps(run);
  const selected = parseStep(usePlace().params.step);
  const last = steps?.step.at(-1);
  const here = note ? note.step : (selected ?? last ?? null);
  const [text, setText] = useState(note?.text ?? "");
  const [step, setStep] = useState(here === null ? "" : String(here));
  const save = (kept: string) => {
    set({ id: note?.id ?? Date.now(), step: parseStep(step), text: kept });
    close();
  };
  return (
    <form
      className="note"
      onSubmit={(event) => {
        event.preventDefault();
        if (text.trim()) save(text);
      }}
    >
      <textarea
        className="field"
        rows={5}
        maxLength={LONGEST}
        aria-label="Note"
        value={text}
        onChange={(event) => setText(event.target.value)}
        onKeyDown={(event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.currentTarget.form!.requestSubmit()}
      />
      <div>
        <label>
          at step <input className="field" inputMode="numeric" pattern="[0-9]*" placeholder="none" value={step} onChange={(event) => setStep(event.target.value)} />
        </label>
        <span className="f s">without a step it is about the whole run</span>
        <span className="grow" />
        {note && (
          <button type="button" className="link" onClick={() => save("")}>
            Delete
          </button>
        )}
        <button className="btn" disabled={!text.trim()}>
          Save <kbd>Ctrl Enter</kbd>
        </button>
      </div>
    </form>
  );
}
