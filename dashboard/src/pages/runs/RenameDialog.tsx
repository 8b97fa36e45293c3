/** Renames a run for this user. The run itself does not change. */

import { useState } from "react";
import { FieldForm } from "../../shell/controls";
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
    <Dialog close={close} title={`Name of ${run.id}`}>
      <FieldForm label="Name" maxLength={120} value={name} change={setName} submit={keep} button="Rename">
        <button type="button" className="btn" onClick={() => keep("")}>
          Its own name
        </button>
      </FieldForm>
      <p className="f s">All pages show this name to you. The run itself does not change.</p>
    </Dialog>
  );
}
