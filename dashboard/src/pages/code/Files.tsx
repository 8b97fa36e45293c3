/** Files by section, with a filter; only those in view are drawn. */

import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useMemo, useRef, useState } from "react";
import { count } from "../../format";
import { visible } from "../../text/hostile";

export interface Entry {
  id: string;
  path: string;
  section: string;
  size?: number;
  added?: number;
  removed?: number;
}

const ROW = 20;

export function Files({ entries, chosen, choose }: { entries: Entry[]; chosen: string; choose: (id: string) => void }) {
  const [search, setSearch] = useState("");
  const host = useRef<HTMLDivElement>(null);
  const rows = useMemo(() => {
    const words = search.toLowerCase().split(/\s+/).filter(Boolean);
    const found = entries.filter((entry) => words.every((word) => entry.path.toLowerCase().includes(word)));
    return found.flatMap((entry, i): (Entry | { title: string; number: number })[] =>
      entry.section === found[i - 1]?.section ? [entry] : [{ title: entry.section, number: found.filter((other) => other.section === entry.section).length }, entry],
    );
  }, [entries, search]);
  const virtual = useVirtualizer({ count: rows.length, getScrollElement: () => host.current, estimateSize: () => ROW, overscan: 20 });
  useEffect(() => {
    const at = rows.findIndex((row) => "id" in row && row.id === chosen);
    if (at >= 0) virtual.scrollToIndex(at);
  }, [chosen, rows]);
  return (
    <nav className="files" aria-label="Files">
      <div className="hd">
        <input className="field" type="search" placeholder={entries.length === 1 ? "Filter 1 file" : `Filter ${count(entries.length)} files`} aria-label="Filter files" value={search} onChange={(event) => setSearch(event.target.value)} />
      </div>
      <div className="ls" ref={host}>
        <div style={{ height: virtual.getTotalSize(), position: "relative" }}>
          {virtual.getVirtualItems().map((item) => {
            const row = rows[item.index]!;
            const style = { transform: `translateY(${item.start}px)` };
            if ("title" in row)
              return (
                <h2 key={row.title} style={style}>
                  {row.title} <span className="f">{count(row.number)}</span>
                </h2>
              );
            const cut = row.path.lastIndexOf("/") + 1;
            return (
              <button key={row.id} style={style} aria-current={row.id === chosen ? "true" : undefined} title={visible(row.path)} onClick={() => choose(row.id)}>
                <span className="path">
                  <span className="f dir">{visible(row.path.slice(0, cut))}</span>
                  <span className="name">{visible(row.path.slice(cut))}</span>
                </span>
                {row.added !== undefined && (
                  <span className="s">
                    {row.added > 0 && <span className="plus">+{count(row.added)}</span>} {row.removed ? <span className="minus">−{count(row.removed)}</span> : ""}
                  </span>
                )}
              </button>
            );
          })}
        </div>
        {rows.length === 0 && <p className="f none">No file has this name.</p>}
      </div>
    </nav>
  );
}
