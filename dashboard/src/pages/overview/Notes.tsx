/** Notes of the run; the user's own, at steps. */

import { useNotes } from "../../state/notes";
import { setParams } from "../../state/url";
import { openNote } from "../../shell/NoteDialog";

export function Notes({ run }: { run: string }) {
  const { notes, error } = useNotes(run);
  return (
    <section className="sec">
      <h2>
        Notes
        <button className="link" onClick={() => openNote(null)}>
          write <kbd>n</kbd>
        </button>
      </h2>
      {error && <p className="w">{error.message}</p>}
      {notes.map((note) => (
        <div key={note.id} className="nt">
          {note.step === null ? (
            <span className="f">run</span>
          ) : (
            <button className="f" title="Select this step" onClick={() => setParams({ step: String(note.step) })}>
              step {note.step}
            </button>
          )}
          <button className="wrap" title="Change" onClick={() => openNote(note)}>
            {note.text}
          </button>
        </div>
      ))}
      {notes.length === 0 && !error && <p className="f">None yet. They are kept for you, not in the run.</p>}
    </section>
  );
}
