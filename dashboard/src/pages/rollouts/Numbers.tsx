import { max, mean, median, sum } from "d3-array";
import { useMemo } from "react";
import { duration, NONE, number, signed } from "../../format";
import { place } from "../../state/url";
import { type Pair, pairs, startWords } from "./compare";
import { completion } from "./conversation";
import { type Column, Facts, type Row, Table } from "../../shell/Table";
import { visible } from "../../text/hostile";
import { Plain } from "../../text/SafeText";
import { timeAddress } from "./select";
import { fate, gini, type RewardScale } from "./squares";
import { ratio, tokensOf } from "./tokens";
import type { Group, Sample, SampleNumbers } from "../../types";

/** Returns the policy versions that a sample was generated with: `3`, or `3 to 4`. */
export function versionRange({ start_version: start, end_version: end }: SampleNumbers): string {
  return start === end ? number(start) : `${number(start)} to ${number(end)}`;
}

interface Interval {
  name: string;
  color: string;
  seconds: number;
}

/** The time to the first token of a sample's first request; no row if its engine did not report it. */
export function firstTokenRows(detail: Sample): [string, string][] {
  const [first, ...others] = (detail.spans ?? []).filter((span) => span.first_token_seconds !== null);
  return first ? [[others.length > 0 ? "first token, turn 1" : "first token after", `${number(first.first_token_seconds, 3)} s`]] : [];
}

/** Time of a sample, as far as the record has it. */
export function timing(detail: Sample): { intervals: Interval[]; whole: number } | null {
  const { started_at: start, generated_at: generated, finished_at: end } = detail;
  if (start === null || end === null) return null;
  const spans = detail.spans ?? [];
  // Calls of an agent can overlap: the time in which at least one ran. Spans are in the order of their starts.
  const of = (name: string) => {
    let [sum, to] = [0, -Infinity];
    for (const span of spans.filter((one) => one.name === name)) {
      sum += Math.max(0, span.end - Math.max(span.start, to));
      to = Math.max(to, span.end);
    }
    return sum;
  };
  const engine = of("queue") + of("prefill") + of("decode");
  // Tools run while the environment replies, some of them at the same time.
  const replies = of("environment");
  const tools = Math.min(of("tool"), replies);
  const parts: Interval[] = [
    { name: "queue", color: "q", seconds: of("queue") },
    { name: "prefill", color: "pf", seconds: of("prefill") },
    { name: "decode", color: "dc", seconds: of("decode") },
  ].filter((part) => part.seconds > 0);
  const generation = (generated ?? end) - start;
  if (engine === 0) parts.push({ name: "generation", color: "dc", seconds: generation - replies });
  if (tools > 0) parts.push({ name: "tools", color: "env", seconds: tools });
  if (replies - tools > 0.0005) parts.push({ name: "environment", color: "env", seconds: replies - tools });
  if (engine > 0 && generation - engine - replies > 0.0005) parts.push({ name: "outside the engine", color: "wait", seconds: generation - engine - replies });
  if (generated !== null) parts.push({ name: "reward", color: "rw", seconds: end - generated });
  return { intervals: parts, whole: end - start };
}

/** Differences of the logprobs of trainer and engine. An answer may have more tokens than a call takes arguments. */
function mismatchOf(detail: Sample): { sum: number | null; ratio: number; tokens: number; mean: number; largest: number; outside: number } {
  const sampled = detail.turns.flatMap(tokensOf).filter((token) => token.logprob !== null);
  const compared = detail.turns.flatMap(tokensOf).filter((token) => ratio(token) !== null);
  const gaps = compared.map((token) => Math.abs(token.trainerLogprob! - token.logprob!));
  return {
    sum: sampled.length > 0 ? sum(sampled, (token) => token.logprob!) : null,
    ratio: Math.exp(sum(compared, (token) => token.trainerLogprob! - token.logprob!)),
    tokens: gaps.length,
    mean: mean(gaps) ?? 0,
    largest: max(gaps) ?? 0,
    outside: compared.filter((token) => Math.abs(ratio(token)! - 1) > 0.1).length,
  };
}

/** The numbers of two samples beside each other. */
function Both({ first, second }: { first: Sample; second: Sample }) {
  const columns: Column<Pair>[] = [
    { head: "Both", className: "cut", title: (pair) => visible(pair.name), cell: (pair) => visible(pair.name) },
    { head: first.sample_id, className: "r", title: (pair) => pair.first, cell: (pair) => pair.first },
    { head: second.sample_id, className: "r", title: (pair) => pair.second, cell: (pair) => pair.second },
  ];
  return (
    <section className="sec both">
      <Table rows={pairs(first, second)} columns={columns} keyOf={(pair) => pair.name} row={(pair) => ({ className: pair.first === pair.second ? "same" : "" })} />
      <p className="d">{startWords(completion(first.turns), completion(second.turns))}</p>
    </section>
  );
}

interface NumbersProps {
  detail: Sample;
  group: Group | null;
  scale: RewardScale;
  /** The sample beside this one. */
  pinned?: Sample;
  /** When the run began; without it there is no link to the timeline. */
  origin?: number | null;
}

export function Numbers({ detail, group, scale, pinned, origin = null }: NumbersProps) {
  const rewards = (group?.samples ?? []).map((sample) => sample.reward).filter((reward): reward is number => reward !== null);
  const lengths = (group?.samples ?? []).map((sample) => sample.length).filter((length): length is number => length !== null);
  const time = timing(detail);
  const mismatch = useMemo(() => mismatchOf(detail), [detail]);
  const status = detail.status === "kept" ? `kept, step ${detail.step}` : [detail.status, detail.reason?.replaceAll("_", " ")].filter(Boolean).join(", ");

  return (
    <aside className="p3" aria-label="Numbers" tabIndex={0}>
      {pinned && <Both first={pinned} second={detail} />}
      <div className="sec top3">
        <div><span className="s f">reward</span><b className="big">{number(detail.reward)}</b></div>
        <div><span className="s f">advantage</span><b className="big">{signed(detail.advantage, 2)}</b></div>
        <div title={detail.eval_name ? `eval ${visible(detail.eval_name)}` : "mean reward of the group"}><span className="s f cut">{detail.eval_name ? "eval" : "group"}</span><b className={detail.eval_name ? "cut" : "big cut"}>{detail.eval_name ? visible(detail.eval_name) : number(group?.reward_mean, 2)}</b></div>
      </div>
      <Facts
        title="Reward"
        rows={[
          ...Object.entries(detail.metrics).map(([name, value]): Row => [name, number(value)]),
          ...(detail.penalty ? [["overlong penalty", number(-detail.penalty)] as Row] : []),
          ...(group ? [["group std", number(group.reward_std)], ["group Gini", number(gini(rewards))]] as Row[] : []),
          ...(group && group.status !== "kept" ? [["group", fate(group, scale)] as Row] : []),
          ["status", status],
          ["stopped by", detail.stop_reason ?? NONE],
        ]}
      />
      {(Object.keys(detail.golden ?? {}).length > 0 || Object.keys(detail.tags ?? {}).length > 0) && (
        <Facts
          title="Gold"
          note="tags"
          rows={[
            ...Object.entries(detail.golden ?? {}).map(([name, value]): Row => [name, <Plain key={name} text={String(value).slice(0, 80)} />]),
            ...Object.entries(detail.tags ?? {}).map(([name, value]): Row => [name, <Plain key={name} text={String(value).slice(0, 80)} />]),
            ["environment", detail.environment],
          ]}
        />
      )}
      {time && (
        <Facts
          title="Time"
          note={duration(time.whole)}
          rows={[
            ...time.intervals.flatMap((part): Row[] => [[part.name, `${number(part.seconds, 3)} s`], ...(part.name === "prefill" ? firstTokenRows(detail) : [])]),
            ["server, slot", `${number(detail.server)}, ${number(detail.lane)}`],
          ]}
          after={origin !== null && <a className="link" href={timeAddress(place(), detail, detail.started_at!, detail.finished_at!, origin)}>Show on the timeline</a>}
        >
          <div className="bar2" aria-hidden="true">
            {time.intervals.map((part) => <i key={part.name} style={{ width: `${(100 * part.seconds) / Math.max(time.whole, 1e-9)}%`, background: `var(--${part.color})` }} />)}
          </div>
        </Facts>
      )}
      <Facts
        title="Versions"
        rows={[
          ["sampled with", versionRange(detail)],
          ["age", detail.age === null ? NONE : detail.age === 1 ? "1 step" : `${detail.age} steps`],
          ["retries", number(detail.num_retries)],
          ...Object.entries(detail.divergences).map(([kind, times]): Row => [`joins, ${kind.replaceAll("_", " ")}`, number(times)]),
        ]}
      />
      {mismatch.sum !== null && (
        <Facts
          title="Engine and trainer"
          rows={[
            ["sum of logprob", number(mismatch.sum, 3)],
            ...((mismatch.tokens > 0 ? [
              ["ratio of the answer", number(mismatch.ratio, 4)],
            ["mean |difference|", number(mismatch.mean, 4)],
            ["largest", number(mismatch.largest, 4)],
              ["ratio outside 0.9 to 1.1", `${mismatch.outside} of ${mismatch.tokens}`],
            ] : []) as Row[]),
          ]}
        />
      )}
      <Facts
        title="Length"
        note="tokens"
        rows={[
          ["prompt", number(detail.prompt_tokens)],
          ["this answer", number(detail.completion_tokens)],
          ...(detail.environment_tokens ? [["from the environment", number(detail.environment_tokens)] as Row] : []),
          ...(detail.wasted_tokens ? [["lost to failures", number(detail.wasted_tokens)] as Row] : []),
          ...(lengths.length > 1 ? ([["group median", number(median(lengths))], ["group Gini", number(gini(lengths))]] as Row[]) : []),
        ]}
      />
    </aside>
  );
}
