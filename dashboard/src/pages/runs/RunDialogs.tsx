/** Dialogs about chosen runs: their tags, and the name of one. Both are the user's own: the runs do not change. */

import { useState } from "react";
import { FieldForm } from "../../shell/controls";
import { Dialog } from "../../shell/Dialog";
import { useLabels, useTags } from "../../state/labels";
import type { RunRow } from "../../types";
import { visible } from "../../text/hostile";

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

export function TagDialog({ runs, all, close }: { runs: RunRow[]; all: RunRow[]; close: () => void }) {
  const tags = useTags();
  const [text, setText] = useState("");
  const keys = runs.map((run) => run.key);
  const known = [...new Set(all.flatMap(tags.own))].sort();
  const add = () => {
    tags.set(keys, text.trim(), true);
    setText("");
  };
  return (
    <Dialog close={close} title={runs.length === 1 ? `Tags of ${visible(runs[0]!.name)}` : `Tags of ${runs.length} runs`}>
      <FieldForm label="New tag" placeholder="New tag" maxLength={40} value={text} change={setText} submit={add} button="Add" />
      <ul className="choose">
        {known.map((tag) => {
          const number = runs.filter((run) => tags.own(run).includes(tag)).length;
          return (
            <li key={tag}>
              <label>
                <input
                  type="checkbox"
                  checked={number === runs.length}
                  ref={(box) => {
                    if (box) box.indeterminate = number > 0 && number < runs.length;
                  }}
                  onChange={(event) => tags.set(keys, tag, event.target.checked)}
                />
                <span className="cut">{tag}</span>
              </label>
            </li>
          );
        })}
      </ul>
      {tags.error && <p className="w">{tags.error.message}</p>}
      <p className="f s">Tags of the config ({[...new Set(runs.flatMap((run) => run.tags))].map(visible).join(", ") || "none"}) stay as the run has them.</p>
    </Dialog>
  );
}
