/** Columns of the table of runs: those of every run, and any field that the server knows. */

import { rollup } from "d3-array";
import type { ReactNode } from "react";
import { csv } from "../../charts/export";
import { meanOf } from "../../charts/math";
import { Spark } from "../../charts/Spark";
import { count, difference, duration, megabytes, moment, NONE, number, resultFormat, setting, statusClass, statusWord } from "../../format";
import type { Option } from "../../shell/Chooser";
import type { Sortable } from "../../state/groups";
import type { Field, RemoteCopy, RunRow } from "../../types";
import { gain } from "./filter";

import { visible } from "../../text/hostile";

export interface Column {
  id: string;
  title: string;
  hint?: string;
  /** Whether its values are numbers, at the right. */
  right: boolean;
  value: (run: RunRow) => Sortable;
  show: (run: RunRow) => ReactNode;
  /** Writes one of its values, on an axis too; `run` has the metric of an eval's. */
  write?: (value: number, run?: RunRow) => string;
  /** Whether runs of a group have the mean of its values. */
  averaged?: boolean;
  /** Formats a difference to the baseline. Only outcomes have it. */
  difference?: (value: number, run: RunRow) => string;
  /** Shows it for several runs. */
  together?: (runs: RunRow[]) => ReactNode;
}

/** Columns of the table, outcomes first. */
export const DEFAULT_COLUMNS = ["heldout", "reward", "status", "steps", "checkpoint", "started_at", "duration", "algorithm", "tags", "model", "environments"];
export const DEFAULT_SORT = "-started_at";

const shortModel = (model: string | null): string => model?.split("/").filter(Boolean).at(-1) ?? NONE;

const text = (id: string, title: string, value: (run: RunRow) => string): Column => ({ id, title, right: false, value: (run) => value(run) || null, show: (run) => visible(value(run)) || NONE });

const quantity = (id: string, title: string, value: (run: RunRow) => number | null, write: (value: number, run?: RunRow) => string): Column => ({
  id,
  title,
  right: true,
  value,
  show: (run) => {
    const known = value(run);
    return known === null ? NONE : write(known, run);
  },
  write,
  averaged: true,
});

/** Writes results of evals, and differences of them, by the metric that the run has for `heldout` or `eval.NAME`. */
const resultOf = (id: string) => (value: number, run?: RunRow): string => resultFormat(run?.metrics[id]).value(value);
const changeOf = (id: string) => (value: number, run?: RunRow): string => resultFormat(run?.metrics[id]).change(value);

/** Returns how many of the runs are in each state: `2 training, 1 failed`. */
function states(runs: RunRow[]): string {
  const counted = rollup(runs, (equal) => equal.length, (run) => run.status);
  return [...counted].map(([status, n]) => (counted.size === 1 ? statusWord(status) : `${n} ${statusWord(status)}`)).join(", ");
}

export function State({ run }: { run: RunRow }) {
  return (
    <span className={`state ${statusClass(run.status)}`} title={run.error ? visible(run.error) : undefined}>
      <i />
      {statusWord(run.status)}
      {run.remote && run.remote.phase !== "synced" && <span className="f">{remoteWord(run.remote)}</span>}
    </span>
  );
}

function remoteWord({ phase, done_bytes, total_bytes }: RemoteCopy): string {
  if (phase === "syncing") return megabytes(done_bytes, total_bytes);
  return phase === "failed" ? "not copied" : "on W&B";
}

function Steps({ run }: { run: RunRow }) {
  const share = run.num_steps ? Math.min(1, run.steps / run.num_steps) : 0;
  return (
    <span className={run.live ? "progress" : undefined} style={run.live ? { backgroundSize: `${100 * share}% 2px, 100% 2px` } : undefined}>
      {count(run.steps)}
      <span className="f">{run.num_steps ? ` of ${count(run.num_steps)}` : ""}</span>
    </span>
  );
}

/** Shows the first and newest held-out result, and the step of the newest if the run has trained further. */
function HeldOut({ run }: { run: RunRow }) {
  const { heldout_before: before, heldout_after: after, heldout_step: step } = run;
  if (before === null && after === null) return NONE;
  const { value, suffix } = resultFormat(run.metrics.heldout);
  return (
    <span className="headline">
      {after !== null && before !== null && <span className="f">{value(before)} → </span>}
      <b>{value(after ?? before)}</b>
      {suffix && <span className="f s">{suffix}</span>}
      {(run.live || (step !== null && step < run.steps)) && <span className="f s"> as of step {count(after === null ? 0 : step)}</span>}
    </span>
  );
}

function Reward({ run }: { run: RunRow }) {
  if (run.reward_last === null) return NONE;
  return (
    <span className="rewards">
      <Spark values={run.rewards} height={18} keep={0.4} />
      <span className="f">{number(run.reward_first, 2)} →</span> {number(run.reward_last, 2)}
    </span>
  );
}

const OWN: Column[] = [
  { ...text("status", "state", (run) => run.status), show: (run) => <State run={run} />, together: states },
  {
    ...quantity("started_at", "started", (run) => run.started_at, (time) => moment(time)),
    right: false,
    averaged: false,
    together: (runs) => moment(Math.max(...runs.map((run) => run.started_at ?? 0)) || null),
  },
  quantity("duration", "took", (run) => run.duration, duration),
  { ...quantity("steps", "steps", (run) => run.steps, (value) => number(value)), show: (run) => <Steps run={run} /> },
  { ...quantity("reward", "reward", (run) => run.reward_last, (value) => number(value, 3)), difference, show: (run) => <Reward run={run} />, hint: "mean of all scored samples, first 10 steps → last 10; runs of earlier versions have that of the samples trained on" },
  { ...quantity("heldout", "held out", (run) => run.heldout_after ?? run.heldout_before, resultOf("heldout")), difference: changeOf("heldout"), show: (run) => <HeldOut run={run} />, hint: "result of the first eval with held-out items, before training → newest" },
  { ...quantity("gain", "gain", gain, changeOf("heldout")), hint: "newest minus first held-out result; of accuracies in percentage points" },
  { ...quantity("checkpoint", "best saved", (run) => run.best_checkpoint, (value) => `step ${count(value)}`), averaged: false, hint: "the existing checkpoint with the highest held-out result" },
  { ...quantity("heldout_step", "held out at step", (run) => run.heldout_step, (value) => number(value)), hint: "finished steps of the newest held-out result" },
  text("algorithm", "algorithm", (run) => run.algorithm ?? ""),
  { ...text("model", "model", (run) => shortModel(run.model)), show: (run) => <span title={visible(run.model ?? "")}>{visible(shortModel(run.model))}</span> },
  text("environments", "environments", (run) => run.environments.join(", ")),
  text("project", "project", (run) => run.project),
  quantity("attempt", "attempts", (run) => run.attempt, (value) => number(value)),
  text("error", "error", (run) => run.error ?? ""),
];

const KINDS: [prefix: string, section: string][] = [
  ["eval.", "Evals, newest result"],
  ["config.", "Settings"],
  ["last.", "Metrics, mean of the last 10 steps"],
];

/** Returns the column of a field of the server. Settings show as they are written, numbers at the right. */
function fieldColumn(id: string): Column {
  const prefix = KINDS.find(([one]) => id.startsWith(one))?.[0] ?? "";
  const title = id.slice(prefix.length);
  const raw = (run: RunRow): unknown => run.fields[id] ?? null;
  const asNumber = (run: RunRow): number | null => (typeof raw(run) === "number" ? (raw(run) as number) : null);
  if (prefix === "eval.") return { ...quantity(id, title, asNumber, resultOf(id)), difference: changeOf(id) };
  if (prefix === "last.") return { ...quantity(id, title, asNumber, (value) => number(value)), difference };
  const one = (run: RunRow): Sortable => {
    const value = raw(run);
    return value === null || typeof value === "number" ? (value as number | null) : setting(value);
  };
  return { id, title, right: false, value: one, show: (run) => (raw(run) === null ? <span className="f">none</span> : <span className="m">{setting(raw(run))}</span>) };
}

/** Returns the columns of the chosen ids. `tags` shows the tags of a run. */
export function columnsOf(ids: string[], tags: Column): Column[] {
  const own = new Map([...OWN, tags].map((column) => [column.id, column]));
  return ids.map((id) => own.get(id) ?? fieldColumn(id));
}

/** Returns the names of the server's fields among the ids. */
export const serverFields = (ids: string[]): string[] => [...new Set(ids.filter((id) => KINDS.some(([prefix]) => id.startsWith(prefix))))];

/** Returns everything that a column can show; settings that differ between runs come first. */
export function columnOptions(fields: Field[], tags: Column): Option[] {
  const own = [...OWN, tags].map((column) => ({ id: column.id, title: column.title, section: "Every run" }));
  const rest = KINDS.flatMap(([prefix, section]) => {
    const known = fields.filter((field) => field.name.startsWith(prefix));
    const option = (field: Field): Option => ({
      id: field.name,
      title: field.name.slice(prefix.length),
      section: prefix === "config." ? (field.values > 1 ? "Settings that differ" : "Settings, the same in all runs") : section,
      hint: prefix === "config." ? field.examples.map(setting).join(" · ") : "",
    });
    return [...known.filter((field) => field.values > 1), ...known.filter((field) => field.values <= 1)].map(option);
  });
  return [...own, ...rest];
}

/** Returns the first run with a value, whose metric writes what several runs share. */
export const measured = (column: Column, runs: RunRow[]): RunRow | undefined => runs.find((run) => column.value(run) !== null);

/** Returns what a column shows for several runs: their mean and 95 % interval, or what they share. */
export function shown(column: Column, runs: RunRow[]): ReactNode {
  if (column.together) return column.together(runs);
  const { averaged } = column;
  const write = (value: number) => (column.write ?? setting)(value, measured(column, runs));
  if (averaged) {
    const mean = meanOf(runs.map((run) => column.value(run) as number | null));
    if (mean === null) return NONE;
    const of = mean.n === runs.length ? `${mean.n} runs` : `${mean.n} of ${runs.length} runs`;
    const title = mean.half === null ? `of ${of}` : `95 % interval of the mean: ${write(mean.mean - mean.half)} to ${write(mean.mean + mean.half)}, ${of}`;
    return (
      <span title={title}>
        {write(mean.mean)}
        {mean.half !== null && mean.half > 1e-9 * Math.abs(mean.mean) && <span className="f"> ± {write(mean.half).replace(/^\+/, "")}</span>}
      </span>
    );
  }
  const different = new Set(runs.map((run) => column.value(run)));
  return different.size === 1 ? column.show(runs[0]!) : <span className="f">{different.size} values</span>;
}

/** Returns how an outcome differs from the baseline's, with its sign; null where one of them is missing. */
export function fromBaseline(column: Column, run: RunRow, baseline: RunRow): string | null {
  const [value, base] = [column.value(run), column.value(baseline)];
  return column.difference && typeof value === "number" && typeof base === "number" ? column.difference(value - base, run) : null;
}

/** Returns the table as CSV with unrounded values, in the order of the runs. */
export function runsCsv(runs: RunRow[], columns: Column[]): string {
  return csv(["id", ...columns.map((column) => column.id)], runs.map((run) => [run.id, ...columns.map((column) => column.value(run))]));
}

/** Settings that only name a run, its folders or its ports, and so explain no outcome. */
const BOOKKEEPING = /^config\.(run_dir|wandb_\w+|resume_\w+|\w*_port)$/;

/** Returns the settings that differ between runs: numbers with many values first, as in a sweep, then settings with few values. */
export const differingSettings = (fields: Field[]): string[] =>
  fields
    .filter((field) => field.name.startsWith("config.") && field.values > 1 && !BOOKKEEPING.test(field.name))
    .sort((a, b) => Number(isNumeric(b)) - Number(isNumeric(a)) || (isNumeric(a) ? b.values - a.values : a.values - b.values))
    .map((field) => field.name);

const isNumeric = (field: Field): boolean => field.examples.every((value) => typeof value === "number");
