/** The run on the page: what the header, the ruler and every page read. */

import { useMemo } from "react";
import { runPath } from "../api";
import type { EvalRow, Health, RunInfo, Runs } from "../types";
import { named, useLabels } from "./labels";
import { useConnection, useEvents, useVersion, useVersions, versionOf } from "./live";
import { type Resource, responses, useKept, useResource, useResources } from "./resource";
import { steps } from "./steps";
import { useOpened, useTick } from "./timing";
import { usePlace } from "./url";

/** How often the page of runs looks for news. An unchanged list is not sent again. */
const FOLLOW_MS = 3000;

export function useRuns(): Resource<Runs> {
  return useNamed(useResource<Runs>("/api/runs", {}, useOpened()));
}

/** Returns a list of runs under the names that the user gave them. */
export function useNamed(listed: Resource<Runs>): Resource<Runs> {
  const { labels } = useLabels();
  const { data } = listed;
  const renamed = useMemo(() => data && { ...data, runs: data.runs.map((run) => named(run, labels)) }, [data, labels]);
  return { ...listed, data: renamed };
}

/** Returns the runs with fields, read again while the page is seen. A new choice of fields keeps the old rows meanwhile. */
export function useLiveRuns(fields: string[]): Resource<Runs> {
  const listed = useResource<Runs>("/api/runs", { fields: fields.join(",") }, useTick(FOLLOW_MS));
  return useNamed({ ...listed, data: useKept(listed.data) });
}

/** Returns the id of the run in the address. Pages of a run call it. */
export function useRunId(): string {
  const { run } = usePlace();
  if (run === null) throw new Error("This page needs a run.");
  return run;
}

/** Starts the reads that each page of a run makes, before the code of the page has arrived. */
export function readAhead(run: string): void {
  void responses.read(runPath(run), versionOf(run, "attempts", "runs"));
  void steps.read(run, versionOf(run, "steps"));
  void responses.read(runPath(run, "health"), versionOf(run, "steps", "alerts"));
  void responses.read(runPath(run, "evals"), versionOf(run, "evals"));
}

export function useRunInfo(run: string | null): Resource<RunInfo> {
  const read = useResource<RunInfo>(run === null ? null : runPath(run), {}, useVersion(run, "attempts", "runs", "steps"));
  const { labels } = useLabels();
  const { data } = read;
  return { ...read, data: useMemo(() => data && { ...data, info: named(data.info, labels) }, [data, labels]) };
}

export function useHealth(run: string | null): Resource<Health> {
  return useResource<Health>(run === null ? null : runPath(run, "health"), {}, useVersion(run, "steps", "alerts"));
}

export function useEvals(run: string | null): Resource<EvalRow[]> {
  return useResource<EvalRow[]>(run === null ? null : runPath(run, "evals"), {}, useVersion(run, "evals"));
}

/** Returns the evals of several runs, which are followed. */
export function useEvalsOf(runs: string[]): (EvalRow[] | undefined)[] {
  useEvents(runs);
  const versions = useVersions(runs, "evals");
  return useResources<EvalRow[]>(runs.map((run) => runPath(run, "evals")), versions).map((one) => one.data);
}

/** Returns the status to show: that of the newest event, else that of the run's row. */
export function useStatus(run: string | null): { status: string; live: boolean; connected: boolean | null } {
  const info = useRunInfo(run).data?.info;
  const connection = useConnection(run);
  return useMemo(() => {
    const status = connection.status ?? info?.status ?? "";
    return { status, live: status === "live", connected: connection.connected };
  }, [connection.status, connection.connected, info?.status]);
}

/** Returns one finished eval a policy version, in their order: the newest that ran in training, else another. */
export function curveOf(evals: EvalRow[]): EvalRow[] {
  const best = new Map<number, EvalRow>();
  for (const row of evals) {
    if (row.status !== "finished" || row.accuracy === null) continue;
    const other = best.get(row.version);
    if (!other || row.source === "live" || other.source !== "live") best.set(row.version, row);
  }
  return [...best.values()].sort((a, b) => a.version - b.version);
}
