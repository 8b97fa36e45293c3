/** Shows the prompts of a run: a list with pass rates, and the page of one prompt with its answers by step and in other runs. */

import { useVirtualizer } from "@tanstack/react-virtual";
import { useMemo, useRef, useState } from "react";
import { address, type Query, runPath } from "../../api";
import { count, number, percent } from "../../format";
import { Segments, Select } from "../../shell/controls";
import { useKeys } from "../../shell/keys";
import { type Column, Table } from "../../shell/Table";
import { useRunColors } from "../../state/colors";
import { useResource, useResources } from "../../state/resource";
import { useRuns } from "../../state/run";
import { elsewhere, format, setParams, useOthers, usePlace } from "../../state/url";
import { visible } from "../../text/hostile";
import { Clipped, Plain } from "../../text/SafeText";
import type { Prompt, PromptMessage, Prompts as PromptPage, Samples } from "../../types";
import { inLine, promptParts } from "./conversation";
import { Squares } from "./GroupList";
import { groupsOf, markOf, MARKS, PROMPT_SORTS, type PromptGroup, verdict } from "./prompts";
import { fate, type Filling, type RewardScale } from "./squares";

const ROW = 20;
/** Limits on the prompts in the list, and on the answers on the page of one. */
const MOST_PROMPTS = 500;
const MOST_ANSWERS = 2000;
/** Other runs that are searched without a click. */
const FEW_RUNS = 4;

/** Draws the pass rate as one cell per step, from pale to full. */
function Rates({ prompt }: { prompt: Prompt }) {
  return (
    <span className="rates" aria-hidden="true">
      {prompt.steps.map((step, i) => <i key={step} className={`l${Math.ceil((4 * prompt.rights[i]!) / prompt.counts[i]!)}`} title={`step ${step}: ${prompt.rights[i]} of ${prompt.counts[i]}`} />)}
    </span>
  );
}

/** Lists the prompts of the answers that pass the filters, with their share of right answers. */
export function PromptList({ run, query, version }: { run: string; query: Query; version: string }) {
  const { params } = usePlace();
  const { sort: _, ...filters } = query;
  const [mark, sort] = [params.mark ?? "", params.psort ?? "first_step"];
  const { data, error } = useResource<PromptPage>(runPath(run, "prompts"), { ...filters, mark, sort, limit: MOST_PROMPTS }, version);
  const box = useRef<HTMLDivElement>(null);
  const found = data?.rows ?? [];
  const rows = useVirtualizer({ count: found.length, getScrollElement: () => box.current, estimateSize: () => ROW, overscan: 16 });
  const at = found.findIndex((one) => one.prompt_key === params.prompt);
  const move = (by: number) => {
    const next = Math.min(Math.max(at + by, 0), found.length - 1);
    if (!found[next]) return;
    setParams({ prompt: found[next].prompt_key });
    rows.scrollToIndex(next, { align: "auto" });
  };
  useKeys("Prompts", [
    { keys: ["j"], does: "next prompt", run: () => move(1) },
    { keys: ["k"], does: "previous prompt", run: () => move(-1) },
  ]);
  const matching = data?.[(mark || "total") as (typeof MARKS)[number]] ?? 0;
  return (
    <>
      <div className="gh sub">
        <span className="f">solved</span>
        <Segments label="Prompts solved" className="seg small" value={mark} options={MARKS.map((one) => [one === "total" ? "" : one, <>{one === "total" ? "all" : one} {data && <span className="f">{count(data[one])}</span>}</>])} choose={(next) => setParams({ mark: next })} />
        <Select label="Order of prompts" className="sort" value={sort} options={PROMPT_SORTS} choose={(next) => setParams({ psort: next === "first_step" ? null : next })} />
      </div>
      {!data && <p className="none d" role="status">{error ? <span className="w">{error.message}</span> : "Reading the prompts."}</p>}
      {data && found.length === 0 && <p className="none d">No prompt has answers that pass the filters.</p>}
      {matching > found.length && <p className="none d">The first {count(found.length)} of {count(matching)}. Filters and orders show others.</p>}
      <div className="gl" ref={box} role="listbox" aria-label="Prompts" tabIndex={0}>
        <div style={{ height: rows.getTotalSize(), position: "relative" }}>
          {rows.getVirtualItems().map(({ index, start }) => {
            const one = found[index]!;
            const line = inLine(one.prompt);
            return (
              <div key={one.prompt_key} role="option" aria-selected={params.prompt === one.prompt_key} className={`pr${params.prompt === one.prompt_key ? " sel" : ""}`} style={{ transform: `translateY(${start}px)` }} onClick={() => setParams({ prompt: one.prompt_key })} title={visible(line)}>
                <span className="cut"><Plain text={line} /></span>
                <Rates prompt={one} />
                <span className="r">{percent(one.pass_rate, 0)}</span>
                <span className="r f">{count(one.n)}</span>
                <span className="s cut">{markOf(one)}</span>
              </div>
            );
          })}
        </div>
      </div>
    </>
  );
}

interface GroupsProps {
  groups: readonly PromptGroup[];
  filling: Filling;
  scaleOf: (environment: string) => RewardScale;
  selected: string;
  onSelect: (group: PromptGroup, sample: string) => void;
}

/** Lists the groups of one prompt: step, answers, mean reward and outcome. */
export function PromptGroups({ groups, filling, scaleOf, selected, onSelect }: GroupsProps) {
  const open = (one: PromptGroup) => onSelect(one, one.samples[0]!.id);
  const columns: Column<PromptGroup>[] = [
    { head: "step", cell: (one) => <button onClick={() => open(one)}>{one.eval ? `◇${count(one.step + 1)}` : count(one.step)}</button> },
    { head: "answers", cell: (one) => <Squares samples={one.samples} environment={one.environment} filling={filling} selected={selected} onSelect={(id) => onSelect(one, id)} /> },
    { head: "reward", className: "r", cell: (one) => number(one.reward_mean, 2) },
    { head: "first answer", className: "wide", cell: (one) => <span className="cut m"><Plain text={one.samples[0]!.completion} /></span> },
    { head: "status", className: "s", cell: (one) => (one.eval ? `eval ${visible(one.eval)}` : fate(one, scaleOf(one.environment))) },
  ];
  const isOpen = (one: PromptGroup) => one.samples.some((sample) => sample.id === selected);
  return <Table className="ans pg" rows={groups} columns={columns} keyOf={(one) => [one.attempt, one.step, one.group, one.eval].join("/")} row={(one) => ({ className: isOpen(one) ? "sel" : "", onClick: () => open(one) })} />;
}

interface PromptProps {
  run: string;
  prompt: string;
  version: string;
  filling: Filling;
  scaleOf: (environment: string) => RewardScale;
}

/** Returns the answers of a prompt by step. */
export function usePromptGroups(run: string, prompt: string | null | undefined, version: string) {
  const rows = useResource<Samples>(prompt ? runPath(run, "samples") : null, { prompt: prompt ?? "", limit: MOST_ANSWERS, facets: false }, version);
  return { ...rows, groups: useMemo(() => groupsOf(rows.data?.rows ?? []), [rows.data]) };
}

/** Selects an answer of a prompt. */
export const openAnswer = (group: PromptGroup, sample: string): void =>
  setParams({ sample, attempt: String(group.attempt), step: group.step < 0 ? null : String(group.step), prompt: null });

/** The page of one prompt: pass rate by step, first right answer, answers by step, and the same prompt in other runs. */
export function PromptPane({ run, prompt, version, filling, scaleOf }: PromptProps) {
  const { data, error, loading, groups } = usePromptGroups(run, prompt, version);
  const own = useResource<PromptPage>(runPath(run, "prompts"), { prompt }, version).data?.rows[0];
  const all = useRuns().data?.runs ?? [];
  const { of: colorOf } = useRunColors();
  const drawn = useOthers();
  const [more, lookFurther] = useState(false);
  const place = usePlace();
  const candidates = [...all].filter((one) => one.id !== run).sort((a, b) => Number(drawn.includes(b.id)) - Number(drawn.includes(a.id)) || (b.started_at ?? 0) - (a.started_at ?? 0));
  const looked = candidates.slice(0, more ? undefined : Math.max(FEW_RUNS, drawn.length));
  const found = useResources<PromptPage>(looked.map((one) => address(runPath(one.id, "prompts"), { prompt })), looked.map(() => ""));
  const others = looked.flatMap((one, i) => (found[i]?.data?.rows[0] ? [{ run: one, prompt: found[i]!.data!.rows[0]! }] : []));
  const first = groups[0];
  const messages = useFirstMessages(run, first) ?? [{ role: "user", content: data?.rows[0]?.prompt ?? "" }];
  if (error && !data) return <section className="p2 wide"><p className="none w">{error.message}</p></section>;
  if (!loading && groups.length === 0) return <section className="p2 wide"><p className="none d">The record of this run has no answer to this prompt.</p></section>;
  const curves = [...(own ? [{ color: colorOf(run), prompt: own }] : []), ...others.map((one) => ({ color: colorOf(one.run.id), prompt: one.prompt }))];
  const inRuns: Column<(typeof others)[number]>[] = [
    { head: "run", cell: (one) => <a className="link" href={format(elsewhere(place, { run: one.run.id }, { list: "prompts", prompt }))}><i className="dot" style={{ background: `var(${colorOf(one.run.id)})` }} />{visible(one.run.name || one.run.id)}</a> },
    { head: "pass rate by step", cell: (one) => <Rates prompt={one.prompt} /> },
    { head: "right", className: "r", cell: (one) => percent(one.prompt.pass_rate, 0) },
    { head: "answers", className: "r", cell: (one) => count(one.prompt.n) },
    { head: "first right", className: "r", cell: ({ prompt: { first_right: first } }) => (first === null ? "never" : first < 0 ? "before training" : `step ${count(first)}`) },
  ];
  return (
    <section className="p2 wide" aria-label="Prompt">
      <div className="hd">
        <span className="ttl"><b>Prompt</b> <span className="d"><Plain text={first?.environment ?? ""} /></span></span>
        {first && <button className="link d" onClick={() => openAnswer(first, first.samples[0]!.id)}>open its first answer</button>}
        <button className="link d" onClick={() => setParams({ prompt: null })}>close</button>
      </div>
      <div className="conv" tabIndex={0} role="group" aria-label="Prompt and its answers">
        {promptParts(messages).map((message, i) => (
          <div className="msg" key={i}>
            <span>{message.role}</span>
            <div className="verbatim"><Clipped text={message.text} limit={600}>{(shown) => <Plain text={shown} />}</Clipped></div>
          </div>
        ))}
        <div className="msg">
          <span>pass rate<small>by step</small></span>
          <div>
            {own ? <p><b>{verdict(own)}</b> <span className="d">Mean reward {number(own.reward_mean, 2)}.</span></p> : <p className="d">{data ? "No answer of this prompt has a reward." : "Reading its answers."}</p>}
            {curves.length > 0 && <PassRates curves={curves} />}
          </div>
        </div>
        <div className="scroll"><PromptGroups groups={groups} filling={filling} scaleOf={scaleOf} selected="" onSelect={openAnswer} /></div>
        {(data?.total ?? 0) > MOST_ANSWERS && <p className="none d">The first {count(MOST_ANSWERS)} of {count(data!.total)} answers.</p>}
        <div className="msg">
          <span>other runs</span>
          <div>
            {others.length > 0 && <Table className="inruns" rows={others} columns={inRuns} keyOf={(one) => one.run.id} />}
            <p className="d">
              {found.some((one) => one.loading) ? "Searching other runs." : others.length === 0 ? (looked.length === 0 ? "There is no other run." : `None of ${count(looked.length)} other ${looked.length === 1 ? "run" : "runs"} has it.`) : ""}{" "}
              {looked.length < candidates.length && <button className="link" onClick={() => lookFurther(true)}>Look into {count(candidates.length - looked.length)} more</button>}
            </p>
          </div>
        </div>
      </div>
    </section>
  );
}

/** The messages of a prompt, from its first answer. */
function useFirstMessages(run: string, first: PromptGroup | undefined): PromptMessage[] | undefined {
  return useResource<{ messages: PromptMessage[] }>(first ? runPath(run, "samples", first.attempt, first.samples[0]!.id) : null).data?.messages;
}

const HEIGHT = 96;

/** Draws pass rates by step: one line per run, one dot per step. */
function PassRates({ curves }: { curves: { color: string; prompt: Prompt }[] }) {
  const steps = curves.flatMap((curve) => curve.prompt.steps);
  const [low, high] = [Math.min(...steps), Math.max(...steps)];
  const x = (step: number) => (high > low ? 1 + (98 * (step - low)) / (high - low) : 50);
  const y = (share: number) => 8 + (1 - share) * (HEIGHT - 16);
  return (
    <figure className="passes" aria-label="Pass rate by step">
      <svg width="100%" height={HEIGHT} role="img" aria-label={`Pass rate from step ${low} to ${high}`}>
        {[0, 0.5, 1].map((share) => <line key={share} className="ax" x1="0" x2="100%" y1={y(share)} y2={y(share)} />)}
        {curves.map(({ color, prompt }, k) => prompt.steps.map((step, i) => {
          const at = { x: `${x(step)}%`, y: y(prompt.rights[i]! / prompt.counts[i]!) };
          const before = i > 0 ? { x: `${x(prompt.steps[i - 1]!)}%`, y: y(prompt.rights[i - 1]! / prompt.counts[i - 1]!) } : at;
          return (
            <g key={`${k}/${step}`} style={{ color: `var(${color})` }}>
              {i > 0 && <line x1={before.x} y1={before.y} x2={at.x} y2={at.y} stroke="currentColor" />}
              <circle cx={at.x} cy={at.y} r="3" fill="currentColor"><title>{`step ${step}: ${prompt.rights[i]} of ${prompt.counts[i]} right`}</title></circle>
            </g>
          );
        }))}
      </svg>
      <figcaption className="s f"><span>{low < 0 ? "before training" : `step ${count(low)}`}</span><span>0 to 100 %</span><span>step {count(high)}</span></figcaption>
    </figure>
  );
}
