/** Infra: machines, GPUs and engines; the aggregate first, then each. */

import { useMemo } from "react";
import { runPath } from "../../api";
import { Chart, type Line } from "../../charts/Chart";
import { number, percent } from "../../format";
import { Failure, Quiet } from "../../shell/App";
import { useVersion } from "../../state/live";
import { useResource } from "../../state/resource";
import { useRunId, useRunInfo, useStatus } from "../../state/run";
import { useSteps } from "../../state/steps";
import { elsewhere, go, place, useRange } from "../../state/url";
import type { Value } from "../../types";
import { type GaugeSeries } from "../gauges";
import { clock, ticks } from "../timeline/viewport";
import { aggregate, machines, MOST_LINES, SECTIONS, seriesOf, type ChartSpec, type Machine } from "./infra";
import "../panes.css";
import "./infra.css";

const POINTS = 500;
const EXTRA = ["gpu_given", "gpu_memory_total_bytes", "memory_total_bytes"];
const NAMES = [...new Set([...SECTIONS.flatMap((section) => section.charts.flatMap((chart) => chart.names)), ...EXTRA])];

export function Infra() {
  const run = useRunId();
  const info = useRunInfo(run).data;
  const { live } = useStatus(run);
  const version = useVersion(run, "gauges");
  const { steps } = useSteps(run);
  const [range] = useRange();
  const span = useMemo(() => {
    if (!steps || !range) return { start: null, end: null };
    const rows = steps.step.flatMap((step, row) => (step >= range.from && step <= range.to ? [row] : []));
    return { start: steps.started_at[rows[0] ?? -1] ?? null, end: steps.ended_at[rows.at(-1) ?? -1] ?? null };
  }, [steps, range?.from, range?.to]);
  const gauges = useResource<GaugeSeries[]>(runPath(run, "gauges"), { names: NAMES.join(","), points: POINTS, ...span }, version);
  const all = gauges.data ?? [];
  const origin = info?.info.started_at ?? 0;
  const nodes = useMemo(() => machines(all), [all]);
  const drawn = useMemo(
    () => SECTIONS.map((section) => ({ ...section, charts: section.charts.map((spec) => ({ spec, series: seriesOf(spec, all) })).filter((chart) => chart.series.length > 0) })).filter((section) => section.charts.length > 0),
    [all],
  );
  // One axis for all charts, so that a moment lies at the same place in each.
  const extent = useMemo(() => {
    const times = drawn.flatMap((section) => section.charts.flatMap((chart) => chart.series.flatMap((one) => [one.series.time[0], one.series.time.at(-1)])));
    const known = times.filter((time): time is number => time !== undefined);
    return known.length > 1 ? { from: Math.min(...known), to: Math.max(...known) } : null;
  }, [drawn]);
  if (gauges.error && !gauges.data) return <Failure error={gauges.error} />;
  if (gauges.data && all.length === 0) return <Quiet title="No gauge was recorded." text="Set enable_system_metrics_logging to record machines and GPUs." />;
  const topology = Object.entries(info?.attempts.at(-1)?.topology ?? {});
  return (
    <div className="infra">
      <div className="main">
        {nodes.length > 0 && <Cluster nodes={nodes} live={live} />}
        {drawn.map((section) => (
          <section key={section.title} aria-label={section.title}>
            <h2 className="st">{section.title} <span className="f">{section.charts.length} charts</span></h2>
            <div className="ig">
              {section.charts.map(({ spec, series }) => <GaugeChart key={spec.title} spec={spec} series={series} origin={origin} extent={extent} />)}
            </div>
          </section>
        ))}
      </div>
      <aside className="p3" aria-label="Topology">
        <section className="sec">
          <h2>Topology</h2>
          {topology.length === 0 ? <p className="d">Not recorded.</p> : (
            <dl className="kv">
              {topology.map(([name, value]) => <div key={name}><dt>{name.replaceAll("_", " ")}</dt><dd>{String(value)}</dd></div>)}
            </dl>
          )}
        </section>
        <section className="sec">
          <h2>Versions</h2>
          <dl className="kv">
            {Object.entries(info?.attempts.at(-1)?.versions ?? {}).map(([name, value]) => <div key={name}><dt>{name}</dt><dd className="m">{value}</dd></div>)}
          </dl>
        </section>
        <section className="sec">
          <p className="d">Double click on a chart opens its moment on the timeline. A range on the ruler limits all charts.</p>
        </section>
      </aside>
    </div>
  );
}

function Meter({ share, mean }: { share: Value; mean?: Value }) {
  return (
    <span className="meter" aria-hidden="true">
      {share !== null && <i style={{ width: `${Math.min(100, 100 * share)}%` }} />}
      {mean != null && <b style={{ left: `${Math.min(100, 100 * mean)}%` }} />}
    </span>
  );
}

const gib = (bytes: Value) => number(bytes === null ? null : bytes / 2 ** 30, 1);

/** Machines and what runs on them. */
function Cluster({ nodes, live }: { nodes: readonly Machine[]; live: boolean }) {
  const when = live ? "now" : "at the end";
  return (
    <section className="cluster" aria-label="Machines">
      <table>
        <thead>
          <tr><th>Machine</th><th>Role</th><th>Load <span className="f">{when}, bar; mean, line</span></th><th className="r">{when}</th><th className="r">mean</th><th className="r">memory, GiB</th><th className="r">of</th></tr>
        </thead>
        <tbody>
          {nodes.flatMap((node) => [
            <tr key={node.name} className="node">
              <td><b>{node.name}</b></td>
              <td className="d">CPU, load {number(node.load, 1)}</td>
              <td><Meter share={node.cpu} mean={node.cpuMean} /></td>
              <td className="r">{percent(node.cpu, 0)}</td>
              <td className="r">{percent(node.cpuMean, 0)}</td>
              <td className="r">{gib(node.memoryUsed)}</td>
              <td className="r d">{gib(node.memoryTotal)}</td>
            </tr>,
            ...node.devices.map((device) => (
              <tr key={`${node.name}/${device.name}`}>
                <td className="in">{device.name}</td>
                <td className="d">{device.role}</td>
                <td><Meter share={device.load} mean={device.mean} /></td>
                <td className="r">{percent(device.load, 0)}</td>
                <td className="r">{percent(device.mean, 0)}</td>
                <td className="r">{gib(device.used)}</td>
                <td className="r d">{device.total === null ? "" : gib(device.total)}</td>
              </tr>
            )),
          ])}
        </tbody>
      </table>
    </section>
  );
}

function GaugeChart({ spec, series, origin, extent }: { spec: ChartSpec; series: { label: string; series: GaugeSeries }[]; origin: number; extent: { from: number; to: number } | null }) {
  const { x, lines } = useMemo(() => {
    const several = series.length > 4;
    const mean = several ? aggregate(series.map((one) => one.series)) : null;
    const drawn = series.slice(0, MOST_LINES).map((one, i): Line => ({
      label: one.label,
      color: several ? "--line2" : `--c${i + 1}`,
      values: one.series.mean,
      x: one.series.time,
      width: several ? 1 : 1.5,
      silent: several,
      bands: i === 0 && !several ? [{ low: one.series.min, high: one.series.max, opacity: 0.14 }] : undefined,
      direct: !several && series.length > 1 ? one.label : undefined,
    }));
    if (mean) drawn.push({ label: "mean", color: "--c1", values: mean.mean, x: mean.time, width: 1.5 });
    return { x: [...new Set(drawn.flatMap((line) => line.x ?? []))].sort((a, b) => a - b), lines: drawn };
  }, [series]);
  const several = series.length > 1;
  const open = (event: React.MouseEvent) => {
    const plot = event.currentTarget.querySelector(".plot");
    if (!plot || x.length < 2) return;
    const box = plot.getBoundingClientRect();
    const [from, to] = extent ? [extent.from, extent.to] : [x[0]!, x.at(-1)!];
    const time = from + ((event.clientX - box.left) / box.width) * (to - from) - origin;
    go(elsewhere(place(), { page: "timeline" }, { t: `${(time - 5).toFixed(2)}-${(time + 5).toFixed(2)}` }));
  };
  return (
    <div className="cell" onDoubleClickCapture={(event) => (event.stopPropagation(), open(event))}>
      <Chart
        title={spec.title}
        unit={[spec.unit, series.length > 4 ? `mean of ${series.length}` : ""].filter(Boolean).join(", ")}
        x={x}
        lines={lines}
        axis="time"
        zoom={extent}
        low={spec.low}
        high={spec.high}
        xTicks={(low, high, wanted) => ticks({ from: low, to: high }, origin, wanted).times}
        xFormat={(time) => clock(time - origin, 1)}
        right={several && series.length <= 4 ? 64 : undefined}
      />
    </div>
  );
}
