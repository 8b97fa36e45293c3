/** Rollouts: what answers look like, and why they got their reward. Three panes, one selection, all of it in the address. */

import { useEffect, useMemo, useRef, useState } from "react";
import { runPath } from "../../api";
import { HeatStrip } from "../../charts/HeatStrip";
import { count, number, percent } from "../../format";
import { neighbor } from "../../lists";
import { Failure, Quiet, Waiting } from "../../shell/Quiet";
import { Segments, Select } from "../../shell/controls";
import { useKeys } from "../../shell/keys";
import { useVersion } from "../../state/live";
import { useKept, useResource } from "../../state/resource";
import { useRunId, useRunInfo, useStatus } from "../../state/run";
import { column, useSteps } from "../../state/steps";
import { useThrottled } from "../../state/timing";
import { parseStep, setParams, usePlace, useRange, useSearchText } from "../../state/url";
import { visible } from "../../text/hostile";
import type { Group, Sample, SampleRow, Samples, Value } from "../../types";
import { AnswerList, metricSorts, PAGE_ROWS, SORTS } from "./AnswerList";
import { completion } from "./conversation";
import { ConversationPane, type Folded, type Shown } from "./ConversationPane";
import { Export, Facets, Ranges } from "./Facets";
import { noFilters, numChosen, queryOf } from "./filters";
import { GroupList } from "./GroupList";
import { InFlight } from "./InFlight";
import { Numbers } from "./Numbers";
import { chosen, moveAnswer, moveGroup } from "./select";
import { PromptList, PromptPane } from "./Prompts";
import { Siblings } from "./Siblings";
import { fillingBy, METRIC, rewardScales, type RewardScale, SQUARES } from "./squares";
import "../panes.css";
import "./rollouts.css";

/** How often the list of answers, or its counts alone, follows a live run. */
const ANSWERS_MS = 3000;
const COUNTS_MS = 15_000;

const LISTS = [["groups", "step"], ["answers", "all"], ["prompts", "prompts"], ["flight", "in flight"]] as const;

const VIEW_KEYS: Shown[] = ["text", "surprise", "ratio", "entropy", "mask", "version"];

/** Rows of the heat strip: the first metric that the run has. */
const HEAT: [label: string, metrics: string[], format?: (value: Value) => string][] = [
  ["reward", ["reward/all_groups/mean", "reward/total/mean"], (value) => number(value, 2)],
  ["zero advantage", ["discarded/zero_advantage/pct"], (value) => percent(value === null ? null : value / 100, 0)],
  ["answer tokens", ["rollouts/tokens_completion/mean"]],
  ["step seconds", ["timing_step_total"]],
  ["entropy", ["entropy"]],
  ["staleness", ["staleness/token_age_mean"], (value) => number(value, 2)],
];

export function Rollouts() {
  const run = useRunId();
  const { params } = usePlace();
  const [range] = useRange();
  const { steps } = useSteps(run);
  const { live } = useStatus(run);
  const info = useRunInfo(run).data;
  // A range of the ruler is that of the page: its steps, and its newest one first.
  const inRange = useMemo(() => (steps?.step ?? []).flatMap((one, row) => (!range || (one >= range.from && one <= range.to) ? [row] : [])), [steps, range?.from, range?.to]);
  const newest = steps && inRange.length > 0 ? steps.step[inRange.at(-1)!]! : null;
  // Without a step in the address the page opens at the newest one and stays there: new steps never move it.
  const [opened, setOpened] = useState<{ run: string; step: number } | null>(null);
  useEffect(() => {
    if (newest !== null && opened?.run !== run) setOpened({ run, step: newest });
  }, [newest, run, opened]);
  // Before a step has ended, its groups are there as they are scored.
  const begun = newest ?? (steps ? (range?.from ?? 0) : null);
  const step = parseStep(params.step) ?? (opened?.run === run && !range ? opened.step : begun);
  const sample = params.sample ?? "";

  const groupsVersion = useVersion(run, "groups");
  const groups = useResource<Group[]>(step === null ? null : runPath(run, "groups"), { step }, step === begun ? groupsVersion : "");
  // A record without steps, as of evals alone, has no groups to open with.
  const first = !live && steps?.step.length === 0 && groups.data?.length === 0 ? "answers" : "groups";
  const list = params.list === "answers" || params.list === "prompts" ? params.list : params.list === "flight" && live ? "flight" : first;

  const [draft, setDraft] = useSearchText((search) => ({ search, list: list === "prompts" ? "prompts" : search ? "answers" : null }));

  const sort = params.sort ?? "step";
  const query = queryOf(params, range);
  const samplesPath = runPath(run, "samples");
  // Below the groups of a step, only counts follow a live run.
  const samplesVersion = useThrottled(useVersion(run, "samples"), list === "answers" ? ANSWERS_MS : COUNTS_MS);
  const page = useResource<Samples>(samplesPath, { ...query, offset: 0, limit: PAGE_ROWS, facets: false }, samplesVersion);
  // Counts take longer than rows: a new filter reads its rows first. The previous counts stay meanwhile, so that the facets
  // keep their place.
  const counted = useResource<Samples>(page.data ? samplesPath : null, { ...query, limit: 0 }, samplesVersion);
  const counts = useKept(counted.data);
  const total = page.data?.total ?? counts?.total;
  // A filter answers soon: the rows before it stay until then. A search takes longer, and says so.
  const before = useKept(page.data);
  const listed = params.search || page.error ? page.data : before;

  // Facets of the whole run, whichever answers are listed.
  const metrics = useKept((page.data ?? counts)?.metrics) ?? [];

  const rows = useRef<SampleRow[]>([]);
  const inList = list === "groups" ? null : listed;
  const scaleOf = useMemo(() => {
    const answers = (groups.data ?? []).flatMap(({ environment, samples }) => samples.map(({ reward }) => ({ environment, reward })));
    return rewardScales(info?.environments ?? [], [...answers, ...(inList?.rows ?? [])]);
  }, [groups.data, inList, info]);

  const by = params.squares ?? "reward";
  const filling = useMemo(
    () => fillingBy(by, scaleOf, [...(groups.data ?? []).flatMap((group) => group.samples), ...(inList?.rows ?? [])]),
    [by, scaleOf, groups.data, inList],
  );
  const [foldedKeys, setFolded] = useState<ReadonlySet<string>>(new Set());
  const folded: Folded = { keys: foldedKeys, set: setFolded };

  // The ruler and [ ] change the step alone: an answer of the step before is not meant any more.
  const last = useRef({ step: params.step, sample });
  useEffect(() => {
    const left = last.current;
    last.current = { step: params.step, sample };
    if (list === "groups" && sample && left.sample === sample && left.step !== params.step) setParams({ sample: null, attempt: null }, true);
  }, [params.step, sample]);

  const inGroups = groups.data ? chosen(groups.data, sample) : null;
  const selected = sample || (list === "answers" ? page.data?.rows[0]?.sample_id : inGroups?.sample) || "";
  // A resumed run can have an answer of this name in each attempt.
  const attempt = attemptOf(selected, groups.data, rows.current, page.data) ?? (params.attempt ? Number(params.attempt) : groups.loading && step !== null ? null : (info?.info.attempt ?? 1));
  const detail = useResource<Sample>(selected && attempt !== null ? runPath(run, "samples", attempt, selected) : null);
  const kept = useKept(detail.data);
  const isEmpty = list === "answers" && page.data?.total === 0;
  const shownDetail = detail.data ?? (detail.loading && !isEmpty ? kept : undefined);
  // In the list of all steps, the group of the shown answer comes from its own step.
  const ownStep = list === "answers" && shownDetail && shownDetail.group_id >= 0 && shownDetail.step !== step ? shownDetail.step : null;
  const own = useResource<Group[]>(ownStep === null ? null : runPath(run, "groups"), { step: ownStep });
  const [pinAttempt, pinId] = (params.pin ?? "").split("~");
  const isPinned = pinId === selected && Number(pinAttempt) === attempt;
  const pinned = useResource<Sample>(pinId ? runPath(run, "samples", pinAttempt!, pinId) : null);

  const select = (id: string | null, more: Record<string, string | null> = {}) => id && setParams({ sample: id, prompt: null, ...more }, false);
  const selectRow = (row: SampleRow) => select(row.sample_id, { step: row.step < 0 ? null : String(row.step), attempt: String(row.attempt) });
  // Enter opens the first hit as soon as the search returns it.
  const wantsFirst = useRef(false);
  useEffect(() => {
    const hit = page.data?.rows[0];
    if (!wantsFirst.current || draft !== (params.search ?? "") || !page.data) return;
    wantsFirst.current = false;
    if (hit) selectRow(hit);
  });
  const moveRow = (by: number) => {
    const next = neighbor(rows.current, rows.current.findIndex((row) => row.sample_id === selected), by);
    if (next) selectRow(next);
  };
  const all = (list === "answers" && ownStep !== null ? own.data : groups.data) ?? [];
  useKeys("Rollouts", [
    { keys: ["j"], does: "next group or answer of the list", run: () => (list === "answers" ? moveRow(1) : select(moveGroup(all, selected, 1))) },
    { keys: ["k"], does: "previous one", run: () => (list === "answers" ? moveRow(-1) : select(moveGroup(all, selected, -1))) },
    { keys: ["l"], does: "next answer of the group", run: () => select(moveAnswer(all, selected, 1)) },
    { keys: ["h"], does: "previous answer of the group", run: () => select(moveAnswer(all, selected, -1)) },
    { keys: ["c"], does: "pin this answer beside the next", run: () => pin() },
    { keys: ["f"], does: "go to the newest step", run: () => newest !== null && setParams({ step: String(newest), sample: null, list: null }) },
    ...VIEW_KEYS.map((view, i) => ({ keys: [String(i)], does: `show as ${view}`, run: () => setParams({ view }, true) })),
  ]);
  const openFirst = (event: React.KeyboardEvent<HTMLInputElement>) => {
    if (event.key !== "Enter" || event.nativeEvent.isComposing || !draft) return;
    wantsFirst.current = true;
    event.currentTarget.blur();
    setParams({ search: draft, list: "answers" }, true);
  };
  const pin = () => setParams({ pin: isPinned ? null : `${attempt}~${selected}` });

  const heat = useMemo(() => {
    if (!steps) return [];
    return HEAT.flatMap(([label, names, format]) => {
      const name = names.find((one) => steps.metrics[one]?.some((value) => value !== null));
      if (!name) return [];
      const values = column(steps, name);
      return [{ label, values: inRange.map((row) => values[row] ?? null), format }];
    });
  }, [steps, inRange]);

  if (groups.error && !groups.data) return <Failure error={groups.error} />;
  if (steps && steps.step.length === 0 && page.data?.total === 0) {
    return <Waiting title="No answer yet." text="The first group appears here when its answers are scored. The page updates by itself." />;
  }
  const groupSize = info?.config.group_size;
  const numFilters = numChosen(params);
  const group = all.find((one) => one.samples.some((answer) => answer.id === selected)) ?? null;
  const scale = scaleOf(shownDetail?.environment ?? "");
  const keptGroups = all.filter((one) => one.status === "kept").length;
  const others = [...new Set(all.map((one) => one.status))].filter((status) => status !== "kept").map((status) => `${count(all.filter((one) => one.status === status).length)} ${status}`);
  const fresh = live && newest !== null && step !== null ? newest - step : 0;

  const siblings = (of: Sample) => <Siblings run={run} detail={of} group={group} filling={filling} scaleOf={scaleOf} version={samplesVersion} onSelect={(id) => select(id)} />;

  return (
    <div className={`rollouts${params.prompt ? " one" : pinId ? " two" : ""}`}>
      <section className="facets" aria-label="Search and facets">
        <div className="sf">
          <input className="field" type="search" placeholder="Search all answers and prompts" aria-label="Search all answers and prompts" value={draft} onChange={(event) => setDraft(event.target.value)} onKeyDown={openFirst} />
        </div>
        <div className={`fl ${params.filters === "1" ? "open" : ""}`}>
          <Ranges metrics={metrics} />
          <Facets counts={counts?.facets ?? {}} total={counts?.total ?? 0} />
        </div>
        <span className="total d">
          <button className="link" aria-expanded={params.filters === "1"} onClick={() => setParams({ filters: params.filters === "1" ? null : "1" }, true)}>
            {params.filters === "1" ? "fewer filters" : numFilters > 0 ? `all filters, ${numFilters} on` : "all filters"}
          </button>
          <span>{page.error ? <span className="w">{page.error.message}</span> : `${count(total)} answers`}</span>
          <Export path={samplesPath} total={total ?? 0} />
        </span>
      </section>
      <section className="p1" aria-label="Steps and groups">
        {steps && inRange.length > 0 && (
          <div className="hs">
            <HeatStrip steps={inRange.map((row) => steps.step[row]!)} rows={heat} selected={step} onSelect={(next) => setParams({ step: String(next), sample: null, list: null })} />
          </div>
        )}
        <div className="gh">
          {list === "groups" ? (
            <span className="cut">
              <b>Step {count(step)}</b> <span className="d">{groups.data ? `${count(all.length)} groups, ${[`${count(keptGroups)} kept`, ...others].join(", ")}` : "reading its groups"}</span>
            </span>
          ) : list === "flight" ? (
            <b>In flight</b>
          ) : list === "prompts" ? (
            <b>Prompts</b>
          ) : (
            <span>
              <b>All steps</b> <Select label="Order" className="sort" value={sort} options={[...SORTS, ...metrics.flatMap(metricSorts)]} choose={(next) => setParams({ sort: next === "step" ? null : next })} />
            </span>
          )}
          {list === "groups" && fresh > 0 && <button className="link d nb" onClick={() => setParams({ step: String(newest), sample: null })}>{fresh} newer</button>}
          <Segments label="List" className="seg small" value={list} options={LISTS.slice(0, live ? undefined : -1)} choose={(next) => setParams(next === "groups" ? { list: null, ...noFilters() } : { list: next })} />
        </div>
        {(list === "groups" || list === "answers") && <Legend by={by} metrics={metrics} scale={filling.scaleOf(group?.environment ?? all[0]?.environment ?? "")} />}
        {list === "prompts" ? (
          <PromptList run={run} query={query} version={samplesVersion} />
        ) : list === "flight" ? (
          <InFlight run={run} version={newest === null ? null : newest + 1} size={typeof groupSize === "number" ? groupSize : null} />
        ) : list === "groups" && groups.data?.length === 0 ? (
          <p className="none d">No group of this step was recorded.</p>
        ) : list === "groups" ? (
          <GroupList groups={all} scaleOf={scaleOf} filling={filling} group={inGroups?.group ?? null} sample={selected} onSelect={(id) => select(id)} />
        ) : (
          <AnswerList path={samplesPath} query={query} version={samplesVersion} first={listed} sort={sort} search={params.search ?? ""} sample={selected} scaleOf={scaleOf} filling={filling} onSelect={selectRow} onRows={(known) => void (rows.current = known)} />
        )}
      </section>
      {params.prompt ? (
        <PromptPane key={params.prompt} run={run} prompt={params.prompt} version={samplesVersion} filling={filling} scaleOf={scaleOf} />
      ) : (
        <>
          {pinned.data && (
            <ConversationPane
              detail={pinned.data}
              shown={params.view ?? ""}
              setShown={(view) => setParams({ view }, true)}
              search={params.search ?? ""}
              folded={folded}
              against={isPinned || !shownDetail ? undefined : { text: completion(shownDetail.turns), isFirst: false }}
              title={<Title detail={pinned.data} note={<button className="link d" onClick={() => setParams({ pin: null })}>unpin</button>} />}
            />
          )}
          {pinned.data && isPinned ? (
            <section className="p2" aria-label="Answer to compare">
              <div className="conv"><Quiet title="Choose another answer to compare." /></div>
              <div className="dock">{siblings(pinned.data)}</div>
            </section>
          ) : shownDetail ? (
            <ConversationPane
              detail={shownDetail}
              shown={params.view ?? ""}
              setShown={(view) => setParams({ view }, true)}
              search={params.search ?? ""}
              folded={folded}
              against={pinned.data && { text: completion(pinned.data.turns), isFirst: true }}
              title={<Title detail={shownDetail} of={group?.samples.length} note={<button className="link d" onClick={pin}>{isPinned ? "unpin" : "pin"} <kbd>c</kbd></button>} />}
            >
              {siblings(shownDetail)}
            </ConversationPane>
          ) : (
            <section className="p2">{detail.error && <Quiet title={`Answer ${selected} was not found.`} text={`${detail.error.message}${live ? " One that is still being generated stands under “in flight”." : ""}`} />}</section>
          )}
          {shownDetail && <Numbers detail={shownDetail} group={group} scale={scale} pinned={isPinned ? undefined : pinned.data} origin={info?.info.started_at} />}
        </>
      )}
    </div>
  );
}

function attemptOf(id: string, groups: Group[] | undefined, rows: SampleRow[], page: Samples | undefined): number | undefined {
  return groups?.find((group) => group.samples.some((answer) => answer.id === id))?.attempt ?? [...rows, ...(page?.rows ?? [])].find((row) => row.sample_id === id)?.attempt;
}

function Title({ detail, of, note }: { detail: Sample; of?: number; note: React.ReactNode }) {
  const place = of ? `answer ${detail.sample_index + 1} of ${of}` : detail.eval_name ? `of eval ${visible(detail.eval_name)} after ${count(detail.step + 1)} steps` : `of step ${count(detail.step)}`;
  return (
    <span className="ttl">
      <b>{detail.sample_id}</b> <span className="d">{place}</span> {note}
    </span>
  );
}

/** Chooses the number that fills the squares, and shows the ends of its scale. */
function Legend({ by, metrics, scale }: { by: string; metrics: readonly string[]; scale: RewardScale }) {
  return (
    <div className="fillkey s d">
      <label>
        squares by{" "}
        <Select label="squares by" className="sort" value={by} options={[...SQUARES, ...metrics.map((name) => [`${METRIC}${name}`, name] as const)]} choose={(next) => setParams({ squares: next === "reward" ? null : next }, true)} />
      </label>
      <span className="sq" aria-hidden="true">{number(scale.low)} {[0, 1, 2, 3, 4].map((one) => <i key={one} className={`l${one}`} />)} {number(scale.high)}</span>
    </div>
  );
}
