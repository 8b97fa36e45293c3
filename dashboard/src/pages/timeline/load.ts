/** Reads of the timeline: spans of the visible time, and what a step waited for. */

import { useEffect, useRef, useState } from "react";
import { get, runPath } from "../../api";
import { criticalPath, type CriticalPath, type StepSample, type StepSpan } from "./criticalPath";
import { buildLanes, type Lanes, type SpanColumns } from "./spans";
import type { View } from "./viewport";

/** Spans read at once; the server merges them per lane, kind and part of the view when there are more. */
const MOST_SPANS = 40_000;
/** Width of a part of the view whose spans are merged: room for a share of every kind. */
const SHARE_PIXELS = 8;
const STEP_SPANS = 100_000;
const EXPORT_SPANS = 500_000;
const WAIT_MS = 90;
const RETRY_MS = 2_000;
const STEP_WAIT_MS = 250;

export interface Loaded {
  from: number;
  to: number;
  lanes: Lanes;
  merged: boolean;
}


/** Reads the spans of a view for an export, merged only beyond 500,000. */
export const readForExport = (run: string, view: View) =>
  get<SpanColumns>(runPath(run, "spans"), { start: view.from, end: view.to, limit: EXPORT_SPANS, buckets: 4000 });

/** Returns spans that cover the view, half a view more on both sides, and reads again when a view needs others. */
export function useSpans(run: string, view: View | null, buckets: number, version: string): { loaded: Loaded | null; error: Error | null } {
  const [loaded, setLoaded] = useState<Loaded | null>(null);
  const [error, setError] = useState<Error | null>(null);
  const [reads, setReads] = useState(0);
  const state = useRef({ version: "", reading: false, run });
  state.current.run = run;
  const width = view ? view.to - view.from : 0;
  const stale = state.current.version !== version;
  const covers = loaded && view && loaded.from <= view.from && loaded.to >= view.to;
  const fine = loaded && (!loaded.merged || width * 4 > loaded.to - loaded.from);
  const needed = view !== null && (!covers || !fine || stale);
  useEffect(() => {
    if (!needed || !view) return;
    const timer = setTimeout(() => {
      // One read at a time, because the server finishes an aborted one too. When it ends, this effect runs again.
      if (state.current.reading) return;
      state.current.reading = true;
      const [from, to] = [view.from - width / 2, view.to + width / 2];
      get<SpanColumns>(runPath(run, "spans"), { start: from, end: to, limit: MOST_SPANS, buckets: Math.ceil((2 * buckets) / SHARE_PIXELS) })
        .then((columns) => {
          if (state.current.run !== run) return;
          state.current.version = version;
          setError(null);
          setLoaded({ from, to, lanes: buildLanes(columns), merged: Boolean(columns.merged) });
        })
        .catch(setError)
        .finally(() => {
          state.current.reading = false;
          setReads((number) => number + 1);
        });
    }, error ? RETRY_MS : WAIT_MS);
    return () => clearTimeout(timer);
  }, [run, needed, view?.from, view?.to, version, buckets, loaded, reads]);
  return { loaded, error };
}

/** Turns columns into rows. */
function spanRows(columns: SpanColumns): StepSpan[] {
  return columns.start.map((start, row) => ({
    component: columns.component[row]!,
    name: columns.name[row]!,
    rank: columns.rank[row] ?? null,
    server: columns.server[row] ?? null,
    lane: columns.lane[row] ?? null,
    step: columns.step[row] ?? null,
    sample_id: columns.sample_id[row] ?? null,
    start,
    end: columns.end[row]!,
  }));
}

/** Returns the critical path of a step; null while it is read. */
export function useCriticalPath(run: string, step: number | null, start: number | null, end: number | null): { path: CriticalPath | null; merged: boolean; error: Error | null } {
  const [state, setState] = useState<{ key: string; path: CriticalPath | null; merged: boolean; error: Error | null }>({ key: "", path: null, merged: false, error: null });
  const key = `${run}/${step}/${start}/${end}`;
  useEffect(() => {
    if (step === null || start === null || end === null) return;
    const abort = new AbortController();
    const load = () =>
      Promise.all([
        get<SpanColumns>(runPath(run, "spans"), { start, end, limit: STEP_SPANS, buckets: 4000 }, abort.signal),
        get<{ rows: StepSample[] }>(runPath(run, "samples"), { status: "kept", step_min: step, step_max: step, limit: 10_000, facets: false }, abort.signal),
      ])
        .then(([columns, samples]) => setState({ key, path: criticalPath(step, start, end, spanRows(columns), samples.rows), merged: Boolean(columns.merged), error: null }))
        .catch((error: Error) => error.name !== "AbortError" && setState({ key, path: null, merged: false, error }));
    // A view that moves passes over many steps.
    const timer = setTimeout(() => void load(), state.key ? STEP_WAIT_MS : 0);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [key]);
  return state.key === key ? state : { path: null, merged: false, error: null };
}
