/** Renames a run for this user. The run itself does not change. */

import { useState } from "react";
import { Dialog } from "../../shell/Dialog";
import { useLabels } from "../../state/labels";
import type { RunRow } from "../../types";

export function RenameDialog({ run, close }: { run: RunRow; close: () => void }) {
  const { rename } = useLabels();
  const [name, setName] = useState(run.name);
  const keep = (next: string) => {
    rename(run, next);
    close();
  };
  return (
    <Dialog opened close={close} title={`Name of ${run.id}`}>
      <form
        className="naming"
        onSubmit={(event) => {
          event.preventDefault();
          keep(name);
        }}
      >
        <input className="field" maxLength={120} aria-label="Name" value={name} onChange={(event) => setName(event.target.value)} />
        <button className="btn" disabled={!name.trim()}>
          Rename
        </button>
        <button type="button" className="btn" onClick={() => keep("")}>
          Its own name
        </button>
      </form>
      <p className="f s">All pages show this name to you. The run itself does not change.</p>
    </Dialog>
  );
}
