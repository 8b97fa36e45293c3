/** Lists, below a conversation, the other answers of its group and the answers to its prompt at other steps. */

import { useState } from "react";
import { count, NONE, number, signed } from "../../format";
import { setParams } from "../../state/url";
import { Plain } from "../../text/SafeText";
import { Squares } from "./GroupList";
import { openAnswer, PromptGroups, usePromptGroups } from "./Prompts";
import type { Filling, RewardScale } from "./squares";
import type { Detail, Group } from "./types";
import { visible } from "../../text/hostile";

/** Number of metrics beside each answer. The pane of numbers has the others. */
const MOST_METRICS = 3;

interface SiblingsProps {
  run: string;
  detail: Detail;
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
  return (
    <table className="ans">
      <thead>
        <tr>
          <th colSpan={2}>{count(group.samples.length)} answers</th>
          {texts && <th className="wide">text</th>}
          <th className="r">reward</th>
          <th className="r">advantage</th>
          <th className="r">tokens</th>
          {sums && <th className="r" title="Sum of the engine's logprobs of the tokens that the model sampled">sum logprob</th>}
          {sums && <th className="r" title="Probability of the answer: trainer / engine, over the trained tokens">ratio</th>}
          {names.map((name) => <th key={name} className="r cut" title={visible(name)}>{visible(name)}</th>)}
        </tr>
      </thead>
      <tbody>
        {group.samples.map((one) => (
          <tr key={one.id} className={one.id === selected ? "sel" : ""} onClick={() => onSelect(one.id)}>
            <td><Squares samples={[one]} environment={group.environment ?? ""} filling={filling} /></td>
            <td><button className={one.id === selected ? "" : "d"} onClick={() => onSelect(one.id)}>{one.id}</button></td>
            {texts && <td className="wide m"><span className="cut"><Plain text={one.completion} /></span></td>}
            <td className="r">{number(one.reward)}</td>
            <td className="r">{signed(one.advantage)}</td>
            <td className="r">{number(one.length)}</td>
            {sums && <td className="r">{one.logprob_sum === null ? NONE : number(one.logprob_sum, 2)}</td>}
            {sums && <td className="r">{one.ratio === null ? NONE : number(one.ratio, 3)}</td>}
            {names.map((name) => <td key={name} className="r">{number(one.metrics[name])}</td>)}
          </tr>
        ))}
      </tbody>
    </table>
  );
}
