/** Logs: all processes of the run in one list; a line leads to its moment on the timeline. */

import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useMemo, useRef, useState } from "react";
import { get, runPath } from "../../api";
import { count, moment } from "../../format";
import { Failure, Quiet } from "../../shell/App";
import { useKeys } from "../../shell/keys";
import { useVersion } from "../../state/live";
import { useRunId, useRunInfo, useStatus } from "../../state/run";
import { elsewhere, format, place, setParams, usePlace, useSearchText } from "../../state/url";
import { Plain } from "../rollouts/SafeText";
import { clockTime, fold, join, LEVELS, type LogPage, type LogRow } from "./lines";
import "../panes.css";
import "./logs.css";

const PAGE_ROWS = 400;
const AROUND_SECONDS = 5;
const LINE = 20;

export function Logs() {
  const run = useRunId();
  const { params } = usePlace();
  const info = useRunInfo(run).data;
  const { live } = useStatus(run);
  const version = useVersion(run, "logs");
  const level = params.level ?? "";
  const component = params.component ?? "";
  const search = params.search ?? "";
  const query = useMemo(() => ({ level, component, search }), [level, component, search]);
  const [state, setState] = useState<{ query: object; rows: LogRow[]; next: number; begin: boolean; error: Error | null } | null>(null);
  const [components, setComponents] = useState<string[]>([]);
  const current = state?.query === query ? state : null;
  const shown = current ?? state;
  const busy = useRef(false);

  const [draft, setDraft] = useSearchText();

  // The newest page of a query; then, when the table grows, what came after it.
  useEffect(() => {
    const abort = new AbortController();
    const from = current && !current.error ? current : null;
    get<LogPage>(runPath(run, "logs"), { ...query, limit: PAGE_ROWS, since: from ? from.next : null }, abort.signal)
      .then((page) => {
        setComponents(page.components);
        setState((old) => {
          const base = old?.query === query ? old : null;
          return { query, rows: join(base?.rows ?? [], page.rows), next: page.next, begin: base?.begin ?? page.rows.length < PAGE_ROWS, error: null };
        });
      })
      .catch((error: Error) => error.name !== "AbortError" && setState((old) => ({ query, rows: old?.query === query ? old.rows : [], next: 0, begin: true, error })));
    return () => abort.abort();
  }, [run, query, version]);

  const older = () => {
    const first = current?.rows[0];
    if (!first || current.begin || busy.current) return;
    busy.current = true;
    const height = rows.getTotalSize();
    get<LogPage>(runPath(run, "logs"), { ...query, before: first.row, limit: PAGE_ROWS })
      .then((page) => {
        setState((old) => (old?.query === query ? { ...old, rows: join(page.rows, old.rows), begin: page.rows.length < PAGE_ROWS } : old));
        requestAnimationFrame(() => box.current && (box.current.scrollTop += rows.getTotalSize() - height));
      })
      .catch(() => undefined)
      .finally(() => (busy.current = false));
  };

  const box = useRef<HTMLDivElement>(null);
  const lines = shown?.rows ?? [];
  const rows = useVirtualizer({
    count: lines.length,
    getScrollElement: () => box.current,
    estimateSize: (index) => LINE * Math.min(24, (lines[index]?.message.match(/\n/g)?.length ?? 0) + 1),
    getItemKey: (index) => lines[index]!.row,
    overscan: 20,
  });
  const [atEnd, setAtEnd] = useState(true);
  const follow = params.at === undefined && atEnd;
  useEffect(() => {
    if (follow && lines.length) rows.scrollToIndex(lines.length - 1, { align: "end" });
  }, [lines.length, shown?.query, follow]);
  const at = Number(params.at ?? NaN);
  useEffect(() => {
    if (Number.isNaN(at) || lines.length === 0) return;
    const index = lines.findIndex((row) => row.time >= at);
    rows.scrollToIndex(index < 0 ? lines.length - 1 : index, { align: "center" });
  }, [at, lines.length > 0]);
  const scrolled = () => {
    const element = box.current!;
    setAtEnd(element.scrollHeight - element.scrollTop - element.clientHeight < 2 * LINE);
    if (element.scrollTop < 10 * LINE) older();
  };
  const toEnd = () => {
    setParams({ at: null }, true);
    setAtEnd(true);
    rows.scrollToIndex(lines.length - 1, { align: "end" });
  };
  useKeys("Logs", [
    { keys: ["f", "G"], does: "follow the newest line", run: toEnd },
    { keys: ["e"], does: "errors and warnings only", run: () => setParams({ level: level === "WARNING" ? null : "WARNING" }) },
  ]);

  if (current?.error && lines.length === 0) return <Failure error={current.error} />;
  const origin = info?.info.started_at ?? lines[0]?.time ?? 0;
  const known = [...new Set([...components, ...lines.map((row) => row.component), component].filter(Boolean))].sort();
  const filtered = level || component || search;
  return (
    <div className="logs">
      <div className="tools">
        <input className="field" type="search" placeholder="Search all lines" aria-label="Search all lines" value={draft} onChange={(event) => setDraft(event.target.value)} />
        <div className="seg" role="group" aria-label="Lowest level">
          <button aria-pressed={level === ""} onClick={() => setParams({ level: null })}>all</button>
          {LEVELS.slice(1, 4).map((one) => (
            <button key={one} aria-pressed={level === one} onClick={() => setParams({ level: one })}>{one === "INFO" ? "info" : one === "WARNING" ? "warnings" : "errors"}</button>
          ))}
        </div>
        {known.length > 1 && (
          <div className="seg" role="group" aria-label="Component">
            <button aria-pressed={component === ""} onClick={() => setParams({ component: null })}>all parts</button>
            {known.map((one) => <button key={one} aria-pressed={component === one} onClick={() => setParams({ component: one })}>{one}</button>)}
          </div>
        )}
        <span className="d end">
          {count(lines.length)} {current?.begin ? "lines" : "newest lines"}
          {!atEnd && <> <button className="btn" onClick={toEnd}>{live ? "Follow" : "To the end"} <kbd>f</kbd></button></>}
        </span>
      </div>
      {shown && lines.length === 0 ? (
        <Quiet title={filtered ? "No line matches." : "No log line yet."} text={filtered ? "Remove a filter, or search for less." : "Lines appear here as the processes of the run write them."} />
      ) : (
        <div className="ll" ref={box} onScroll={scrolled} tabIndex={0} role="log" aria-live="off" aria-label="Log lines">
          <div style={{ height: rows.getTotalSize(), position: "relative" }}>
            {rows.getVirtualItems().map((item) => {
              const row = lines[item.index]!;
              return (
                <div key={item.key} ref={rows.measureElement} data-index={item.index} className={`lg ${row.level.toLowerCase()}${row.time >= at && (lines[item.index - 1]?.time ?? -Infinity) < at ? " at" : ""}`} style={{ transform: `translateY(${item.start}px)` }}>
                  <a className="time" href={momentOf(row, origin)} title={`${moment(row.time)}: show on the timeline`}>{clockTime(row.time)}</a>
                  <span className="lv">{row.level === "INFO" ? "" : row.level.toLowerCase()}</span>
                  <span className="cut f" title={`${row.component}${row.process === null ? "" : `, process ${row.process}`}`}>{row.component}</span>
                  <Message text={row.message} search={search} />
                  <span className="cut f pl" title={row.place ?? ""}>{row.place?.replace(/^telescope\./, "")}</span>
                </div>
              );
            })}
          </div>
        </div>
      )}
    </div>
  );
}

function momentOf(row: LogRow, origin: number): string {
  const at = row.time - origin;
  return format(elsewhere(place(), { page: "timeline" }, { t: `${(at - AROUND_SECONDS).toFixed(3)}-${(at + AROUND_SECONDS).toFixed(3)}` }));
}

function Message({ text, search }: { text: string; search: string }) {
  const [open, setOpen] = useState(false);
  const { head, hidden, tail } = fold(text, open ? Infinity : undefined);
  return (
    <span className="msgt">
      <Plain text={head.length > 20_000 && !open ? head.slice(0, 20_000) : head} search={search} />
      {(hidden > 0 || (head.length > 20_000 && !open)) && (
        <>
          {"\n"}
          <button className="link f" onClick={() => setOpen(true)}>{hidden > 0 ? `${hidden} more lines` : "show all"}</button>
          {tail && "\n"}
          <Plain text={tail} search={search} />
        </>
      )}
    </span>
  );
}
