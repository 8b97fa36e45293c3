/** Gives tags to runs. They are the user's own: the runs do not change. */

import { useState } from "react";
import { Dialog } from "../../shell/Dialog";
import { useTags } from "../../state/tags";
import type { RunRow } from "../../types";
import { visible } from "../../text/hostile";

export function TagDialog({ runs, all, opened, close }: { runs: RunRow[]; all: RunRow[]; opened: boolean; close: () => void }) {
  const tags = useTags();
  const [text, setText] = useState("");
  const keys = runs.map((run) => run.key);
  const known = [...new Set(all.flatMap(tags.own))].sort();
  const add = (event: React.FormEvent) => {
    event.preventDefault();
    const tag = text.trim();
    if (tag) tags.set(keys, tag, true);
    setText("");
  };
  return (
    <Dialog opened={opened} close={close} title={runs.length === 1 ? `Tags of ${visible(runs[0]!.name)}` : `Tags of ${runs.length} runs`}>
      <form className="naming" onSubmit={add}>
        <input className="field" maxLength={40} placeholder="New tag" aria-label="New tag" value={text} onChange={(event) => setText(event.target.value)} />
        <button className="btn" disabled={!text.trim()}>
          Add
        </button>
      </form>
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
