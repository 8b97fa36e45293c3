/** The run on the page: what the header, the ruler and every page read. */

import { useMemo } from "react";
import { runPath } from "../api";
import type { EvalRow, Health, RunInfo, Runs } from "../types";
import { useConnection, useVersion } from "./live";
import { type Resource, useResource } from "./resource";
import { usePlace } from "./url";

export function useRuns(): Resource<Runs> {
  return useResource<Runs>("/api/runs");
}

/** Returns the id of the run in the address. Pages of a run call it. */
export function useRunId(): string {
  const { run } = usePlace();
  if (run === null) throw new Error("This page needs a run.");
  return run;
}

export function useRunInfo(run: string | null): Resource<RunInfo> {
  return useResource<RunInfo>(run === null ? null : runPath(run), {}, useVersion(run, "attempts", "runs"));
}

export function useHealth(run: string | null): Resource<Health> {
  return useResource<Health>(run === null ? null : runPath(run, "health"), {}, useVersion(run, "steps", "alerts"));
}

export function useEvals(run: string | null): Resource<EvalRow[]> {
  return useResource<EvalRow[]>(run === null ? null : runPath(run, "evals"), {}, useVersion(run, "evals"));
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
