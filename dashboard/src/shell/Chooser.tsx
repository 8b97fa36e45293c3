/** A dialog that chooses some of many things and their order: columns of a table, charts of a page. */

import { groups } from "d3-array";
import { useMemo, useState } from "react";
import { moved, toggled } from "../lists";
import { visible } from "../text/hostile";
import { Dialog } from "./Dialog";

export interface Option {
  id: string;
  title: string;
  section: string;
  hint?: string;
}

interface ChooserProps {
  close: () => void;
  title: string;
  options: Option[];
  chosen: string[];
  onChange: (chosen: string[]) => void;
  /** Back to what it was before any choice. */
  reset: () => void;
}

const MOST_SHOWN = 200;

export function Chooser({ close, title, options, chosen, onChange, reset }: ChooserProps) {
  const [search, setSearch] = useState("");
  const [dragged, setDragged] = useState<number | null>(null);
  const known = useMemo(() => new Map(options.map((option) => [option.id, option])), [options]);
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const rest = options.filter((option) => !chosen.includes(option.id) && words.every((word) => `${option.title} ${option.id} ${option.section}`.toLowerCase().includes(word)));
  const move = (from: number, to: number) => onChange(moved(chosen, from, to));
  const key = (event: React.KeyboardEvent, at: number) => {
    const by = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (!by || !event.altKey) return;
    event.preventDefault();
    move(at, at + by);
  };
  return (
    <Dialog close={close} title={title} wide>
      <div className="chooser">
        <section>
          <h3>
            Shown, in this order
            <button className="link" onClick={reset}>
              Reset
            </button>
          </h3>
          <ol>
            {chosen.map((id, at) => (
              <li
                key={id}
                draggable
                className={dragged === at ? "held" : ""}
                onDragStart={() => setDragged(at)}
                onDragEnd={() => setDragged(null)}
                onDragOver={(event) => {
                  event.preventDefault();
                  if (dragged === null || dragged === at) return;
                  move(dragged, at);
                  setDragged(at);
                }}
                onKeyDown={(event) => key(event, at)}
              >
                <span className="grip" aria-hidden />
                <span className="cut" title={visible(id)}>
                  {visible(known.get(id)?.title ?? id)}
                </span>
                <button disabled={at === 0} aria-label={`Move ${visible(id)} up`} title="Up (Alt ↑)" onClick={() => move(at, at - 1)}>
                  ↑
                </button>
                <button disabled={at === chosen.length - 1} aria-label={`Move ${visible(id)} down`} title="Down (Alt ↓)" onClick={() => move(at, at + 1)}>
                  ↓
                </button>
                <button aria-label={`Take ${visible(id)} away`} title="Take away" onClick={() => onChange(toggled(chosen, id))}>
                  ×
                </button>
              </li>
            ))}
          </ol>
          {chosen.length === 0 && <p className="f">Nothing is shown. Choose at the right.</p>}
        </section>
        <section>
          <input className="field" type="search" placeholder="Search" aria-label="Search what can be shown" value={search} onChange={(event) => setSearch(event.target.value)} />
          <div className="options">
            {groups(rest.slice(0, MOST_SHOWN), (option) => option.section).map(([section, members]) => (
              <div key={section}>
                <h3>{section}</h3>
                {members.map((option) => (
                  <button key={option.id} onClick={() => onChange(toggled(chosen, option.id))} title={`Show ${visible(option.id)}`}>
                    <span className="cut">{visible(option.title)}</span>
                    <span className="f cut">{option.hint}</span>
                  </button>
                ))}
              </div>
            ))}
            {rest.length > MOST_SHOWN && <p className="f">{rest.length - MOST_SHOWN} more. Search for them.</p>}
            {rest.length === 0 && <p className="f">{search ? "No match." : "Everything is shown."}</p>}
          </div>
        </section>
      </div>
    </Dialog>
  );
}
