import { group, median, sum } from "d3-array";
import { useMemo } from "react";
import { runPath } from "../../api";
import { duration, NONE, number, signed } from "../../format";
import { useResource } from "../../state/resource";
import { Facts, Rows } from "../../shell/Table";
import { place } from "../../state/url";
import { visible } from "../../text/hostile";
import { shortError } from "../gauges";
import { firstTokenRows, versionRange } from "../rollouts/Numbers";
import { answerAddress } from "../rollouts/select";
import type { Sample } from "../../types";
import { advice, type Around, meanPath, tableRows, verdict } from "./criticalPath";
import type { StepPaths } from "./load";
import { COLOR, type SpanColumns } from "./spans";

interface StepPanelProps {
  read: StepPaths;
  around: Around;
  /** The selected step, while several are in view. */
  chosen: number | null;
  onFit: () => void;
}

/** Explains what a step, or the mean of several, waited for: a sentence, and a table whose seconds add up to the step. */
export function StepPanel({ read: { first, last, paths }, around, chosen, onFit }: StepPanelProps) {
  const several = first !== last;
  // The panel is rendered for each frame of a view that moves.
  const path = useMemo(() => (several ? meanPath(paths) : paths[0]!), [several, paths]);
  const rows = useMemo(() => tableRows(path), [path]);
  const [sentence, tips] = useMemo(() => [verdict(paths, around), advice(paths, around)], [paths, around]);
  const whole = path.end - path.start;
  const most = Math.max(...rows.map((row) => row.seconds), 1e-9);
  const ready = path.groupsReady;
  const share = (seconds: number) => `${((100 * seconds) / Math.max(whole, 1e-9)).toFixed(seconds < 0.1 * whole ? 1 : 0)}\u2009%`;
  return (
    <section className="sec">
      <h2>{several ? `Mean of steps ${first} to ${last}` : `Step ${path.step}`} <span>{duration(whole)}</span></h2>
      <p className="vd">{sentence}</p>
      {ready && ready.seconds > 0.05 && (
        <p className="d">{ready.earlier} of {ready.of} groups were ready {duration(ready.seconds)} earlier.</p>
      )}
      {tips.map((tip) => <p className="d" key={tip}>{tip}</p>)}
      {!several && !path.last && path.ready > path.start && <p className="d">Every answer of its batch was scored before it began.</p>}
      {several && last - first + 1 > paths.length && <p className="d">Measured on {number(paths.length)} of these steps, evenly spaced.</p>}
      <table className="cp">
        <thead>
          <tr><th className="no" /><th>Critical path</th><th className="br" /><th className="r sh">share</th><th className="r">s</th></tr>
        </thead>
        <tbody>
          {rows.map((row, i) => (
            <tr key={row.label}>
              <td className="no"><i>{i + 1}</i></td>
              <td className="cut" title={row.label}>{row.label}</td>
              <td className="br"><i style={{ width: `${Math.max(1.5, (100 * row.seconds) / most)}%`, background: `var(--${COLOR[row.kind]})` }} /></td>
              <td className="r sh">{share(row.seconds)}</td>
              <td className="r">{row.seconds.toFixed(2)}</td>
            </tr>
          ))}
          <tr className="sum"><td /><td>{several ? "mean step" : "step"}</td><td className="br" /><td className="sh" /><td className="r">{whole.toFixed(2)}</td></tr>
        </tbody>
      </table>
      {several && chosen !== null && <p className="go"><button className="link" onClick={onFit}>Show step {chosen} alone</button></p>}
    </section>
  );
}

export const groupOf = (sample: string): string => sample.slice(0, sample.lastIndexOf("-"));

/** Returns the seconds of a request by the name of their spans: as recorded, else of the spans in view. */
function secondsOf(sample: string, detail: Sample | undefined, columns: SpanColumns | null): Map<string, number> {
  const found = new Map<string, number>();
  const add = (name: string, seconds: number) => found.set(name, (found.get(name) ?? 0) + seconds);
  for (const span of detail?.spans ?? []) add(span.name, span.end - span.start);
  if (found.size === 0) {
    columns?.sample_id.forEach((other, row) => {
      if (other === sample) add(columns.name[row]!, columns.end[row]! - columns.start[row]!);
    });
  }
  // Tools run while the environment replies.
  if (found.has("environment")) found.set("environment", Math.max(0, found.get("environment")! - (found.get("tool") ?? 0)));
  return found;
}

/** Returns the calls of each sandbox by their operation: how many, their seconds, and how they failed. */
export function sandboxRows(spans: Sample["sandbox_spans"]): [string, [string, string][]][] {
  return [...group(spans, (span) => span.sandbox ?? "not created")].map(([sandbox, own]) => [
    sandbox,
    [...group(own, (span) => span.name)].map(([name, calls]): [string, string] => {
      const errors = [...new Set(calls.flatMap((call) => (call.error ? [shortError(call.error)] : [])))];
      const seconds = `${number(sum(calls, (call) => call.end - call.start), 3)} s`;
      return [calls.length > 1 ? `${name}, ${calls.length} calls` : name, [seconds, ...errors].join(", ")];
    }),
  ]);
}

/** Returns the seconds of decode of each request of a group in view. */
function decodeSeconds(group: string, columns: SpanColumns | null): Map<string, number> {
  const found = new Map<string, number>();
  columns?.sample_id.forEach((id, row) => {
    if (id && groupOf(id) === group && columns.name[row] === "decode") found.set(id, (found.get(id) ?? 0) + columns.end[row]! - columns.start[row]!);
  });
  return found;
}

interface RequestProps {
  run: string;
  sample: string;
  attempt: number;
  columns: SpanColumns | null;
  /** Seconds that it has been running for; null when it has ended. */
  running: number | null;
}

/** The selected request and the others of its group. */
export function RequestPanel({ run, sample, attempt, columns, running }: RequestProps) {
  const { data: detail, error } = useResource<Sample>(running === null ? runPath(run, "samples", attempt, sample) : null);
  const traced = useMemo(() => secondsOf(sample, detail, columns), [sample, detail, columns]);
  const time = (name: string) => (traced.has(name) ? `${number(traced.get(name), 3)} s` : NONE);
  const prompt = groupOf(sample);
  const mates = useMemo(() => decodeSeconds(prompt, columns), [prompt, columns]);
  const decode = traced.get("decode") ?? 0;
  const whole = Math.max(...mates.values(), 1e-9);
  const middle = median([...mates.values()]);
  const rows: [string, React.ReactNode][] = [
    ["queue", time("queue")],
    [`prefill${detail ? `, ${number(detail.prompt_tokens)} tokens` : ""}`, time("prefill")],
    ...(detail ? firstTokenRows(detail) : []),
    [`decode${detail ? `, ${number(detail.completion_tokens)} tokens` : ""}`, time("decode")],
    ...["tool", "environment"].filter((name) => traced.has(name)).map((name): [string, string] => [name === "tool" ? "tools" : "environment", time(name)]),
    ["reward", time("reward")],
  ];
  if (detail?.completion_tokens && decode > 0) rows.push(["tokens a second", number(detail.completion_tokens / decode)]);
  if (detail) rows.push(["its reward", number(detail.reward)], ["advantage", signed(detail.advantage)], ["versions", versionRange(detail)], ["status", detail.status]);
  return (
    <>
      <section className="sec">
        <h2>Request {sample} {detail && <span>engine {number(detail.server)}, slot {number(detail.lane)}</span>}</h2>
        {running !== null ? <p className="d">It has been running for {duration(running)}.</p> : error && !detail ? <p className="d">{error.message}</p> : <Rows rows={rows} />}
        {detail && <p className="go"><a className="link" href={answerAddress(place(), detail)}>Read the answer</a></p>}
      </section>
      {detail && sandboxRows(detail.sandbox_spans).map(([sandbox, of]) => (
        <Facts key={sandbox} title="Sandbox" note={visible(sandbox)} rows={of} />
      ))}
      {mates.size > 1 && (
        <section className="sec">
          <h2>Group {prompt} <span>decode seconds</span></h2>
          <svg width="100%" height="44" viewBox="0 0 284 44" aria-hidden="true">
            <line className="ax" x1="4" x2="274" y1="22.5" y2="22.5" />
            {[0, 0.5, 1].map((share) => (
              <g key={share}>
                <line className="ax" x1={4 + share * 270} x2={4 + share * 270} y1="22" y2="26" />
                <text x={4 + share * 270} y="39" textAnchor={share === 0 ? "start" : share === 1 ? "end" : "middle"}>{number(share * whole)}</text>
              </g>
            ))}
            {[...mates].map(([id, length]) => (
              <circle key={id} cx={4 + (length / whole) * 270} cy="13" r="5" fill={id === sample ? "var(--ink)" : "var(--ground)"} stroke="var(--ink)" strokeWidth="1.2" />
            ))}
          </svg>
          {middle !== undefined && middle > 0 && mates.has(sample) && <p className="d">{number(decode / middle, 1)} times the median of its group in view.</p>}
        </section>
      )}
    </>
  );
}
