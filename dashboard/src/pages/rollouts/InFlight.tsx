/** Samples that are being generated, by group: how long, and with how old weights. */

import { groups } from "d3-array";
import { useMemo } from "react";
import { runPath } from "../../api";
import { count, duration, number } from "../../format";
import { type Column, Table } from "../../shell/Table";
import { useVersion } from "../../state/live";
import { useResource } from "../../state/resource";
import { useTick } from "../../state/timing";
import type { InFlight as Row } from "../../types";
import { visible } from "../../text/hostile";

const TICK_MS = 1000;

type FlightGroup = ReturnType<typeof flightGroups>[number];

/** Returns the groups in the order of their rows, which is that of their start, with the places of the samples that still run. */
export function flightGroups(rows: readonly Row[]) {
  return groups(rows, (row) => `${row.attempt}/${row.group_id}`).map(([, own]) => {
    const { attempt, group_id, environment, started_at, start_version } = own[0]!;
    return { attempt, id: group_id, environment: environment ?? "", running: own.flatMap((row) => row.sample_index ?? []), startedAt: started_at, version: start_version };
  });
}

/** `version` is the newest policy version, `size` the samples of a group where the config says so. */
export function InFlight({ run, version, size }: { run: string; version: number | null; size: number | null }) {
  const { data: rows, error } = useResource<Row[]>(runPath(run, "in_flight"), {}, useVersion(run, "in_flight"));
  useTick(TICK_MS);
  const now = Date.now() / 1000;
  const flights = useMemo(() => flightGroups(rows ?? []), [rows]);
  if (error && !rows) return <p className="none w">{error.message}</p>;
  if (!rows) return null;
  if (rows.length === 0) return <p className="none d">No answer is being generated right now.</p>;
  const columns: Column<FlightGroup>[] = [
    { head: "group", className: "f", cell: (group) => number(group.id) },
    { head: "environment", className: "cut", cell: (group) => visible(group.environment) },
    { head: "running", title: (group) => group.running.map((index) => `answer ${index + 1}`).join(", "), cell: (group) => <>{count(group.running.length)}{size !== null && <span className="f"> of {count(size)}</span>}</> },
    { head: "since", className: "r", cell: (group) => (group.startedAt === null ? "" : duration(Math.max(0, now - group.startedAt))) },
    { head: "weights", className: "r", cell: (group) => behind(group.version, version) },
  ];
  return (
    <div className="gl flight">
      <Table rows={flights} columns={columns} keyOf={(group) => `${group.attempt}/${group.id}`}>
        <caption className="d">
          {count(rows.length)} {rows.length === 1 ? "answer" : "answers"} of {flights.length === 1 ? "1 group" : `${count(flights.length)} groups, longest first`}
        </caption>
      </Table>
    </div>
  );
}

function behind(version: number | null, newest: number | null): string {
  if (version === null) return "";
  const steps = newest === null ? 0 : newest - version;
  return steps <= 0 ? "newest" : `${count(steps)} behind`;
}
