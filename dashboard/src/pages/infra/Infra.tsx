/** Infra: machines, GPUs and engines; the aggregate first, then each. */

import { groups, rollup } from "d3-array";
import { useMemo } from "react";
import { runPath } from "../../api";
import { nearest } from "../../charts/math";
import { count, number } from "../../format";
import { toggled } from "../../lists";
import { Segments } from "../../shell/controls";
import { Failure, Quiet } from "../../shell/Quiet";
import { type Column, Facts, Rows, Table } from "../../shell/Table";
import { useVersion } from "../../state/live";
import { useKept, useResource } from "../../state/resource";
import { useRunId, useRunInfo, useStatus } from "../../state/run";
import { timesOf, useSteps } from "../../state/steps";
import { useSelected } from "../../state/cursor";
import { useThrottled } from "../../state/timing";
import { elsewhere, format, parseStep, place, setParams, useParam, usePlace, useRange } from "../../state/url";
import type { GaugeName, Node, RunInfo, SandboxTimes, Value } from "../../types";
import { Model } from "../overview/Model";
import { type GaugeSeries } from "../gauges";
import { Cluster } from "./Cluster";
import { GaugeChart } from "./GaugeChart";
import { type ChartSpec, machines, otherChart, roleOf, SANDBOXES, SECTIONS, seriesOf } from "./infra";
import "../panes.css";
import "./infra.css";
import { visible } from "../../text/hostile";

/** The axis of its charts, and a part of it in the address in seconds since the start of the run. */
const CLOCK = "clock";
const ZOOM = /^(-?[\d.]+)-([\d.]+)$/;

const POINTS = 500;
/** A live run has new gauges every second or two; charts of the whole run show a difference after several. */
const REFRESH_MS = 5000;
/** Gauges that are written once, or rarely: a part of the run may not have them. */
const CONSTANT = ["gpu_given", "gpu_memory_total_bytes", "memory_total_bytes"];
const LINES = [
  ["", "By role", "The mean of each role, from the smallest to the largest"],
  ["each", "Each", "A line for each GPU, server, rank or machine"],
] as const;
const NAMES = [...new Set(SECTIONS.flatMap((section) => section.charts.flatMap((chart) => chart.names)))];

export function Infra() {
  const run = useRunId();
  const info = useRunInfo(run).data;
  const { live } = useStatus(run);
  const version = useThrottled(useVersion(run, "gauges"), REFRESH_MS);
  const { steps } = useSteps(run);
  const [range] = useRange();
  const [lines, setLines] = useParam("lines");
  const [machinesAs, setMachinesAs] = useParam("machines");
  const [chosen] = useParam("gauges");
  const origin = info?.info.started_at ?? 0; // nothing is drawn before it is known
  const [zoomed] = useParam("t");
  // What a chart was zoomed to, finer than steps, else the range of the page.
  const span = useMemo(() => {
    const [, from, to] = ZOOM.exec(zoomed) ?? [];
    return from === undefined || !info ? timesOf(steps, range) : { start: origin + Number(from), end: origin + Number(to) };
  }, [steps, range?.from, range?.to, zoomed, info, origin]);
  const chosenStep = parseStep(usePlace().params.step);
  useSelected(CLOCK, chosenStep === null ? null : (steps?.ended_at[steps.step.indexOf(chosenStep)] ?? null));
  const zoom = (next: { from: number; to: number } | null) =>
    setParams(next ? { t: `${(next.from - origin).toFixed(2)}-${(next.to - origin).toFixed(2)}` } : { t: null, range: null });
  const pick = (time: number) => {
    const row = nearest(steps?.ended_at.map((end) => end ?? 0) ?? [], time);
    const step = steps?.step[row];
    if (step !== undefined) setParams({ step: place().params.step === String(step) ? null : String(step) });
  };
  const gauges = useResource<GaugeSeries[]>(runPath(run, "gauges"), { names: NAMES.join(","), points: POINTS, ...span }, version);
  const constant = useResource<GaugeSeries[]>(runPath(run, "gauges"), { names: CONSTANT.join(","), points: 1 }, version);
  const names = useResource<GaugeName[]>(runPath(run, "gauges", "names"), {}, version).data ?? [];
  const others = useMemo(() => {
    const known = new Set(names.map((one) => one.name));
    return new Map(names.flatMap(({ name }): [string, ChartSpec][] => {
      const spec = otherChart(name, known);
      return spec ? [[name, spec]] : [];
    }));
  }, [names]);
  const more = chosen.split(",").flatMap((name): ChartSpec[] => (others.has(name) ? [others.get(name)!] : []));
  const moreNames = more.flatMap((spec) => spec.names);
  const moreGauges = useResource<GaugeSeries[]>(moreNames.length ? runPath(run, "gauges") : null, { names: moreNames.join(","), points: POINTS, ...span }, version);
  // The charts stay until those of another time have come: the page keeps its place.
  const [shown, shownMore] = [useKept(gauges.data), useKept(moreGauges.data)];
  const all = useMemo(() => [...(shown ?? []), ...(constant.data ?? []), ...(shownMore ?? [])], [shown, constant.data, shownMore]);
  const begun = zoomed || range ? 0 : (info?.attempts.at(-1)?.started_at ?? 0);
  const nodes = useMemo(() => machines(all, begun), [all, begun]);
  const role = useMemo(() => roleOf(all), [all]);
  const drawn = useMemo(
    () =>
      [...SECTIONS, { title: "Chosen", charts: more }]
        .map((section) => ({ ...section, charts: section.charts.map((spec) => ({ spec, series: seriesOf(spec, all) })).filter((chart) => chart.series.length > 0) }))
        .filter((section) => section.charts.length > 0),
    [all, chosen, others],
  );
  // One axis for all charts, so that a moment lies at the same place in each.
  const extent = useMemo(() => {
    const times = drawn.flatMap((section) => section.charts.flatMap((chart) => chart.series.flatMap((one) => [one.series.time[0], one.series.time.at(-1)])));
    const known = times.filter((time): time is number => time !== undefined);
    return known.length > 1 ? { from: Math.min(...known), to: Math.max(...known) } : { from: 0, to: 1 };
  }, [drawn]);
  if (gauges.error && !shown) return <Failure error={gauges.error} />;
  if (!info) return null;
  if (gauges.data && all.length === 0 && live) return <Quiet title="No reading yet." text="Machines, GPUs and servers appear here with their first readings. The page updates by itself." />;
  if (gauges.data && all.length === 0) return <Quiet title="No gauge was recorded." text="The run ended before its first reading, or its files of the table gauges are missing." />;
  return (
    <div className="infra">
      <div className="main">
        <div className="toolbar">
          <Segments label="Lines" value={lines} options={LINES} choose={setLines} />
          <Segments label="Machines" value={machinesAs} options={[["", "Map"], ["table", "Table"]]} choose={setMachinesAs} />
          {drawn.length > 0 && (
            <a className="link d" href={format(elsewhere(place(), { page: "timeline" }, { t: `${(extent.from - origin).toFixed(2)}-${(extent.to - origin).toFixed(2)}` }))}>
              This time on the timeline
            </a>
          )}
          {(zoomed || range) && (
            <button className="btn" onClick={() => zoom(null)}>
              Whole run
            </button>
          )}
        </div>
        {nodes.length > 0 && <Cluster nodes={nodes} live={live} />}
        {drawn.map((section) => (
          <section key={section.title} aria-label={section.title}>
            <h2 className="st">
              {section.title} <span className="f">{section.charts.length === 1 ? "1 chart" : `${section.charts.length} charts`}</span>
            </h2>
            <div className="ig">
              {section.charts.map(({ spec, series }) => (
                <GaugeChart key={spec.title} spec={spec} series={series} each={lines === "each" || spec.each === true} role={role} origin={origin} extent={extent} zoom={zoom} pick={pick} />
              ))}
            </div>
            {section.title === SANDBOXES && <Sandboxes run={run} span={span} version={version} />}
          </section>
        ))}
        {shown && others.size > 0 && <Others specs={others} />}
      </div>
      <Topology info={info} />
    </div>
  );
}

/** Every other gauge: chosen ones get a chart. */
function Others({ specs }: { specs: ReadonlyMap<string, ChartSpec> }) {
  const [chosen, setChosen] = useParam("gauges");
  const [search, setSearch] = useParam("search");
  const on = chosen.split(",").filter(Boolean);
  const found = [...specs].filter(([name]) => name.toLowerCase().includes(search.toLowerCase()));
  return (
    <section className="others" aria-label="All other gauges">
      <h2 className="st">
        All other gauges <span className="f">{count(specs.size)}, a click draws one</span>
      </h2>
      <input className="field" type="search" placeholder="Filter gauges" aria-label="Filter gauges" value={search} onChange={(event) => setSearch(event.target.value, true)} />
      <div className="names">
        {found.map(([name, spec]) => (
          <button key={name} aria-pressed={on.includes(name)} className="m" onClick={() => setChosen(toggled(on, name).join(","))}>
            {spec.title}
          </button>
        ))}
        {found.length === 0 && <span className="f">No gauge has this name.</span>}
      </div>
    </section>
  );
}

/** Returns what was recorded about a machine, in words. */
export function factsOf(node: Node): [name: string, value: string][] {
  const gpus = [...rollup(node.gpus, (equal) => equal.length, (name) => name)];
  const facts: [string, string | null][] = [
    ["CPU", node.cpu === null ? null : `${node.cpu}, ${node.num_cores ?? "?"} cores`],
    ["memory", node.memory_bytes === null ? null : `${number(node.memory_bytes / 2 ** 30, 0)} GiB`],
    ["GPUs", gpus.length ? gpus.map(([name, count]) => (count > 1 ? `${count} × ${name}` : name)).join("; ") : null],
    ["GPU driver", node.gpu_driver],
    ["links", node.links.length ? node.links.join("; ") : null],
    ["system", node.os],
  ];
  return facts.flatMap(([name, value]) => (value ? [[name, visible(value)]] : []));
}

function Hardware({ nodes }: { nodes: Node[] }) {
  return (
    <>
      {groups(nodes, (node) => JSON.stringify(factsOf(node))).map(([, equal]) => (
        <Facts key={equal[0]!.node} title="Hardware" note={<span title={visible(equal.map((node) => node.node).join(", "))}>{equal.length === 1 ? visible(equal[0]!.node) : `${equal.length} machines`}</span>} rows={factsOf(equal[0]!)} />
      ))}
    </>
  );
}

function Topology({ info }: { info: RunInfo }) {
  const model = useResource(runPath(info.info.id, "model"));
  const attempt = info.attempts.at(-1);
  const topology = Object.entries(attempt?.topology ?? {});
  return (
    <aside className="p3" aria-label="Topology" tabIndex={0}>
      <section className="sec">
        <h2>Topology</h2>
        {topology.length === 0 ? (
          <p className="d">Not recorded.</p>
        ) : (
          <Rows rows={topology.map(([name, value]) => [name.replace("inference server", "server").replace("trainer rank", "rank").replaceAll("_", " "), value])} />
        )}
      </section>
      <Hardware nodes={info.nodes} />
      <Model run={info.info.id} />
      {!model.loading && <Facts title="Versions" rows={Object.entries(attempt?.versions ?? {})} />}
    </aside>
  );
}

const SANDBOX_COLUMNS: Column<SandboxTimes>[] = [
  { head: "Operation", cell: (row) => visible(row.name) },
  { head: "calls", className: "r", cell: (row) => count(row.count) },
  { head: "p50", className: "r", cell: (row) => `${number(row.p50, 3)} s` },
  { head: "p95", className: "r", cell: (row) => `${number(row.p95, 3)} s` },
];

/** How long creating sandboxes, using them and waiting for them took. */
function Sandboxes({ run, span, version }: { run: string; span: { start: Value; end: Value }; version: string }) {
  const times = useResource<SandboxTimes[]>(runPath(run, "sandboxes"), span, version).data ?? [];
  if (times.length === 0) return null;
  return <Table className="sbx" aria-label="Times of sandbox operations" rows={times} columns={SANDBOX_COLUMNS} keyOf={(row) => row.name} />;
}
