import { useMemo } from "react";
import { duration, NONE, number, signed } from "../../format";
import { place } from "../../state/url";
import { pairs, startWords } from "./compare";
import { completion } from "./conversation";
import { visible } from "../../text/hostile";
import { Plain } from "../../text/SafeText";
import { timeAddress } from "./select";
import { fate, gini, median, type RewardScale } from "./squares";
import { ratio, tokensOf } from "./tokens";
import type { Detail, Group, SampleRow } from "./types";

type Row = [string, React.ReactNode];

export function Rows({ rows }: { rows: readonly Row[] }) {
  return (
    <dl className="kv">
      {rows.map(([name, value]) => (
        <div key={name}>
          <dt className="cut" title={visible(name)}>{visible(name)}</dt>
          <dd>{typeof value === "string" ? visible(value) : value}</dd>
        </div>
      ))}
    </dl>
  );
}

/** Returns the policy versions that a sample was generated with: `3`, or `3 to 4`. */
export function versionRange({ start_version: start, end_version: end }: SampleRow): string {
  return start === end ? number(start) : `${number(start)} to ${number(end)}`;
}

interface Interval {
  name: string;
  color: string;
  seconds: number;
}

/** The time to the first token of a sample's first request; no row if its engine did not report it. */
export function firstTokenRows(detail: Detail): [string, string][] {
  const [first, ...others] = (detail.spans ?? []).filter((span) => span.first_token_seconds !== null);
  return first ? [[others.length > 0 ? "first token, turn 1" : "first token after", `${number(first.first_token_seconds, 3)} s`]] : [];
}

/** Time of a sample, as far as the record has it. */
export function timing(detail: Detail): { intervals: Interval[]; whole: number } | null {
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
function mismatchOf(detail: Detail): { sum: number | null; ratio: number; tokens: number; mean: number; largest: number; outside: number } {
  const sampled = detail.turns.flatMap(tokensOf).filter((token) => token.logprob !== null);
  const compared = detail.turns.flatMap(tokensOf).filter((token) => ratio(token) !== null);
  const gaps = compared.map((token) => Math.abs(token.trainerLogprob! - token.logprob!));
  return {
    sum: sampled.length > 0 ? sampled.reduce((sum, token) => sum + token.logprob!, 0) : null,
    ratio: Math.exp(compared.reduce((sum, token) => sum + token.trainerLogprob! - token.logprob!, 0)),
    tokens: gaps.length,
    mean: gaps.reduce((sum, gap) => sum + gap, 0) / gaps.length,
    largest: gaps.reduce((most, gap) => Math.max(most, gap), 0),
    outside: compared.filter((token) => Math.abs(ratio(token)! - 1) > 0.1).length,
  };
}

/** The numbers of two samples beside each other. */
function Both({ first, second }: { first: Detail; second: Detail }) {
  return (
    <section className="sec both">
      <table>
        <thead>
          <tr>
            <th>Both</th>
            <th className="r">{first.sample_id}</th>
            <th className="r">{second.sample_id}</th>
          </tr>
        </thead>
        <tbody>
          {pairs(first, second).map((pair) => (
            <tr key={pair.name} className={pair.first === pair.second ? "same" : ""}>
              <td className="cut" title={visible(pair.name)}>{visible(pair.name)}</td>
              <td className="r" title={pair.first}>{pair.first}</td>
              <td className="r" title={pair.second}>{pair.second}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <p className="d">{startWords(completion(first.turns), completion(second.turns))}</p>
    </section>
  );
}

interface NumbersProps {
  detail: Detail;
  group: Group | null;
  scale: RewardScale;
  /** The sample beside this one. */
  pinned?: Detail;
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
      <section className="sec">
        <h2>Reward</h2>
        <Rows
          rows={[
            ...Object.entries(detail.metrics).map(([name, value]): Row => [name, number(value)]),
            ...(detail.penalty ? [["overlong penalty", number(-detail.penalty)] as Row] : []),
            ...(group ? [["group std", number(group.reward_std)], ["group Gini", number(gini(rewards))]] as Row[] : []),
            ...(group && group.status !== "kept" ? [["group", fate(group, scale)] as Row] : []),
            ["status", status],
            ["stopped by", detail.stop_reason ?? NONE],
          ]}
        />
      </section>
      {(Object.keys(detail.golden ?? {}).length > 0 || Object.keys(detail.tags ?? {}).length > 0) && (
        <section className="sec">
          <h2>Gold <span>tags</span></h2>
          <Rows
            rows={[
              ...Object.entries(detail.golden ?? {}).map(([name, value]): Row => [name, <Plain key={name} text={String(value).slice(0, 80)} />]),
              ...Object.entries(detail.tags ?? {}).map(([name, value]): Row => [name, <Plain key={name} text={String(value).slice(0, 80)} />]),
              ["environment", detail.environment],
            ]}
          />
        </section>
      )}
      {time && (
        <section className="sec">
          <h2>Time <span>{duration(time.whole)}</span></h2>
          <div className="bar2" aria-hidden="true">
            {time.intervals.map((part) => <i key={part.name} style={{ width: `${(100 * part.seconds) / Math.max(time.whole, 1e-9)}%`, background: `var(--${part.color})` }} />)}
          </div>
          <Rows
            rows={[
              ...time.intervals.flatMap((part): Row[] => [
                [part.name, `${number(part.seconds, 3)} s`],
                ...(part.name === "prefill" ? firstTokenRows(detail) : []),
              ]),
              ["server, slot", `${number(detail.server)}, ${number(detail.lane)}`],
            ]}
          />
          {origin !== null && <a className="link" href={timeAddress(place(), detail, detail.started_at!, detail.finished_at!, origin)}>Show on the timeline</a>}
        </section>
      )}
      <section className="sec">
        <h2>Versions</h2>
        <Rows
          rows={[
            ["sampled with", versionRange(detail)],
            ["age", detail.age === null ? NONE : detail.age === 1 ? "1 step" : `${detail.age} steps`],
            ["retries", number(detail.num_retries)],
            ...Object.entries(detail.divergences).map(([kind, times]): Row => [`joins, ${kind.replaceAll("_", " ")}`, number(times)]),
          ]}
        />
      </section>
      {mismatch.sum !== null && (
        <section className="sec">
          <h2>Engine and trainer</h2>
          <Rows
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
        </section>
      )}
      <section className="sec">
        <h2>Length <span>tokens</span></h2>
        <Rows
          rows={[
            ["prompt", number(detail.prompt_tokens)],
            ["this answer", number(detail.completion_tokens)],
            ...(detail.environment_tokens ? [["from the environment", number(detail.environment_tokens)] as Row] : []),
            ...(detail.wasted_tokens ? [["lost to failures", number(detail.wasted_tokens)] as Row] : []),
            ...(lengths.length > 1 ? ([["group median", number(median(lengths))], ["group Gini", number(gini(lengths))]] as Row[]) : []),
          ]}
        />
      </section>
    </aside>
  );
}
