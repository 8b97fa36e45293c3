/** Samples in flight, put together by their groups. */

import type { InFlight } from "../../types";

interface FlightGroup {
  attempt: number;
  id: number | null;
  environment: string;
  /** Places in the group of the samples that still run. */
  running: number[];
  startedAt: number | null;
  version: number | null;
}

/** Returns the groups in the order of their rows, which is that of their start. */
export function flightGroups(rows: readonly InFlight[]): FlightGroup[] {
  const groups = new Map<string, FlightGroup>();
  for (const row of rows) {
    const key = `${row.attempt}/${row.group_id}`;
    const group = groups.get(key) ?? { attempt: row.attempt, id: row.group_id, environment: row.environment ?? "", running: [], startedAt: row.started_at, version: row.start_version };
    if (row.sample_index !== null) group.running.push(row.sample_index);
    groups.set(key, group);
  }
  return [...groups.values()];
}
