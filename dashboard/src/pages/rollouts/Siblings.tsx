/** Lists, below a conversation, the other answers of its group and the answers to its prompt at other steps. */

import { useState } from "react";
import { count, number, signed } from "../../format";
import { type Column, Table } from "../../shell/Table";
import { setParams } from "../../state/url";
import { Plain } from "../../text/SafeText";
import { Squares } from "./GroupList";
import { openAnswer, PromptGroups, usePromptGroups } from "./Prompts";
import type { Filling, RewardScale } from "./squares";
import type { Group, GroupSample, Sample } from "../../types";
import { visible } from "../../text/hostile";

/** Number of metrics beside each answer. The pane of numbers has the others. */
const MOST_METRICS = 3;

interface SiblingsProps {
  run: string;
  detail: Sample;
  group: Group | null;
  filling: Filling;
  scaleOf: (environment: string) => RewardScale;
  version: string;
  onSelect: (id: string) => void;
}

export function Siblings({ run, detail, group, filling, scaleOf, version, onSelect }: SiblingsProps) {
  const [others, showOthers] = useState(false);
  const prompt = detail.prompt_key ?? null;
  const { groups, loading } = usePromptGroups(run, others || !group ? prompt : null, version);
  const shown = others || !group;
  return (
    <>
      <div className="gh">
        <span className="seg small" role="group" aria-label="Answers to list">
          {group && <button aria-pressed={!shown} onClick={() => showOthers(false)}>answers of the group</button>}
          {prompt && <button aria-pressed={shown} onClick={() => showOthers(true)}>same prompt, other steps</button>}
        </span>
        {prompt && <button className="link d" onClick={() => setParams({ prompt })}>page of this prompt</button>}
      </div>
      <div className="rows" tabIndex={0} role="group" aria-label={shown ? "Same prompt, other steps" : "Answers of the group"}>
        {!shown && group ? (
          <AllAnswers group={group} filling={filling} selected={detail.sample_id} onSelect={onSelect} />
        ) : loading && prompt ? (
          <p className="none d">Reading the answers of this prompt.</p>
        ) : (
          <PromptGroups groups={groups} filling={filling} scaleOf={scaleOf} selected={detail.sample_id} onSelect={openAnswer} />
        )}
      </div>
    </>
  );
}

/** Lists the other answers of the group, one per line. */
function AllAnswers({ group, filling, selected, onSelect }: { group: Group; filling: Filling; selected: string; onSelect: (id: string) => void }) {
  const texts = group.samples.some((one) => one.completion);
  const sums = group.samples.some((one) => one.logprob_sum !== null);
  const names = [...new Set(group.samples.flatMap((one) => Object.keys(one.metrics ?? {})))].slice(0, sums ? 1 : MOST_METRICS);
  const columns: (Column<GroupSample> | false)[] = [
    { cell: (one) => <Squares samples={[one]} environment={group.environment ?? ""} filling={filling} /> },
    { head: `${count(group.samples.length)} answers`, cell: (one) => <button className={one.id === selected ? "" : "d"} onClick={() => onSelect(one.id)}>{one.id}</button> },
    texts && { head: "text", className: "wide", cell: (one) => <span className="cut m"><Plain text={one.completion} /></span> },
    { head: "reward", className: "r", cell: (one) => number(one.reward) },
    { head: "advantage", className: "r", cell: (one) => signed(one.advantage) },
    { head: "tokens", className: "r", cell: (one) => number(one.length) },
    sums && { head: "sum logprob", hint: "Sum of the engine's logprobs of the tokens that the model sampled", className: "r", cell: (one) => number(one.logprob_sum, 2) },
    sums && { head: "ratio", hint: "Probability of the answer: trainer / engine, over the trained tokens", className: "r", cell: (one) => number(one.ratio, 3) },
    ...names.map((name): Column<GroupSample> => ({ head: visible(name), hint: visible(name), className: "r cut", cell: (one) => number(one.metrics[name]) })),
  ];
  return <Table className="ans" rows={group.samples} columns={columns.filter((column) => column !== false)} keyOf={(one) => one.id} row={(one) => ({ className: one.id === selected ? "sel" : "", onClick: () => onSelect(one.id) })} />;
}
