/** Chooses the runs that are drawn over this one. */

import { useState } from "react";
import { moment, statusWord } from "../format";
import { toggled } from "../lists";
import { useLabels } from "../state/labels";
import { useRuns } from "../state/run";
import { useRunColors } from "../state/colors";
import { elsewhere, format, MOST_RUNS, setOthers, useOthers, usePlace } from "../state/url";
import type { RunRow } from "../types";
import { Dialog } from "./Dialog";
import { visible } from "../text/hostile";

export function CompareDialog({ close }: { close: () => void }) {
  const place = usePlace();
  const others = useOthers();
  const runs = useRuns().data?.runs ?? [];
  const colors = useRunColors();
  const [text, setText] = useState("");
  const { isArchived } = useLabels();
  const offered = (run: RunRow) => run.id !== place.run && (!isArchived(run) || others.includes(run.id));
  const shown = runs.filter((run) => offered(run) && `${run.name} ${run.id}`.toLowerCase().includes(text.toLowerCase()));
  return (
    <Dialog close={close} title="Draw other runs over this one">
      <input className="field" type="search" placeholder="Filter runs" aria-label="Filter runs" value={text} onChange={(event) => setText(event.target.value)} />
      <ul className="choose">
        {shown.map((run) => {
          const at = others.indexOf(run.id);
          return (
            <li key={run.id}>
              <label>
                <input type="checkbox" checked={at >= 0} disabled={at < 0 && others.length + 1 >= MOST_RUNS} onChange={() => setOthers(toggled(others, run.id))} />
                <i className="dot" style={at >= 0 ? { background: `var(${colors.of(run.id)})` } : undefined} />
                <span className="cut">
                  {visible(run.name)} {run.id !== run.name && <span className="f">{run.id}</span>}
                </span>
                <span className="f">{statusWord(run.status)}</span>
                <span className="f">{moment(run.started_at)}</span>
              </label>
            </li>
          );
        })}
        {shown.length === 0 && <li className="f">{runs.length < 2 ? "There is no other run here." : "No run has this name."}</li>}
      </ul>
      {others.length + 1 >= MOST_RUNS && <p className="f">A view has {MOST_RUNS} runs at most.</p>}
      {others.length > 0 && (
        <p>
          <a className="link" href={format(elsewhere(place, { page: "compare" }))} onClick={close}>
            Compare config and code
          </a>
        </p>
      )}
    </Dialog>
  );
}
