/** Logs: all processes of the run in one list; a line leads to its moment on the timeline. */

import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useMemo, useRef, useState } from "react";
import { get, runPath } from "../../api";
import { count, moment } from "../../format";
import { Failure, Quiet } from "../../shell/Quiet";
import { Segments, Select } from "../../shell/controls";
import { useKeys } from "../../shell/keys";
import { useVersion } from "../../state/live";
import { mayPass, Reader } from "../../state/resource";
import { useRunId, useRunInfo, useStatus } from "../../state/run";
import { timesOf, useSteps } from "../../state/steps";
import { elsewhere, format, place, setParams, usePlace, useRange, useSearchText } from "../../state/url";
import { clip, visible } from "../../text/hostile";
import { Plain } from "../../text/SafeText";
import type { LogLine, Logs as LogPage } from "../../types";
import { clockTime, fold, isBefore, join, LEVELS, newest } from "./lines";
import "../panes.css";
import "./logs.css";

const PAGE_ROWS = 400;
/** Rows of one request for new lines: the server's limit. */
const FRESH_ROWS = 10_000;
const AROUND_SECONDS = 5;
const LINE = 20;

interface State {
  query: object;
  rows: LogLine[];
  /** Whether the first line of the record, or of what the filters leave, is among the rows. */
  begin: boolean;
  /** Whether there may be later lines that were not read. */
  more: boolean;
  error: Error | null;
}

export function Logs() {
  const run = useRunId();
  const { params } = usePlace();
  const info = useRunInfo(run).data;
  const { live } = useStatus(run);
  const version = useVersion(run, "logs");
  const level = params.level ?? "";
  const component = params.component ?? "";
  const source = params.source ?? "";
  const search = params.search ?? "";
  const { steps } = useSteps(run);
  const [range, setRange] = useRange();
  const { start, end } = timesOf(steps, range);
  const filters = { level, component, source, search, start, end };
  // With a time in the address, the lines around it; else the newest ones.
  const query = useMemo(() => ({ ...filters, at: params.at ?? "" }), [level, component, source, search, start, end, params.at]);
  const [state, setState] = useState<State | null>(null);
  const [names, setNames] = useState<{ components: string[]; sources: string[] }>({ components: [], sources: [] });
  const current = state?.query === query ? state : null;
  const shown = current ?? state;
  const busy = useRef(false);
  const follows = useRef(true);

  const [draft, setDraft] = useSearchText();

  const read = (query: object, rows: number, signal?: AbortSignal) => get<LogPage>(runPath(run, "logs"), { ...query, limit: rows }, signal);
  const change = (changed: (old: State) => Partial<State>) => setState((old) => (old?.query === query ? { ...old, ...changed(old) } : old));

  const first = async (signal: AbortSignal): Promise<number> => {
    const page = await read(query, PAGE_ROWS, signal);
    setNames(page);
    const early = query.at ? page.rows.filter((row) => (row.time ?? 0) < Number(query.at)).length : page.rows.length;
    const half = query.at ? PAGE_ROWS / 2 : PAGE_ROWS;
    setState({ query, rows: page.rows, begin: early < half, more: page.rows.length - early >= half, error: null });
    return page.next;
  };
  // Lines of several files arrive out of order. Lines after a gap are loaded when the page is scrolled there.
  const fresh = async (since: number, signal: AbortSignal): Promise<number> => {
    const page = await read({ ...filters, since }, FRESH_ROWS, signal);
    setNames(page);
    change((old) => {
      const rows = join(old.rows, old.more ? page.rows.filter((row) => isBefore(row, old.rows.at(-1)!)) : page.rows);
      const kept = follows.current ? newest(rows) : rows;
      return { rows: kept, begin: old.begin && kept.length === rows.length, error: null };
    });
    return page.rows.length === FRESH_ROWS ? fresh(page.next, signal) : page.next;
  };

  // Loads the first page of a query, and the new rows whenever the table grows. A read that takes longer than the table needs to
  // grow goes on.
  const reader = useRef<Reader>(null);
  useEffect(() => {
    const abort = new AbortController();
    let next: number | null = null;
    const load = async () => {
      try {
        next = await (next === null ? first(abort.signal) : fresh(next, abort.signal));
      } catch (error) {
        if (abort.signal.aborted) return false;
        setState((old) => (old?.query === query ? { ...old, error: error as Error } : { query, rows: [], begin: true, more: false, error: error as Error }));
        return mayPass(error);
      }
    };
    reader.current = new Reader(load, () => !abort.signal.aborted);
    return () => abort.abort();
  }, [run, query]);
  useEffect(() => void reader.current?.want(version), [run, query, version]);

  const once = (start: () => Promise<void>) => {
    if (busy.current) return;
    busy.current = true;
    // A page that failed is asked for again at the next movement.
    start().catch(() => undefined).finally(() => (busy.current = false));
  };
  const older = () => {
    const first = current?.rows[0];
    if (!first || current.begin) return;
    const height = rows.getTotalSize();
    once(() =>
      read({ ...filters, before: first.row }, PAGE_ROWS).then((page) => {
        change((old) => ({ rows: join(page.rows, old.rows), begin: page.rows.length < PAGE_ROWS }));
        requestAnimationFrame(() => box.current && (box.current.scrollTop += rows.getTotalSize() - height));
      }),
    );
  };

  const later = () =>
    once(() => read({ ...filters, after: current!.rows.at(-1)!.row }, PAGE_ROWS).then((page) => change((old) => ({ rows: join(old.rows, page.rows), more: page.rows.length === PAGE_ROWS }))));

  const box = useRef<HTMLDivElement>(null);
  const lines = shown?.rows ?? [];
  const rows = useVirtualizer({
    count: lines.length,
    getScrollElement: () => box.current,
    estimateSize: (index) => LINE * Math.min(24, (lines[index]?.message?.match(/\n/g)?.length ?? 0) + 1),
    getItemKey: (index) => lines[index]!.row,
    overscan: 20,
  });
  const [atEnd, setAtEnd] = useState(true);
  const follow = params.at === undefined && atEnd;
  follows.current = follow;
  useEffect(() => {
    if (follow && lines.length) rows.scrollToIndex(lines.length - 1, { align: "end" });
  }, [lines.length, shown?.query, follow]);
  const at = Number(params.at ?? NaN);
  useEffect(() => {
    if (Number.isNaN(at) || lines.length === 0) return;
    const index = lines.findIndex((row) => (row.time ?? 0) >= at);
    rows.scrollToIndex(index < 0 ? lines.length - 1 : index, { align: "center" });
  }, [current?.query]);
  const scrolled = () => {
    const element = box.current!;
    const below = element.scrollHeight - element.scrollTop - element.clientHeight;
    setAtEnd(below < 2 * LINE && !current?.more);
    if (element.scrollTop < 10 * LINE) older();
    if (below < 10 * LINE && current?.more) later();
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
  const known = [...new Set([...names.components, component].filter(Boolean))].sort();
  const filtered = level || component || source || search || range;
  return (
    <div className="page logs">
      <div className="tools">
        <input className="field" type="search" placeholder="Search all lines" aria-label="Search all lines" value={draft} onChange={(event) => setDraft(event.target.value)} />
        <Segments label="Lowest level" value={level} options={LEVELS} choose={(next) => setParams({ level: next })} />
        {known.length > 1 && (
          <span className="d nb">
            Process <Select label="Process" className="source" value={component} options={[["", `all ${known.length}`], ...known.map((one) => [one, one] as const)]} choose={(next) => setParams({ component: next })} />
          </span>
        )}
        {(names.sources.length > 1 || source) && (
          <span className="d nb">
            File <Select label="File" className="source" value={source} options={[["", "all"], ...names.sources.map((one) => [one, one] as const)]} choose={(next) => setParams({ source: next })} />
          </span>
        )}
        <span className="d end">
          {count(lines.length)} {current?.begin && !current.more ? (lines.length === 1 ? "line" : "lines") : query.at ? "lines around" : "newest lines"}
          {range && (
            <>
              {" "}
              of{" "}
              <button className="link" title="All lines" onClick={() => setRange(null)}>
                steps {range.from} to {range.to}
              </button>
            </>
          )}
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
              const level = row.level ?? "INFO";
              const marked = (row.time ?? 0) >= at && (lines[item.index - 1]?.time ?? -Infinity) < at;
              return (
                <div key={item.key} ref={rows.measureElement} data-index={item.index} className={`lg ${level.toLowerCase()}${marked ? " at" : ""}`} style={{ transform: `translateY(${item.start}px)` }}>
                  {row.time === null ? (
                    <span />
                  ) : (
                    <a className="time" href={momentOf(row.time, origin)} title={`${moment(row.time)}: show on the timeline`}>
                      {clockTime(row.time)}
                    </a>
                  )}
                  <span className="lv">{level === "INFO" ? "" : level.toLowerCase()}</span>
                  <span className="cut f" title={visible([row.component, row.source, row.process === null ? "" : `process ${row.process}`].filter(Boolean).join(", "))}>
                    {visible(row.component ?? "")}
                  </span>
                  <Message text={row.message ?? ""} search={search} />
                  <span className="cut f pl" title={visible(row.place ?? "")}>
                    {visible(row.place?.replace(/^telescope\./, "") ?? "")}
                  </span>
                </div>
              );
            })}
          </div>
        </div>
      )}
    </div>
  );
}

function momentOf(time: number, origin: number): string {
  const at = time - origin;
  return format(elsewhere(place(), { page: "timeline" }, { t: `${(at - AROUND_SECONDS).toFixed(3)}-${(at + AROUND_SECONDS).toFixed(3)}` }));
}

function Message({ text, search }: { text: string; search: string }) {
  const [open, setOpen] = useState(false);
  const { head, hidden, tail } = fold(text, open ? Infinity : undefined);
  const begin = clip(head, open ? Infinity : undefined);
  return (
    <span className="msgt">
      <Plain text={begin.shown} search={search} />
      {(hidden > 0 || begin.hidden > 0) && (
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
