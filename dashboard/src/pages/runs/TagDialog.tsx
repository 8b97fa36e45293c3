/** Gives tags to runs. They are the user's own: the runs do not change. */

import { useState } from "react";
import { FieldForm } from "../../shell/controls";
import { Dialog } from "../../shell/Dialog";
import { useTags } from "../../state/tags";
import type { RunRow } from "../../types";
import { visible } from "../../text/hostile";

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
