/** Alerts as marks of the timeline, and the times in which a server was down. */

import type { Alert } from "../../types";

export interface AlertMark {
  time: number;
  step: number | null;
  text: string;
  /** Something that informs is drawn quietly. */
  quiet: boolean;
}

export interface Outage {
  server: number;
  from: number;
  to: number;
}

/** Kinds that say when a process went and came, also when they only inform. */
const PROCESSES = ["server", "trainer"];

/** Returns warnings and errors, and what informs about servers and trainer, at the times of their first reports. */
export function alertMarks(alerts: readonly Alert[]): AlertMark[] {
  return alerts
    .flatMap((alert): AlertMark[] => {
      const time = alert.first_time ?? alert.time;
      if (time === null || (alert.level === "info" && !PROCESSES.includes(alert.kind ?? ""))) return [];
      return [{ time, step: alert.first_step ?? alert.step, text: [alert.title, alert.text].filter(Boolean).join(". "), quiet: alert.level === "info" }];
    })
    .sort((a, b) => a.time - b.time);
}

/** Returns from when to when servers were down: until one came back, an attempt started all anew (`starts`), or `end`. */
export function outages(marks: readonly AlertMark[], starts: readonly number[], end: number): Outage[] {
  const found: Outage[] = [];
  const open = new Map<number, number>();
  const close = (server: number, to: number) => {
    if (open.has(server)) found.push({ server, from: open.get(server)!, to });
    open.delete(server);
  };
  const events = [...marks, ...starts.map((time) => ({ time, text: null }))].sort((a, b) => a.time - b.time);
  for (const { time, text } of events) {
    if (text === null) {
      for (const server of [...open.keys()]) close(server, time);
      continue;
    }
    const [, server, state] = /^server (\d+) (is down|is back|failed permanently)/.exec(text) ?? [];
    if (state === "is back") close(Number(server), time);
    else if (state && !open.has(Number(server))) open.set(Number(server), time);
  }
  for (const server of [...open.keys()]) close(server, Math.max(end, open.get(server)!));
  return found.sort((a, b) => a.from - b.from);
}
