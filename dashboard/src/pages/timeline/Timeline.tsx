/** Timeline: what ran when, and what a step waited for. */

import { useCallback, useEffect, useMemo, useRef, useState } from "react";
import { runPath } from "../../api";
import { download, fileName } from "../../charts/export";
import { duration, NONE, number } from "../../format";
import { Failure, Reading, Waiting } from "../../shell/Quiet";
import { Select } from "../../shell/controls";
import { useKeys } from "../../shell/keys";
import { useVersion } from "../../state/live";
import { useKept, useResource } from "../../state/resource";
import { useEvals, useHealth, useRunId, useRunInfo, useStatus } from "../../state/run";
import { column, timesOf, useSteps } from "../../state/steps";
import { useThrottled } from "../../state/timing";
import { elsewhere, format, parseStep, place, setParams, type Range, usePlace, useRange } from "../../state/url";
import type { GaugeName, InFlight, StepColumns } from "../../types";
import { at, type GaugeSeries } from "../gauges";
import { alertMarks, outages } from "./alerts";
import { Canvas, type Hit } from "./Canvas";
import { tableRows, type CriticalPath } from "./criticalPath";
import type { Gauge, Mark, PathNode, Scene } from "./scene";
import { AXIS, LABEL_WIDTH, layOut, nextRequest, RIGHT, type Layout } from "./layout";
import { readForExport, useCriticalPaths, useSpans } from "./load";
import { Minimap } from "./Minimap";
import { buildLanes, COLOR, type Kind, type Lanes, OUTCOMES, type Outcome, type SpanColumns, withRunning } from "./spans";
import { groupOf, RequestPanel, StepPanel } from "./StepPanel";
import { traceEvents } from "./trace";
import { bound, follow, pan, zoom, type View } from "./viewport";
import "../panes.css";
import "./timeline.css";

const FIRST_SECONDS = 30;
const URL_WAIT_MS = 250;
const GAUGE_POINTS = 800;
/** A constant gauge is written this often, with a little to spare. */
const CONSTANT_SECONDS = 11;
const MOST_GAUGES = 16;
/** How often a live run is asked for gauges that it did not have before. */
const NAMES_MS = 10_000;
/** With at least this many whole steps in view, the panel shows their mean, unless the selected step fills a large part of the view. */
const SEVERAL = 4;
/** Interval between reads of merged spans in a live run. Each read scans all spans on the server. */
const MERGED_MS = 10_000;
const KEY: Kind[] = ["queue", "prefill", "decode", "environment", "sandbox", "reward", "request", "forward", "backward", "reduction", "optimizer", "weight sync", "checkpoint", "eval"];
const NAMES: Partial<Record<Kind, string>> = { environment: "tool", reduction: "reduce", request: "outside the engine" };

const EMPTY: SpanColumns = { component: [], name: [], rank: [], server: [], lane: [], step: [], micro_batch: [], sample_id: [], start: [], end: [] };
const NO_LANES: Lanes = buildLanes(EMPTY);

interface GpuGauge {
  name: string;
  title: string;
  unit: string;
  /** Divides the reading. */
  scale: number;
  /** The gauge with the height of the plot; without one it is `high`. */
  limit?: string;
  high?: number;
}

/** Gauges under the lanes: one of each GPU, and without any the machine's and the engines'. */
const GPU_GAUGES: GpuGauge[] = [
  { name: "gpu_utilization_percent", title: "GPU use", unit: "%", scale: 1, high: 100 },
  { name: "gpu_memory_used_bytes", title: "GPU memory", unit: "GiB", scale: 2 ** 30, limit: "gpu_memory_total_bytes" },
  { name: "gpu_power_watts", title: "GPU power", unit: "W", scale: 1, limit: "gpu_power_limit_watts" },
];
const CPU_GAUGES = ["cpu_utilization_percent", "lanes_used", "vllm:num_requests_running"];

export function Timeline() {
  const run = useRunId();
  const { params } = usePlace();
  const info = useRunInfo(run).data;
  const { steps } = useSteps(run);
  const { live } = useStatus(run);
  const version = useVersion(run, "spans");
  const following = params.follow === "1" && live;
  const [size, setSize] = useState({ width: 900, height: 600 });
  const plot = Math.max(200, size.width - LABEL_WIDTH - RIGHT);

  const used = useResource<GaugeSeries[]>(runPath(run, "gauges"), { names: "lanes_used", points: 400 }, useVersion(run, "gauges"));
  const bounds = useMemo(() => extent(steps, used.data), [steps, used.data]);
  const origin = info?.info.started_at ?? bounds?.from ?? 0;

  const [view, setRaw] = useState<View | null>(null);
  const setView = useCallback((next: View) => bounds && setRaw(bound(next, bounds.from, bounds.to)), [bounds]);
  const named = parseStep(params.step);

  const [range] = useRange();
  const inRange = (step: number) => !range || (step >= range.from && step <= range.to);

  // The first view: as the address says, else the named step, else the range of the ruler, else the newest seconds.
  useEffect(() => {
    if (view || !bounds || !steps || !info) return;
    const place = /^(-?[\d.]+)-(-?[\d.]+)$/.exec(params.t ?? "");
    if (place) setRaw({ from: origin + Number(place[1]), to: origin + Number(place[2]) });
    else if (named !== null && inRange(named)) setRaw(fitted(steps, one(named)) ?? lastSeconds(bounds));
    else if (range) setRaw(fitted(steps, range, RANGE_SIDE) ?? lastSeconds(bounds));
    else setRaw(live ? follow(lastSeconds(bounds), bounds.to) : (fitted(steps, one(steps.step.at(-1) ?? 0)) ?? lastSeconds(bounds)));
  }, [view, bounds, steps, info]);
  // A step that is chosen elsewhere (ruler, [ ]) comes into view.
  useEffect(() => {
    if (!steps || !view || named === null) return;
    const times = viewOf(steps, one(named));
    if (times && (times.to < view.from || times.from > view.to)) setRaw(fitted(steps, one(named)));
  }, [named]);
  useEffect(() => {
    const next = steps && view && range && fitted(steps, range, RANGE_SIDE);
    if (next) setRaw(next);
  }, [range?.from, range?.to]);
  useEffect(() => {
    if (following && bounds && view) setRaw(follow(view, bounds.to));
  }, [following, bounds?.to]);
  useEffect(() => {
    if (!view) return;
    const timer = setTimeout(() => setParams({ t: `${(view.from - origin).toFixed(4)}-${(view.to - origin).toFixed(4)}` }, true), URL_WAIT_MS);
    return () => clearTimeout(timer);
  }, [view]);

  const merged = useRef(false);
  const slow = useThrottled(version, MERGED_MS);
  const { loaded, error } = useSpans(run, view, plot, live && view && bounds && view.to > bounds.to - 5 ? (merged.current ? slow : version) : "");
  merged.current = loaded?.merged ?? false;
  const flight = useResource<InFlight[]>(live ? runPath(run, "in_flight") : null, {}, useVersion(run, "in_flight"));
  const lanes = useMemo(() => {
    const ended = loaded?.lanes ?? NO_LANES;
    return live && flight.data ? withRunning(ended, flight.data) : ended;
  }, [loaded, live, flight.data]);

  const step = named ?? (steps && view ? stepInView(steps, view) : null);
  const inView = useMemo(() => (steps && view ? wholeSteps(steps, view) : null), [steps, view]);
  const times = steps && named !== null ? viewOf(steps, one(named)) : null;
  const isFitted = times && view && view.from <= times.from && times.to <= view.to && (times.to - times.from) * SEVERAL > view.to - view.from;
  const several = inView !== null && inView.number >= SEVERAL && !isFitted;
  const critical = useCriticalPaths(run, several ? inView.first : step, several ? inView.last : step);
  const single = critical.read && critical.read.first === critical.read.last ? (critical.read.paths[0] ?? null) : null;
  const sample = params.sample ?? single?.last?.sample_id ?? "";
  // A resumed run has several attempts, and a sample is one of its own.
  const ofSample = sample ? lanes.columns.attempt?.[lanes.columns.sample_id.lastIndexOf(sample)] : null;
  const attempt = (params.attempt && params.sample ? Number(params.attempt) : null) ?? ofSample ?? (steps && step !== null ? steps.attempt[steps.step.lastIndexOf(step)] : null) ?? 1;

  const gaugeNames = useResource<GaugeName[]>(runPath(run, "gauges", "names"), {}, useThrottled(useVersion(run, "gauges"), NAMES_MS));
  const has = new Set((gaugeNames.data ?? []).map((one) => one.name));
  const choices = GPU_GAUGES.filter((one) => has.has(one.name));
  const chosen = choices.find((one) => one.name === params.gauge) ?? choices[0];
  const wanted = chosen ? [chosen.name, chosen.limit ?? ""].filter((name) => has.has(name)) : CPU_GAUGES.filter((name) => has.has(name));
  const series = useResource<GaugeSeries[]>(
    wanted.length && loaded ? runPath(run, "gauges") : null,
    { names: wanted.join(","), start: loaded ? loaded.from - CONSTANT_SECONDS : null, end: loaded ? loaded.to + CONSTANT_SECONDS : null, points: GAUGE_POINTS },
  );
  const given = useResource<GaugeSeries[]>(has.has("gpu_given") ? runPath(run, "gauges") : null, { names: "gpu_given", points: 1 });
  // Those of the time before stay until others have come: the lanes above keep their heights.
  const readings = useKept(series.data);
  const gauges = useMemo(() => describeGauges((readings ?? []).filter((one) => wanted.includes(one.name)), given.data ?? [], chosen), [readings, wanted.join(), given.data, chosen]);

  const layout = useMemo(() => layOut(lanes, gauges.length, size.height - AXIS), [lanes, gauges.length, size.height]);
  const { batches, scored } = useMemo(() => events(lanes), [lanes]);
  const group = useMemo(() => {
    const prefix = sample ? groupOf(sample) : null;
    const running = lanes.engines.flatMap((engine) => engine.lanes.flatMap((lane) => lane.running?.sample ?? []));
    return new Set(prefix === null ? [] : [...lanes.columns.sample_id, ...running].filter((id): id is string => id !== null && groupOf(id) === prefix));
  }, [lanes, sample]);
  const since = flight.data?.find((one) => one.sample_id === sample)?.started_at;
  const health = useHealth(run).data;
  const alerts = useMemo(() => alertMarks(health?.alerts ?? []), [health]);
  const down = useMemo(() => outages(alerts, info?.attempts.flatMap((one) => one.started_at ?? []) ?? [], bounds?.to ?? 0), [alerts, info, bounds?.to]);
  const path = useMemo(() => (single ? pathNodes(single, layout) : []), [single, layout]);
  const evals = useEvals(run).data;
  const around = useMemo(() => ({ outages: down, evals: (evals ?? []).map((one) => ({ from: one.started_at ?? 0, to: one.ended_at ?? 0, servers: one.servers ?? [] })), ranks: Number(info?.config.trainer_num_workers) }), [down, evals, info]);
  const hidden = new Set((params.hide ?? "").split(",")) as Set<Outcome>;
  const waits = useMemo(() => trainerWaits(steps), [steps]);

  const fit = () => steps && step !== null && setRaw(fitted(steps, one(step)));
  const select = (hit: Hit | null) => {
    if (!hit) return setParams({ sample: null, attempt: null });
    if (hit.sample) setParams({ sample: hit.sample, attempt: null });
    else if (hit.step !== null) setParams({ step: String(hit.step), sample: null, attempt: null });
  };
  const selectRequest = (by: 1 | -1) => {
    const id = view && nextRequest(lanes.columns, view.from, view.to, sample, by);
    if (id) setParams({ sample: id, attempt: null }, true);
  };
  const fitRow = (row: number | null) => {
    if (row === null) return fit();
    const { start, end } = lanes.columns;
    const length = end[row]! - start[row]!;
    setView({ from: start[row]! - length * 0.6, to: end[row]! + length * 0.6 });
  };
  const move = (share: number) => view && setView(pan(view, share * (view.to - view.from)));
  const scale = (factor: number) => view && setView(zoom(view, (view.from + view.to) / 2, factor));
  useKeys("Timeline", [
    { keys: ["ArrowLeft"], does: "earlier", run: () => move(-0.1) },
    { keys: ["ArrowRight"], does: "later", run: () => move(0.1) },
    { keys: ["+", "="], does: "zoom in", run: () => scale(0.8) },
    { keys: ["-"], does: "zoom out", run: () => scale(1.25) },
    { keys: ["."], does: "next request", run: () => selectRequest(1) },
    { keys: [","], does: "request before", run: () => selectRequest(-1) },
    { keys: ["f"], does: "follow the live run", run: () => live && setParams({ follow: following ? null : "1" }) },
    { keys: ["s"], does: "fit the step", run: fit },
    { keys: ["0"], does: "the whole run", run: () => bounds && setView({ from: bounds.from, to: bounds.to }) },
  ]);

  if (error && !loaded) return <Failure error={error} />;
  if (steps && !bounds) return <Waiting title="Nothing has run yet." text="Requests, training steps and weight syncs appear here when they end. The page updates by itself." />;
  if (!view || !bounds) return <Reading what="the spans" />;

  // A resumed run that starts has nothing to show yet: all that was recorded is from its earlier attempts.
  const now = live && bounds.to >= (info?.attempts.at(-1)?.started_at ?? 0) ? bounds.to : null;
  const scene: Scene = {
    lanes, layout, view, origin, now, end: bounds.to, hidden, batches, ready: scored, alerts, outages: down, gauges, path: params.path === "0" ? [] : path, group, sample,
  };
  const first = steps ? stepInView(steps, { from: view.from, to: view.from }) : null;
  const last = steps ? stepInView(steps, { from: view.to, to: view.to }) : null;
  const between = first === last ? `step ${number(first)}` : `steps ${number(first)} to ${number(last)}`;
  const traced = lanes.columns.start.length > 0;
  return (
    <div className="timeline">
      <section className="tl" aria-label="Timeline">
        <div className="tools">
          <b className="nb">{duration(view.to - view.from)}{first !== null && `, ${between}`}</b>
          {live && <button className="btn" aria-pressed={following} onClick={() => setParams({ follow: following ? null : "1" })}>{following ? "Following" : "Follow live"} <kbd>f</kbd></button>}
          <button className="btn" onClick={fit}>Fit step <kbd>s</kbd></button>
          <button className="btn" onClick={() => setView({ from: bounds.from, to: bounds.to })}>Whole run <kbd>0</kbd></button>
          {choices.length > 1 && (
            <Select label="Gauge of the GPUs" value={chosen?.name} options={choices.map((one) => [one.name, one.title])} choose={(name) => setParams({ gauge: name === choices[0]?.name ? null : name }, true)} />
          )}
          <span className="outs" role="group" aria-label="Requests that are shown">
            {OUTCOMES.map((one) => (
              <button key={one} className="btn" aria-pressed={!hidden.has(one)} onClick={() => setParams({ hide: OUTCOMES.filter((other) => (other === one) !== hidden.has(other)).join(",") || null }, true)}>
                <i className={`h-${one}`} />{one}
              </button>
            ))}
          </span>
        </div>
        <Minimap from={bounds.from} to={bounds.to} view={view} used={used.data?.[0] ?? null} waits={waits} setView={setView} label={duration(bounds.to - bounds.from)} />
        <Canvas scene={scene} setView={(next) => (following && setParams({ follow: null }, true), setView(next))} onSelect={select} onFit={fitRow} onSize={(width, height) => setSize({ width, height })} />
        {!traced && <p className="none d" role="status">{loaded ? "No span lies in this time." : "Reading the spans of this time."}</p>}
        <p className="keyl" aria-label="Colors">{KEY.filter((kind) => kind !== "sandbox" || lanes.columns.component.includes(kind)).map((kind) => <span key={kind}><i style={{ background: `var(--${COLOR[kind]})` }} />{NAMES[kind] ?? kind}</span>)}</p>
      </section>
      <aside className="p3" aria-label="Step and request">
        {critical.read && critical.read.paths.length > 0 && <StepPanel read={critical.read} around={around} chosen={named} onFit={fit} />}
        {critical.error && <section className="sec"><p className="d">{critical.error.message}</p></section>}
        {sample && loaded && <RequestPanel run={run} sample={sample} attempt={attempt} columns={loaded?.merged ? null : lanes.columns} running={live && since != null ? Math.max(0, bounds.to - since) : null} />}
        <section className="sec last">
          <p>
            <a className="link" href={format(elsewhere(place(), { page: "logs" }, { at: ((view.from + view.to) / 2).toFixed(3) }))}>
              Logs of this time
            </a>
          </p>
          <button className="link" onClick={() => void exportTrace(run, view)}>Export to Perfetto</button>
          <p className="f s">Spans of the visible {duration(view.to - view.from)} as Chrome trace JSON.</p>
        </section>
      </aside>
    </div>
  );
}

async function exportTrace(run: string, view: View): Promise<void> {
  const columns = await readForExport(run, view);
  const body = JSON.stringify({ traceEvents: traceEvents(columns, view.from, view.to), displayTimeUnit: "ms" });
  download(`${fileName(run)}-trace.json`, new Blob([body], { type: "application/json" }));
}

function extent(steps: StepColumns | null, used: GaugeSeries[] | undefined): View | null {
  const times = [...(steps?.started_at.slice(0, 1) ?? []), ...(steps?.ended_at.slice(-1) ?? []), ...(used ?? []).flatMap((one) => [one.time[0], one.time.at(-1)])].filter((time): time is number => time != null);
  return times.length ? { from: Math.min(...times), to: Math.max(...times) } : null;
}

const lastSeconds = (bounds: View): View => ({ from: Math.max(bounds.from, bounds.to - FIRST_SECONDS), to: bounds.to });

const one = (step: number): Range => ({ from: step, to: step });

/** The time of steps that have ended. */
function viewOf(steps: StepColumns, range: Range): View | null {
  const { start, end } = timesOf(steps, range);
  return start === null || end === null ? null : { from: start, to: end };
}

/** Space beside a step, and beside a range of the ruler, as a share of their time. */
const [STEP_SIDE, RANGE_SIDE] = [0.75, 0.02];

/** The time of steps with space on both sides. */
function fitted(steps: StepColumns, range: Range, share = STEP_SIDE): View | null {
  const times = viewOf(steps, range);
  const side = times && Math.max(0.05, (times.to - times.from) * share);
  return times && { from: times.from - side!, to: times.to + side! };
}

/** Returns the first and last step that lie wholly in the view; null if none does. */
function wholeSteps(steps: StepColumns, view: View): { first: number; last: number; number: number } | null {
  const rows = steps.step.map((_, row) => row).filter((row) => (steps.started_at[row] ?? -Infinity) >= view.from && (steps.ended_at[row] ?? Infinity) <= view.to);
  return rows.length ? { first: steps.step[rows[0]!]!, last: steps.step[rows.at(-1)!]!, number: rows.length } : null;
}

/** The step that fills most of the middle of a view. */
function stepInView(steps: StepColumns, view: View): number | null {
  const middle = (view.from + view.to) / 2;
  let best: number | null = null;
  for (let row = 0; row < steps.step.length; row++) {
    if ((steps.started_at[row] ?? Infinity) > middle) break;
    best = steps.step[row]!;
  }
  return best ?? steps.step[0] ?? null;
}

function trainerWaits(steps: StepColumns | null): { from: number; to: number }[] {
  if (!steps) return [];
  return column(steps, "timing_waiting_for_data").flatMap((wait, row) => {
    const start = steps.started_at[row];
    return wait === null || start == null ? [] : [{ from: start, to: start + wait }];
  });
}

/** Batches as the trainer gets them, and the times at which answers were scored. */
function events(lanes: Lanes): { batches: Mark[]; scored: number[] } {
  const first = new Map<number, number>();
  const scored: number[] = [];
  const { component, name, step, start, end } = lanes.columns;
  for (let row = 0; row < start.length; row++) {
    const of = step[row];
    if (component[row] === "trainer" && name[row] === "step" && of != null) first.set(of, Math.min(first.get(of) ?? Infinity, start[row]!));
    else if (name[row] === "reward") scored.push(end[row]!);
  }
  return {
    batches: [...first].map(([of, time]) => ({ time, label: `batch ${of}` })).sort((a, b) => a.time - b.time),
    scored: scored.sort((a, b) => a - b),
  };
}

/** The line of the critical path: the lane of the last sample, the orchestrator when the batch was ready, the trainer until the step's end. */
function pathNodes(path: CriticalPath, layout: Layout): PathNode[] {
  const numbered = tableRows(path);
  const numbers = path.parts.filter((part) => part.seconds > 0).map((part) => ({ n: numbered.findIndex((row) => row.label === part.label) + 1, at: (part.start + part.end) / 2, part }));
  const seen = new Set<number>([0]);
  const once = numbers.filter(({ n }) => !seen.has(n) && seen.add(n));
  const before = once.filter(({ part }) => part.end <= path.ready + 1e-9);
  const after = once.filter(({ part }) => part.end > path.ready + 1e-9);
  const nodes: PathNode[] = [];
  const block = path.lane ? layout.engines.find((engine) => engine.server === path.lane!.server) : undefined;
  const row = block?.rows.find((one) => one.lane.slot === path.lane!.lane);
  if (row && path.last?.finished_at) {
    const done = Math.min(path.last.finished_at, path.ready);
    nodes.push({ from: path.start, to: done, y: row.y + row.height / 2, numbers: before.filter(({ at }) => at <= done) });
    nodes.push({ from: done, to: path.ready, y: 20, numbers: before.filter(({ at }) => at > done) });
  } else nodes.push({ from: path.start, to: path.ready, y: 20, numbers: before });
  const rank = layout.trainer.find((one) => one.lane.owner === path.rank) ?? layout.trainer.at(-1);
  const lowest = layout.trainer.at(-1);
  if (rank && lowest) nodes.push({ from: path.ready, to: path.end, y: lowest.y + lowest.height + 3, numbers: after });
  return nodes;
}

function describeGauges(series: GaugeSeries[], given: GaugeSeries[], chosen: GpuGauge | undefined): Gauge[] {
  const placeOf = (one: GaugeSeries): string => `${one.node}/${one.gpu}`;
  const roles = new Map(given.map((one) => [placeOf(one), one.component === "trainer" ? "trainer" : "engine"] as const));
  const nodes = new Set(series.map((one) => one.node).filter(Boolean));
  const most = (one: GaugeSeries) => Math.max(1, ...one.max.map((value) => value ?? 0));
  const limits = new Map(series.filter((one) => one.name === chosen?.limit).map((one) => [placeOf(one), most(one)]));
  return series.filter((one) => one.name !== chosen?.limit).slice(0, MOST_GAUGES).map((one): Gauge => {
    const percent = one.name.endsWith("_percent");
    const high = percent ? 100 : (limits.get(placeOf(one)) ?? most(one));
    const role = one.gpu !== null ? (roles.get(placeOf(one)) ?? "host") : one.server !== null ? "engine" : "host";
    const title = one.gpu !== null ? `GPU ${one.gpu}` : one.name === "cpu_utilization_percent" ? "CPU" : one.name === "lanes_used" ? "Slots used" : `Engine ${one.server}`;
    const { scale, unit } = one.name === chosen?.name ? chosen : { scale: 1, unit: percent ? "%" : "" };
    const range = percent ? "0 to 100 %" : `${one.name.includes("requests_running") ? "requests, " : ""}to ${number(high / scale, unit ? 0 : undefined)} ${unit}`;
    const read = (time: number) => {
      const value = at(one, time);
      const of = limits.has(placeOf(one)) ? ` of ${number(high / scale, 0)}` : "";
      return value === null ? NONE : `${number(value / scale, unit ? 0 : undefined)}${of}${unit && `\u2009${unit}`}`;
    };
    return { title, unit: nodes.size > 1 ? (one.node ?? "") : range, high, role, read, series: one };
  });
}
