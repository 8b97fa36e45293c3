/** All metrics by section and group, with their trend and last value. */

import { useVirtualizer } from "@tanstack/react-virtual";
import { useMemo, useRef, useState } from "react";
import { columnOf, type DrawnRun } from "../../charts/runs";
import { lastRow } from "../../charts/math";
import { isEval } from "../../charts/data";
import { isSparse } from "../../charts/sources";
import { Spark } from "../../charts/Spark";
import { count, number } from "../../format";
import { useParam } from "../../state/url";
import { DRAGGED_METRIC } from "./Grip";
import { treeRows } from "./tree";
import { visible } from "../../text/hostile";

const ROW = 20;
const SECTION = 28;

interface MetricTreeProps {
  run: DrawnRun;
  names: string[];
  shown: Set<string>;
  toggle: (metric: string) => void;
  open: (metric: string) => void;
  /** On a narrow page the tree lies over it, when it is opened. */
  opened: boolean;
  close: () => void;
}

export function MetricTree({ run, names, shown, toggle, open, opened, close }: MetricTreeProps) {
  const [search, setSearch] = useParam("search");
  const [closed, setClosed] = useState<Set<string>>(new Set());
  const list = useRef<HTMLDivElement>(null);
  const rows = useMemo(() => treeRows(names, search, closed), [names, search, closed]);
  const virtual = useVirtualizer({
    count: rows.length,
    getScrollElement: () => list.current,
    estimateSize: (i) => (rows[i]!.kind === "section" ? SECTION : ROW),
    getItemKey: (i) => `${rows[i]!.kind}${rows[i]!.name}`,
    overscan: 20,
  });
  // One row at a time is reached by Tab, the others from there by arrows: there are hundreds.
  const [at, setAt] = useState(0);
  const inView = virtual.getVirtualItems().map((item) => item.index).filter((index) => rows[index]!.kind !== "group");
  const stop = inView.includes(at) ? at : inView[0];
  const move = (event: React.KeyboardEvent) => {
    const by = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (by === 0 || stop === undefined) return;
    event.preventDefault();
    let next = stop + by;
    while (rows[next]?.kind === "group") next += by;
    if (!rows[next]) return;
    setAt(next);
    virtual.scrollToIndex(next);
    requestAnimationFrame(() => list.current?.querySelector<HTMLElement>(`button[data-row="${next}"]`)?.focus());
  };
  const fold = (section: string) =>
    setClosed((old) => {
      const next = new Set(old);
      if (!next.delete(section)) next.add(section);
      return next;
    });
  return (
    <aside className={`tree ${opened ? "opened" : ""}`} aria-label="Metrics">
      <div className="hd">
        <button className="btn narrow" onClick={close}>
          Close
        </button>
        <input className="field" type="search" placeholder={`Filter ${count(names.length)} metrics`} aria-label="Filter metrics" value={search} onChange={(event) => setSearch(event.target.value, true)} />
        <div className="cols s f">
          <span>section / group / metric</span>
          <span>trend</span>
          <span className="r">last</span>
        </div>
      </div>
      <div className="ls" ref={list} onKeyDown={move}>
        <div style={{ height: virtual.getTotalSize(), position: "relative" }}>
          {virtual.getVirtualItems().map((item) => {
            const row = rows[item.index]!;
            const style = { transform: `translateY(${item.start}px)`, height: item.size };
            const reached = { tabIndex: item.index === stop ? 0 : -1, "data-row": item.index, onFocus: () => setAt(item.index) };
            if (row.kind === "section")
              return (
                <button key={item.key} {...reached} className="tr g0" style={style} aria-expanded={!closed.has(row.name)} onClick={() => fold(row.name)}>
                  <span className="cut">
                    {closed.has(row.name) && !search ? "▸ " : ""}
                    {row.label}
                  </span>
                  <span />
                  <span className="f r">{count(row.count)}</span>
                </button>
              );
            if (row.kind === "group")
              return (
                <div key={item.key} className="tr g1" style={style}>
                  <span className="cut">{row.label}</span>
                </div>
              );
            const values = columnOf(run, row.name)?.values ?? [];
            const last = lastRow(values);
            const on = shown.has(row.name);
            return (
              <div key={item.key} className={`tr mm ${on ? "on" : ""}`} style={style} title={visible(row.name)} draggable onDragStart={(event) => event.dataTransfer.setData(DRAGGED_METRIC, row.name)}>
                <input type="checkbox" {...reached} checked={on} onChange={() => toggle(row.name)} aria-label={`Show a chart of ${visible(row.name)}`} />
                <button {...reached} className="cut" style={{ paddingLeft: row.depth === 2 ? 12 : 0 }} onClick={() => open(row.name)}>
                  <Middle text={row.label} />
                </button>
                <Spark values={isSparse(row.name) || isEval(row.name) ? values.filter((value) => value !== null) : values} height={14} keep={0.5} raw={false} color="var(--ink2)" />
                <span className="r d">{number(last < 0 ? null : values[last])}</span>
              </div>
            );
          })}
        </div>
        {rows.length === 0 && <p className="none f">No metric has this name.</p>}
      </div>
    </aside>
  );
}

const LONGEST = 22;

/** Names differ at their ends: a long one is cut in the middle. */
function Middle({ text }: { text: string }) {
  return text.length <= LONGEST ? text : `${text.slice(0, 11)}…${text.slice(-10)}`;
}
