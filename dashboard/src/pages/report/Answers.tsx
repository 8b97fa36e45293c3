/** Answers of a run in one file: some steps, some groups of each, and their whole conversations. */

import { useState } from "react";
import { count } from "../../format";
import { embedded } from "../../embedded";
import { Segments } from "../../shell/controls";
import { Quiet } from "../../shell/Quiet";
import { useKeys } from "../../shell/keys";
import { useRunId, useRunInfo } from "../../state/run";
import { setParams, useParam } from "../../state/url";
import { ConversationPane } from "../rollouts/ConversationPane";
import { GroupList } from "../rollouts/GroupList";
import { Numbers } from "../rollouts/Numbers";
import { chosen, moveAnswer, moveGroup } from "../rollouts/select";
import { rewardScales } from "../rollouts/squares";
import type { Sample } from "../../types";
import "../panes.css";
import "../rollouts/rollouts.css";

export function Answers() {
  const run = useRunId();
  const info = useRunInfo(run).data;
  const [folded, setFolded] = useState<ReadonlySet<string>>(new Set());
  const steps = embedded?.examples.steps ?? [];
  const [wanted] = useParam("step");
  const [sample] = useParam("sample");
  const [view, setView] = useParam("view");
  const at = steps.find((one) => String(one.step) === wanted) ?? steps.at(-1);
  const groups = at?.groups ?? [];
  const selected = chosen(groups, sample) ?? chosen(groups, "");
  const group = groups.find((one) => one.id === selected?.group) ?? null;
  const answers = groups.flatMap(({ environment, samples }) => samples.map(({ reward }) => ({ environment, reward })));
  const scaleOf = rewardScales(info?.environments ?? [], answers);
  const select = (id: string | null) => id && setParams({ sample: id });
  useKeys("Answers", [
    { keys: ["j"], does: "next group", run: () => select(moveGroup(groups, selected?.sample ?? "", 1)) },
    { keys: ["k"], does: "group before", run: () => select(moveGroup(groups, selected?.sample ?? "", -1)) },
    { keys: ["l"], does: "next answer of the group", run: () => select(moveAnswer(groups, selected?.sample ?? "", 1)) },
    { keys: ["h"], does: "previous answer of the group", run: () => select(moveAnswer(groups, selected?.sample ?? "", -1)) },
  ]);
  if (!at || !group || !selected) return <Quiet title="No answers in this file." text="The run had none when it was exported." />;
  const detail = embedded?.examples.samples[`${group.attempt}/${selected.sample}`] as Sample | undefined;
  return (
    <div className="rollouts answers">
      <h1 className="vh">Answers</h1>
      <div className="facets">
        <Segments label="Step" value={at.step} options={steps.map(({ step }) => [step, `step ${count(step)}`])} choose={(step) => setParams({ step: String(step), sample: null })} />
      </div>
      <section className="p1" aria-label="Groups">
        <GroupList groups={groups} scaleOf={scaleOf} group={selected.group} sample={selected.sample} onSelect={select} />
      </section>
      {detail ? (
        <ConversationPane
          detail={detail}
          shown={view}
          setShown={(next) => setView(next, true)}
          search=""
          folded={{ keys: folded, set: setFolded }}
          title={
            <span className="nb">
              <b>{detail.sample_id}</b> <span className="d">answer {detail.sample_index + 1}</span>
            </span>
          }
        />
      ) : (
        <Quiet title="This answer is not in the file." text="The answers of this run are larger than a file of this kind holds." />
      )}
      {detail && <Numbers detail={detail} group={group} scale={scaleOf(detail.environment)} />}
    </div>
  );
}
