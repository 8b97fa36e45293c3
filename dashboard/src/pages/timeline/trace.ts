/** Export of spans as Chrome trace JSON, which Perfetto and chrome://tracing open. */

import type { SpanColumns } from "./spans";

interface TraceEvent {
  name: string;
  ph: "X" | "M";
  pid: number;
  tid: number;
  ts?: number;
  dur?: number;
  cat?: string;
  args: Record<string, unknown>;
}

/** Returns the events of all spans that touch [from, to]; times in microseconds since `from`. */
export function traceEvents(columns: SpanColumns, from: number, to: number): TraceEvent[] {
  const events: TraceEvent[] = [];
  const processes = new Map<string, number>();
  const threads = new Map<string, number>();
  const idOf = (process: string, thread: string): [number, number] => {
    let pid = processes.get(process);
    if (pid === undefined) {
      processes.set(process, (pid = processes.size + 1));
      events.push({ name: "process_name", ph: "M", pid, tid: 0, args: { name: process } });
    }
    const key = `${process}/${thread}`;
    let tid = threads.get(key);
    if (tid === undefined) {
      threads.set(key, (tid = threads.size + 1));
      events.push({ name: "thread_name", ph: "M", pid, tid, args: { name: thread } });
    }
    return [pid, tid];
  };
  for (let row = 0; row < columns.start.length; row++) {
    const start = columns.start[row]!;
    const end = columns.end[row]!;
    if (end < from || start > to) continue;
    const component = columns.component[row]!;
    const server = columns.server[row];
    const [process, thread] =
      component === "trainer"
        ? ["trainer", `rank ${columns.rank[row] ?? 0}${columns.name[row] === "gradient_reduction" ? ", collectives" : ""}`]
        : server !== null && server !== undefined
          ? [`engine ${server}`, component === "weights" ? "weights" : `slot ${columns.lane[row] ?? 0}`]
          : component === "sandbox"
            ? ["sandboxes", columns.sample_id[row] ?? "pool"]
            : ["orchestrator", columns.name[row]!];
    const [pid, tid] = idOf(process!, thread!);
    const args = Object.fromEntries(
      Object.entries({ sample: columns.sample_id[row], step: columns.step[row], micro_batch: columns.micro_batch[row], merged: columns.count?.[row] })
        .filter(([name, value]) => value !== null && value !== undefined && !(name === "merged" && value === 1)),
    );
    events.push({ name: columns.name[row]!, ph: "X", cat: component, pid, tid, ts: (start - from) * 1e6, dur: (end - start) * 1e6, args });
  }
  return events;
}
