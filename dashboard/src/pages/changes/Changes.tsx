/** Shows what changed at a step: compares the steps before it with equally many from it on, and ranks causes by their part in the change. */

import { sum } from "d3-array";
import { useMemo } from "react";
import { runPath } from "../../api";
import { Chart } from "../../charts/Chart";
import { linesOf } from "../../charts/data";
import { useDrawnRuns } from "../../charts/runs";
import { count, duration, NONE, number, percent, signed, unbroken } from "../../format";
import { Segments } from "../../shell/controls";
import { Failure, Quiet, Reading } from "../../shell/Quiet";
import { useKeys } from "../../shell/keys";
import { type Column, Table } from "../../shell/Table";
import { useKept, useResource } from "../../state/resource";
import { useRunId, useRunInfo } from "../../state/run";
import { useSelected } from "../../state/cursor";
import { useSteps } from "../../state/steps";
import { elsewhere, format, parseStep, setParams, useParam, usePlace } from "../../state/url";
import { visible } from "../../text/hostile";
import type { Changes as Found, ChangedCell, Effect } from "../../types";
import { titleOf } from "../metrics/tree";
import { answerAddress } from "../rollouts/select";
import { changeOf, cellName, effectName, sentence } from "./words";
import "../panes.css";
import "./changes.css";

const WINDOWS = ["1", "5", "10", "20"];
/** Rows that a table shows before it is expanded. */
const FEW = 12;
const REWARD = "reward/all_groups/mean";

export function Changes() {
  const run = useRunId();
  const info = useRunInfo(run).data;
  const { steps } = useSteps(run);
  const [stepText, setStep] = useParam("step");
  const [window, setWindow] = useParam("window", "5");
  const [metric] = useParam("metric", REWARD);
  const last = steps?.step.at(-1) ?? 0;
  // The step of an alert may not have ended.
  const step = Math.min(parseStep(stepText) ?? last, last);
  const { data: found, error } = useResource<Found>(steps ? runPath(run, "changes") : null, { step, window, metric });
  const data = useKept(found);
  const to = (next: number) => steps && setStep(String(Math.min(Math.max(0, next), last)));
  useKeys("What changed", [
    { keys: ["ArrowLeft", "h"], does: "a step earlier", run: () => to(step - 1) },
    { keys: ["ArrowRight", "l"], does: "a step later", run: () => to(step + 1) },
  ]);
  if (error && !data) return <Failure error={error} />;
  if (steps?.step.length === 0) return <Quiet title="No step has ended." text="This page compares the steps before a step with those from it on." />;
  if (!steps) return <Reading what="the steps" />;
  return (
    <div className="page changes">
      <div className="toolbar">
        <span className="steps">
          <button className="btn" aria-label="A step earlier" onClick={() => to(step - 1)} disabled={step <= 0}>←</button> step <b>{step}</b>{" "}
          <button className="btn" aria-label="A step later" onClick={() => to(step + 1)} disabled={step >= last}>→</button>
        </span>
        <Segments label="Steps on each side" value={window} options={WINDOWS.map((one) => [one, one])} choose={setWindow} />
        <span className="f">{window === "1" ? "step" : "steps"} on each side</span>
        <span className="grow" />
        {metric !== REWARD && <button className="link" onClick={() => setParams({ metric: null })}>Of the reward</button>}
      </div>
      {data && info && <Body found={data} step={step} last={last} window={Number(window)} metric={metric} />}
      {!data && <p className="quiet">Comparing steps…</p>}
    </div>
  );
}

const span = (from: number, to: number): string => (from === to ? `Step ${from}` : `Steps ${from} to ${to}`);

function Body({ found, step, last, window, metric }: { found: Found; step: number; last: number; window: number; metric: string }) {
  const run = useRunId();
  const place = usePlace();
  const isDecomposed = found.decomposed === metric;
  const change = changeOf(found, metric);
  const [all, showAll] = useParam("all");
  const effects = found.effects.filter((effect) => effect.name !== metric && effect.effect !== 0);
  const most = Math.max(...effects.map(({ effect }) => Math.abs(effect)), 1e-12);
  const write = ({ kind }: Effect, value: number | null) => (kind === "span" ? duration(value) : number(value));
  const hrefOf = (effect: Effect) => format(elsewhere(place, {}, { step: String(step), window: String(window), metric: effect.name }));
  const effectColumns: Column<Effect>[] = [
    { className: "cut", title: effectName, cell: (effect) => (effect.kind === "metric" ? <a href={hrefOf(effect)} title={`What changed of ${effectName(effect)}`}>{effectName(effect)}</a> : effectName(effect)) },
    { className: "r", cell: (effect) => `${write(effect, effect.before)} → ${write(effect, effect.after)}` },
    { className: "r", cell: ({ effect }) => `${Math.abs(effect) >= 99 ? (effect > 0 ? "> 99" : "< −99") : signed(effect, 1)} σ` },
    { className: "br", cell: ({ effect }) => <Bar share={effect / most} /> },
  ];
  return (
    <div className="panes">
      <div className="main">
        <section className="verdict">
          <h1>{sentence(metric, change, step)}</h1>
          <p>
            {step === 0 ? "No step lies before it." : unbroken(`${span(Math.max(0, step - window), step - 1)} against ${span(step, Math.min(last, step + window - 1)).toLowerCase()}.`)}
            {isDecomposed && change && ` ${parts(found.cells)}`}
          </p>
        </section>
        <Around metric={metric} step={step} window={window} />
        <section className="tbl">
          <h2>
            {isDecomposed ? "Environments and tags" : "Environments and tags, of the reward"} <span>share of samples, mean, part of the change</span>
          </h2>
          {found.cells.length === 0 ? (
            <p className="f">No scored answer lies in these steps.</p>
          ) : (
            <Table rows={found.cells.slice(0, all ? undefined : FEW)} columns={cellColumns(found.cells)} keyOf={cellName} />
          )}
        </section>
        <section className="tbl">
          <h2>
            Other numbers <span>means, difference in standard deviations</span>
          </h2>
          <Table className="effects" rows={effects.slice(0, all ? undefined : FEW)} columns={effectColumns} keyOf={(effect) => effect.name} />
          {effects.length === 0 && <p className="f">No other number differs.</p>}
          {Math.max(effects.length, found.cells.length) > FEW && (
            <button className="link s f" aria-pressed={all !== ""} onClick={() => showAll(all ? null : "1")}>
              {all ? "Show fewer" : `Show all ${Math.max(effects.length, found.cells.length)}`}
            </button>
          )}
        </section>
      </div>
      <aside className="p3">
        <section className="sec">
          <h2>
            Events <span>{found.events.length || "none"}</span>
          </h2>
          {found.events.map((event, i) => (
            <a key={i} className="ev" href={format(elsewhere(place, { page: "logs" }, { step: String(event.step), at: String(event.time) }))}>
              <span className={event.level === "info" ? "f" : "w"}>step {event.step ?? NONE}</span>
              <span className="clip">{visible(event.message ?? "")}</span>
            </a>
          ))}
        </section>
        <section className="sec">
          <h2>
            Answers that differ most <span>{found.answers.length || "none"}</span>
          </h2>
          {found.answers.map((answer) => (
            <a key={`${answer.attempt}/${answer.sample_id}`} className="an" href={answerAddress(place, { ...answer, eval_name: null })}>
              <span className="s d">
                step {answer.step}, {visible(answer.environment ?? "")} {visible(answer.cell)}
              </span>
              <span className="s">
                <b>{number(answer.value)}</b> <span className="f">mean before {number(answer.mean_before)}, {count(answer.completion_tokens)} tokens</span>
              </span>
              <span className="m clip">{visible(answer.answer)}</span>
            </a>
          ))}
        </section>
        <section className="sec s d">
          <a className="link" href={format(elsewhere(place, { page: "timeline" }, { step: String(step) }))}>Step {step} on the timeline</a>,{" "}
          <a className="link" href={format(elsewhere(place, { page: "rollouts" }, { step: String(step) }))}>its answers</a>
          <span className="vh">of {run}</span>
        </section>
      </aside>
    </div>
  );
}

/** Shows which part of the change came from the mix of samples, and which from within environments and tags. */
function parts(cells: ChangedCell[]): string {
  return `${signed(sum(cells, (cell) => cell.within))} within environments and tags, ${signed(sum(cells, (cell) => cell.mix))} through their mix.`;
}

function Bar({ share }: { share: number }) {
  const width = `${50 * Math.min(1, Math.abs(share))}%`;
  return <i aria-hidden className={share < 0 ? "neg" : "pos"} style={share < 0 ? { right: "50%", width } : { left: "50%", width }} />;
}

/** Returns the columns of cells: shares of the samples, means, and their parts in the change. */
function cellColumns(cells: ChangedCell[]): Column<ChangedCell>[] {
  const [before, after] = [sum(cells, (cell) => cell.n_before), sum(cells, (cell) => cell.n_after)];
  const both = (cell: ChangedCell) => (cell.mix === null || cell.within === null ? null : cell.mix + cell.within);
  const scale = Math.max(...cells.map((cell) => Math.abs(both(cell) ?? 0)), 1e-12);
  return [
    { head: "", className: "cut", title: cellName, cell: cellName },
    { head: "samples", className: "r", title: (cell) => `${count(cell.n_before)} → ${count(cell.n_after)} samples`, cell: (cell) => `${percent(before ? cell.n_before / before : null, 0)} → ${percent(after ? cell.n_after / after : null, 0)}` },
    { head: "mean", className: "r", cell: (cell) => `${number(cell.mean_before)} → ${number(cell.mean_after)}` },
    { head: "mix", hint: "Change due to its share of the samples", className: "r", cell: (cell) => signed(cell.mix) },
    { head: "within", hint: "Change due to its own mean", className: "r", cell: (cell) => signed(cell.within) },
    { head: "both", className: "r", cell: (cell) => <b>{signed(both(cell))}</b> },
    { head: "", className: "br", cell: (cell) => <Bar share={(both(cell) ?? 0) / scale} /> },
  ];
}

/** Number of windows that the chart shows on each side of the step. */
const SHOWN_WINDOWS = 4;

/** Draws the metric around the step. */
function Around({ metric, step, window }: { metric: string; step: number; window: number }) {
  const run = useRunId();
  const info = useRunInfo(run).data;
  const { steps } = useSteps(run);
  const runs = useDrawnRuns(info, steps, "step");
  const lines = useMemo(() => (runs[0] ? linesOf(runs.slice(0, 1), metric, 0) : []), [runs, metric]);
  useSelected("step", step);
  if (!runs[0] || lines.length === 0) return null;
  const zoom = { from: Math.max(0, step - SHOWN_WINDOWS * window), to: Math.min(steps!.step.at(-1)!, step + SHOWN_WINDOWS * window) };
  return (
    <div className="around">
      <Chart {...titleOf(metric)} x={runs[0].x} lines={lines} zoom={zoom.to > zoom.from ? zoom : null} onPick={(x) => setParams({ step: String(Math.round(x)) })} />
    </div>
  );
}
