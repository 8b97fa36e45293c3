/** Reads of the timeline: spans of the visible time, and what a step waited for. */

import { group } from "d3-array";
import { useEffect, useRef, useState } from "react";
import { get, runPath } from "../../api";
import { mayPass } from "../../state/resource";
import type { Paths } from "../../types";
import { criticalPath, type CriticalPath } from "./criticalPath";
import { buildLanes, type Lanes, type SpanColumns } from "./spans";
import type { View } from "./viewport";

/** Spans read at once; the server merges them per lane, kind and part of the view when there are more. */
const MOST_SPANS = 40_000;
/** Width of a part of the view whose spans are merged: room for a share of every kind. */
const SHARE_PIXELS = 8;
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

/** Most steps that are read for the mean of a range, evenly spaced. */
const MOST_PATHS = 100;

export interface StepPaths {
  /** The requested steps. */
  first: number;
  last: number;
  paths: CriticalPath[];
}

/** Returns the critical paths of a range of steps, and those of the previous range until they are read. */
export function useCriticalPaths(run: string, first: number | null, last: number | null): { read: StepPaths | null; error: Error | null } {
  const [state, setState] = useState<{ run: string; read: StepPaths | null; error: Error | null }>({ run, read: null, error: null });
  useEffect(() => {
    if (first === null || last === null) return;
    const abort = new AbortController();
    const load = () =>
      get<Paths>(runPath(run, "paths"), { first, last, most: MOST_PATHS }, abort.signal)
        .then(({ steps, answers, spans }) => {
          const [answersOf, spansOf] = [group(answers, (row) => row.step), group(spans, (row) => row.of_step)];
          const paths = steps.map(({ step, start, end }) => criticalPath(step, start, end, spansOf.get(step) ?? [], answersOf.get(step) ?? []));
          setState({ run, read: { first, last, paths }, error: null });
        })
        .catch((error: Error) => {
          if (error.name === "AbortError") return;
          setState({ run, read: null, error });
          if (mayPass(error)) timer = setTimeout(() => void load(), RETRY_MS);
        });
    // A view that moves passes over many steps.
    let timer = setTimeout(() => void load(), state.read ? STEP_WAIT_MS : 0);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [run, first, last]);
  return state.run === run ? state : { read: null, error: null };
}
