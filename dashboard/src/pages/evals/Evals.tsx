/** Evals of a run: accuracy over checkpoints, and the items gained and lost between two of them. */

import { useEffect, useMemo, useState } from "react";
import { runPath } from "../../api";
import { embedded } from "../../embedded";
import { wilson } from "../../charts/math";
import { Spark } from "../../charts/Spark";
import { count, duration, NONE, percent, resultFormat } from "../../format";
import { Failure, Quiet, Reading } from "../../shell/Quiet";
import { neighbor } from "../../lists";
import { Select } from "../../shell/controls";
import { useKeys } from "../../shell/keys";
import { type Column, Table } from "../../shell/Table";
import { useVersion } from "../../state/live";
import { type Resource, useResource } from "../../state/resource";
import { useSelected } from "../../state/cursor";
import { curveOf, useEvals, useRunId, useRunInfo, useStatus } from "../../state/run";
import { setParams, type Range, useParam, useRange } from "../../state/url";
import type { EvalRow, EvalSample } from "../../types";
import { Curve, OtherMetrics, otherMetrics, Passes } from "./Curves";
import { type Block, blocksOf, isInRange, type Item, joinItems, pairedDifference, recordedGain, slicesOf } from "./items";
import { ItemPane } from "./ItemPane";
import { visible } from "../../text/hostile";
import "./evals.css";

export function Evals() {
  const run = useRunId();
  const evals = useEvals(run);
  const info = useRunInfo(run).data;
  const { live } = useStatus(run);
  if (evals.error && !evals.data) return <Failure error={evals.error} />;
  if (!evals.data || !info) return <Reading what="the evals" />;
  if (evals.data.length === 0) {
    const wanted = Array.isArray(info.config.evals) && info.config.evals.length > 0;
    return (
      <Quiet title={wanted ? (live ? "No eval has finished yet." : "No eval was finished.") : "This run has no evals."} text={wanted ? (live ? "The first result appears here. The page updates by itself." : "The alerts of the overview and the logs say why.") : "Name environments in the field evals of a config, or measure its checkpoints afterwards:"}>
        {!wanted && <pre>telescope eval {info.path} --eval {visible(info.environments[0]?.name ?? "math500")}</pre>}
      </Quiet>
    );
  }
  return <Loaded rows={evals.data} />;
}

function Loaded({ rows }: { rows: EvalRow[] }) {
  const names = [...new Set(rows.map((row) => row.name))];
  const [chosen] = useParam("eval", names[0]);
  const name = names.includes(chosen) ? chosen : names[0]!;
  const [range] = useRange();
  const mine = useMemo(() => rows.filter((row) => row.name === name && isInRange(row, range)), [rows, name, range?.from, range?.to]);
  const curve = useMemo(() => curveOf(mine), [mine]);
  const first = useMemo(() => curveOf(rows.filter((row) => row.name === name))[0], [rows, name]);
  const [a] = useParam("before");
  const [b] = useParam("after");
  const before = curve.find((row) => String(row.version) === a) ?? curve[0];
  const after = curve.find((row) => String(row.version) === b) ?? curve.at(-1);
  useSelected("version", after?.version ?? null);
  const answers = { before: useSamples(before), after: useSamples(after) };
  const [samplesBefore, samplesAfter] = [answers.before.data, answers.after.data];
  const isRead = !answers.before.loading && !answers.after.loading;
  const items = useMemo(() => (samplesBefore && samplesAfter && before !== after ? joinItems(samplesBefore, samplesAfter) : []), [samplesBefore, samplesAfter, before, after]);
  const without = [before, after].filter((row, i) => row && !(i === 0 ? samplesBefore : samplesAfter)?.length);
  const whyNoItems = !after || before === after ? "Items appear here when two checkpoints were measured on the same ones." : without.length > 0 ? notRecorded(without as EvalRow[]) : "The two evals have no item in common.";
  const [item, setItem] = useParam("item");
  const sorted = useMemo(() => blocksOf(items).flatMap((block) => block.items), [items]);
  const current = sorted.find((one) => String(one.item) === item) ?? sorted[0];
  const move = (by: 1 | -1) => {
    const next = neighbor(sorted, current ? sorted.indexOf(current) : -1, by);
    if (next) setItem(String(next.item), true);
  };
  useKeys("Evals", [
    { keys: ["j", "ArrowRight"], does: "next item", run: () => move(1) },
    { keys: ["k", "ArrowLeft"], does: "item before", run: () => move(-1) },
  ]);
  return (
    <div className="evals">
      <aside className="first" aria-label="Evals and checkpoints">
        <section className="list">
          {names.map((one) => (
            <EvalLine key={one} name={one} rows={rows.filter((row) => row.name === one)} range={range} on={one === name} />
          ))}
        </section>
        {curve.length > 1 && <Checkpoints curve={curve} before={before} after={after} />}
        {items.length > 0 && <Slices items={items} metric={after?.metric} />}
        {(isRead || !after) && <EveryEval rows={mine} />}
      </aside>
      <section className="middle">
        <Verdict name={name} curve={curve} first={first} range={range} before={before} after={after} items={items} isRead={isRead} />
        <div className={`curves ${after && after.num_completions > 1 && otherMetrics(curve).length > 0 ? "three" : ""}`}>
          <Curve name={name} curve={curve} range={range} />
          {after && after.num_completions > 1 && <Passes before={before} after={after} samplesBefore={samplesBefore} samplesAfter={samplesAfter} />}
          <OtherMetrics curve={curve} />
        </div>
        {before && after && before !== after && isRead && (
          items.length > 0 ? <Field items={items} before={before} after={after} current={current} choose={(one) => setItem(String(one.item))} /> : <p className="fl d">{whyNoItems}</p>
        )}
      </section>
      <ItemPane items={sorted} why={isRead ? whyNoItems : ""} current={current} before={before} after={after} choose={(one) => setItem(String(one.item))} />
    </div>
  );
}

function useSamples(row: EvalRow | undefined): Resource<EvalSample[]> {
  const run = useRunId();
  const version = useVersion(run, "eval_samples");
  // The samples of a finished eval do not change, but a copied record may receive them after its row.
  const [isEmpty, setEmpty] = useState(false);
  const known = useResource<EvalSample[]>(row ? runPath(run, "evals", row.attempt, row.eval_id, "samples") : null, {}, row?.status === "finished" && !isEmpty ? "" : version);
  useEffect(() => setEmpty(known.data?.length === 0), [known.data]);
  return known.error && !known.data ? { ...known, data: [] } : known;
}

/** Names the evals whose answers were not recorded. */
const notRecorded = (rows: EvalRow[]): string => `The answers of the eval${rows.length > 1 ? "s" : ""} after ${rows.map((row) => count(row.version)).join(" and ")} steps ${embedded ? "are not in this file" : "were not recorded"}, so what changed is not known item by item.`;

const short = (row: EvalRow): string => [`${count(row.num_items)} items${row.num_completions > 1 ? ` × ${row.num_completions}` : ""}`, row.held_out && "held out", failed(row)].filter(Boolean).join(", ");
const words = (row: EvalRow): string => `${count(row.num_items)} ${row.held_out ? "held-out " : ""}items${row.num_completions > 1 ? `, ${row.num_completions} answers each` : ""}${failed(row) && `, ${failed(row)} and count as wrong`}`;
/** How many answers have no score, which the accuracy counts as wrong. Empty if none, or where an old record does not say. */
const failed = (row: EvalRow): string => {
  const missing = row.num_items * row.num_completions - row.num_scored;
  return row.num_scored > 0 && missing > 0 ? `${count(missing)} failed` : "";
};

function EvalLine({ name, rows, range, on }: { name: string; rows: EvalRow[]; range: Range | null; on: boolean }) {
  const curve = curveOf(rows.filter((row) => isInRange(row, range)));
  const last = curve.at(-1);
  return (
    <button className={`el ${on ? "on" : ""}`} aria-pressed={on} onClick={() => setParams({ eval: name, before: null, after: null, item: null })}>
      <span className="cut">
        {visible(name)}
        <span className="s f cut" title={words(rows[0]!)}>
          {short(rows[0]!)}
        </span>
      </span>
      <Spark values={curve.map((row) => row.accuracy)} height={24} keep={0} raw={false} />
      <b className="r">{resultFormat(last?.metric).value(last?.accuracy)}</b>
    </button>
  );
}

function Checkpoints({ curve, before, after }: { curve: EvalRow[]; before?: EvalRow; after?: EvalRow }) {
  const choose = (side: "before" | "after", row: EvalRow | undefined) => (
    <Select label={`Checkpoint ${side}`} value={row?.version} options={curve.map((one) => [one.version, `${one.version} steps, ${resultFormat(one.metric).value(one.accuracy)}`])} choose={(next) => setParams({ [side]: next })} />
  );
  return (
    <section className="sec">
      <h2>
        Compare checkpoints <span>after steps</span>
      </h2>
      <div className="ck">
        <span className="d">before</span>
        {choose("before", before)}
        <span className="d">after</span>
        {choose("after", after)}
      </div>
    </section>
  );
}

function Slices({ items, metric }: { items: Item[]; metric?: string | null }) {
  const slices = useMemo(() => slicesOf(items), [items]);
  const { isShare, value } = resultFormat(metric);
  const ends = isShare ? [] : slices.flatMap((slice) => pairedDifference(slice.items) ?? []).flatMap((result) => [result.before, result.after]);
  const [from, to] = [Math.min(0, ...ends), Math.max(1, ...ends)];
  return (
    <section className="sec">
      <h2>
        Where it changed <span>of {count(items.length)} items</span>
      </h2>
      {slices.map((slice) => {
        const result = pairedDifference(slice.items);
        if (!result) return null;
        const [low, high] = isShare ? wilson(result.after, result.items) : [result.after, result.after];
        const width = (part: number) => `${(100 * part) / (to - from)}%`;
        const at = (place: number) => width(place - from);
        return (
          <div key={slice.name} className="sl" title={`${value(result.before)} to ${value(result.after)}`}>
            <span className="cut">{visible(slice.name)}</span>
            <span className="track">
              <i className="range" style={{ left: at(low), width: width(high - low) }} />
              <i className="move" style={{ left: at(Math.min(result.before, result.after)), width: width(Math.abs(result.gain)) }} />
              <i className="from" style={{ left: at(result.before) }} />
              <i className="to" style={{ left: at(result.after) }} />
            </span>
            <span className="r f">{count(slice.items.length)}</span>
          </div>
        );
      })}
      <div className="sl s f">
        <span />
        <span className="scale">
          <span>{isShare ? 0 : value(from)}</span>
          <span>{value(to, isShare ? 0 : 3)}</span>
        </span>
        <span />
      </div>
      <p className="s f">Hollow before, filled after{isShare && ", with its interval"}.</p>
    </section>
  );
}

const everyEval = ({ label, points, value, bare }: ReturnType<typeof resultFormat>): Column<EvalRow>[] => [
  { head: "steps", cell: (row) => <>{count(row.version)}{row.source !== "live" && <span className="d"> later</span>}</> },
  { head: label, className: "r", cell: (row) => (row.status === "finished" ? value(row.accuracy) : <span className={row.status === "failed" ? "w" : "d"}>{row.status}</span>) },
  { head: `±${points}`, className: "r", cell: (row) => row.status === "finished" && <span className="d">{row.accuracy_low === null || row.accuracy_high === null ? NONE : bare((row.accuracy_high - row.accuracy_low) / 2)}</span> },
  { head: "took", className: "r", cell: (row) => <span className="d">{row.ended_at === null || row.started_at === null ? NONE : duration(row.ended_at - row.started_at)}</span> },
];

function EveryEval({ rows }: { rows: EvalRow[] }) {
  const sorted = [...rows].sort((a, b) => a.version - b.version || (a.started_at ?? 0) - (b.started_at ?? 0));
  return (
    <section className="sec">
      <h2>Every eval</h2>
      <Table rows={sorted} columns={everyEval(resultFormat(rows.find((row) => row.metric)?.metric))} keyOf={(row) => `${row.attempt}/${row.eval_id}`} row={(row) => ({ title: visible(row.error ?? row.eval_id) })} />
    </section>
  );
}

interface VerdictProps {
  name: string;
  curve: EvalRow[];
  /** The run's first result of this eval. */
  first?: EvalRow;
  range: Range | null;
  before?: EvalRow;
  after?: EvalRow;
  items: Item[];
  /** Until the items are read, the sentence keeps the place that their numbers need. */
  isRead: boolean;
}

function Verdict({ name: eval_name, curve, first, range, before, after, items, isRead }: VerdictProps) {
  const name = visible(eval_name);
  const { isShare, label, points, value, bare } = resultFormat(after?.metric);
  if (!before || !after)
    return (
      <div className="verdict">
        <h1>{range && first ? `No eval of ${name} lies in steps ${range.from} to ${range.to}.` : `No eval of ${name} is finished.`}</h1>
      </div>
    );
  if (before === after)
    return (
      <div className="verdict">
        <h1>
          {isShare ? `${value(after.accuracy)} of ${name}` : `The ${label} of ${name} is ${value(after.accuracy)}`} after {count(after.version)} steps.
        </h1>
        <p>{curve.length === 1 ? "A second eval, at another checkpoint, will show what changed." : "Choose two different checkpoints to see what changed."}</p>
      </div>
    );
  const result = pairedDifference(items);
  const recorded = recordedGain(before, after, first);
  const shown = recorded ?? result;
  const [lost, gained, right] = blocksOf(items).map(({ items: own }) => own.length) as [number, number, number];
  const sure = shown && (shown.low > 0 || shown.high < 0);
  return (
    <div className="verdict">
      <h1>
        {isShare ? name : `The ${label} of ${name}`} went from {value(before.accuracy)} to {value(after.accuracy)}
        {result ? `: ${count(gained)} ${gained === 1 ? "item" : "items"} gained, ${count(lost)} lost.` : "."}
        {!isRead && <span style={{ visibility: "hidden" }}> 00 items gained, 00 lost.</span>}
      </h1>
      {shown && (
        <p>
          The difference is <b>{bare(shown.gain)}</b>{points}
          {shown.low < shown.high ? `, 95 % interval ${bare(shown.low)} to ${bare(shown.high)} ${recorded ? "by the run's bootstrap" : "(normal)"} on the same` : " on each of the same"} {count(result?.items ?? after.num_items)} items.{" "}
          {sure ? "" : "It may be chance: measure more items or answers. "}
          {lost > 0 && gained > 0 ? `Of the items that were right before, ${percent(lost / (lost + right), 0)} are wrong now.` : ""}
        </p>
      )}
    </div>
  );
}

const TITLES: Record<Block, [string, string]> = {
  lost: ["lost", "right, then wrong"],
  gained: ["gained", "wrong, then right"],
  right: ["right twice", ""],
  wrong: ["wrong twice", ""],
};

function Field({ items, before, after, current, choose }: { items: Item[]; before: EvalRow; after: EvalRow; current?: Item; choose: (item: Item) => void }) {
  const pick = (event: React.MouseEvent) => {
    const at = (event.target as HTMLElement).dataset.item;
    const item = at === undefined ? undefined : items.find((one) => String(one.item) === at);
    if (item) choose(item);
  };
  // The item that the page opens with was not chosen: the page stays at its top.
  const [chosen] = useParam("item");
  useEffect(() => {
    if (chosen) document.querySelector(".items .cur")?.scrollIntoView({ block: "nearest" });
  }, [chosen]);
  return (
    <div className="fl">
      <h2>
        Every item, {before.version} against {after.version} steps
        <span>{[items.length < Math.max(before.num_items, after.num_items) && `${count(items.length)} of ${count(Math.max(before.num_items, after.num_items))} items have answers of both`, before.num_completions > 1 && "right: at least half of the answers"].filter(Boolean).join("; ")}</span>
      </h2>
      {blocksOf(items).map(({ block, items: some }) => (
        <div key={block} className="blk">
          <div>
            <b>{count(some.length)}</b> {TITLES[block][0]}
            <div className="s f">{TITLES[block][1]}</div>
          </div>
          <div className={`items it-${block}`} onClick={pick} role="listbox" tabIndex={0} aria-label={`${some.length} ${TITLES[block][0]}`}>
            {some.map((item) => (
              <i key={item.item} data-item={item.item} role="option" aria-selected={item === current} className={item === current ? "cur" : ""} title={`item ${item.item}`} />
            ))}
          </div>
        </div>
      ))}
    </div>
  );
}
