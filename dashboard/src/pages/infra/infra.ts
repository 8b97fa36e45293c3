/** What Infra shows of the gauges: which charts there are, and the machines with their GPUs. */

import { group, max, mean, min, sort, sum } from "d3-array";
import type { Value } from "../../types";
import { lastOf, meanReading, ownerOf, perOther, rate, type GaugeSeries } from "../gauges";
import { visible } from "../../text/hostile";

export interface ChartSpec {
  title: string;
  unit: string;
  /** Gauges to read. */
  names: string[];
  /** Turns what was read into the series to draw. */
  of?: (series: GaugeSeries[]) => GaugeSeries[];
  scale?: number;
  low?: number;
  high?: number;
  /** A line for each series in any case: kinds of failures have no mean. */
  each?: boolean;
}

export interface Section {
  title: string;
  charts: ChartSpec[];
}

const GIB = 2 ** 30;
const MB = 1e6;
const named = (series: GaugeSeries[], name: string) => series.filter((one) => one.name === name);
const sameOwner = (a: GaugeSeries, b: GaugeSeries) => a.node === b.node && a.gpu === b.gpu && a.rank === b.rank && a.server === b.server;

const rates = (series: GaugeSeries[]) => series.map(rate);
export const SANDBOXES = "Sandboxes";

/** The growth of one counter over that of another. */
const quotient = (over: string, under: string): Pick<ChartSpec, "names" | "of"> => ({
  names: [over, under],
  of: (series) =>
    named(series, over).flatMap((one) => {
      const other = named(series, under).find((candidate) => sameOwner(candidate, one) && JSON.stringify(candidate.labels) === JSON.stringify(one.labels));
      return other ? [perOther(one, other)] : [];
    }),
});

/** The mean of a histogram between two readings. */
const meanSeconds = (metric: string) => quotient(`${metric}_sum`, `${metric}_count`);

export const SECTIONS: Section[] = [
  {
    title: "GPUs",
    charts: [
      { title: "GPU utilization", unit: "%", names: ["gpu_utilization_percent"], low: 0, high: 100 },
      { title: "GPU memory", unit: "GiB", names: ["gpu_memory_used_bytes"], scale: 1 / GIB, low: 0 },
      { title: "GPU power", unit: "W", names: ["gpu_power_watts"], low: 0 },
      { title: "GPU temperature", unit: "°C", names: ["gpu_temperature_celsius"] },
      { title: "Memory in use by torch", unit: "GiB", names: ["torch_memory_allocated_bytes"], scale: 1 / GIB, low: 0 },
      { title: "Memory taken by torch", unit: "GiB", names: ["torch_memory_reserved_bytes"], scale: 1 / GIB, low: 0 },
      { title: "SM clock", unit: "MHz", names: ["gpu_sm_clock_mhz"], low: 0 },
    ],
  },
  {
    title: "Engines",
    charts: [
      { title: "Busy", unit: "share of time", ...quotient("telescope:engine_busy_seconds_total", "telescope:engine_clock_seconds"), low: 0, high: 1 },
      { title: "Requests running", unit: "", names: ["vllm:num_requests_running"], low: 0 },
      { title: "Requests waiting", unit: "", names: ["vllm:num_requests_waiting"], low: 0 },
      { title: "Generated", unit: "tokens/s", names: ["vllm:generation_tokens_total"], of: rates, low: 0 },
      { title: "Prompts read", unit: "tokens/s", names: ["vllm:prompt_tokens_total"], of: rates, low: 0 },
      { title: "KV cache in use", unit: "%", names: ["vllm:kv_cache_usage_perc"], scale: 100, low: 0 },
      { title: "Time to first token", unit: "s, mean", ...meanSeconds("vllm:time_to_first_token_seconds"), low: 0 },
      { title: "Request, end to end", unit: "s, mean", ...meanSeconds("vllm:e2e_request_latency_seconds"), low: 0 },
      { title: "Prefix cache hits", unit: "share", ...quotient("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"), low: 0, high: 1 },
      { title: "Preemptions", unit: "a second", names: ["vllm:num_preemptions_total"], of: rates, low: 0 },
    ],
  },
  {
    title: "Queues",
    charts: [
      { title: "Request slots used", unit: "all servers", names: ["lanes_used"], low: 0 },
      { title: "Groups", unit: "open, ready", names: ["groups_open", "groups_ready"], low: 0 },
      { title: "Finished answers", unit: "tokens/s", names: ["tokens_per_second"], low: 0 },
      { title: "Event loop lag", unit: "s", names: ["event_loop_lag_seconds"], low: 0 },
    ],
  },
  {
    title: SANDBOXES,
    charts: [
      { title: "Alive", unit: "", names: ["sandboxes_alive"], low: 0, each: true },
      { title: "Created", unit: "a minute", names: ["sandbox_creates_total"], of: rates, scale: 60, low: 0, each: true },
      { title: "Commands", unit: "a minute", names: ["sandbox_execs_total"], of: rates, scale: 60, low: 0, each: true },
      { title: "Failures", unit: "in total", names: ["sandbox_failures_total"], low: 0, each: true },
    ],
  },
  {
    title: "Machines",
    charts: [
      { title: "CPU", unit: "%", names: ["cpu_utilization_percent"], low: 0, high: 100 },
      { title: "Load", unit: "1 min", names: ["load_average_1m"], low: 0 },
      { title: "Memory", unit: "GiB", names: ["memory_used_bytes"], scale: 1 / GIB, low: 0 },
      { title: "Shared memory", unit: "GiB", names: ["shared_memory_used_bytes"], scale: 1 / GIB, low: 0 },
      { title: "Disk free", unit: "GiB", names: ["disk_free_bytes"], scale: 1 / GIB, low: 0 },
      { title: "Swap", unit: "GiB", names: ["swap_used_bytes"], scale: 1 / GIB, low: 0 },
      { title: "Received", unit: "MB/s", names: ["network_received_bytes"], of: rates, scale: 1 / MB, low: 0 },
      { title: "Sent", unit: "MB/s", names: ["network_sent_bytes"], of: rates, scale: 1 / MB, low: 0 },
      { title: "Memory of trainer ranks", unit: "GiB", names: ["process_memory_bytes"], scale: 1 / GIB, low: 0 },
    ],
  },
];

/** Lines of one chart; the mean comes on top. */
export const MOST_LINES = 16;

/** The series of a chart, scaled, with their names. */
export function seriesOf(spec: ChartSpec, all: readonly GaugeSeries[]): { label: string; series: GaugeSeries }[] {
  const own = all.filter((one) => spec.names.includes(one.name));
  const made = spec.of ? spec.of(own) : own;
  const severalNodes = new Set(made.map((one) => one.node).filter(Boolean)).size > 1;
  const scale = spec.scale ?? 1;
  const scaled = (values: Value[]) => (scale === 1 ? values : values.map((value) => (value === null ? null : value * scale)));
  return made
    .filter((one) => one.mean.some((value) => value !== null))
    .map((one) => ({
      label: spec.names.length > 1 && !spec.of ? one.name.replace(/^groups_/, "") : ownerOf(one, severalNodes),
      series: { ...one, min: scaled(one.min), mean: scaled(one.mean), max: scaled(one.max) },
    }));
}

/** Mean, smallest and largest reading of several series over time. */
interface Aggregate {
  label: string;
  count: number;
  time: number[];
  mean: Value[];
  low: Value[];
  high: Value[];
}

/** A constant gauge is written every 10 seconds: until then, and a little longer, its last reading holds. */
const HOLDS_SECONDS = 12;

/**
 * Returns one aggregate a group of series, over `parts` equal parts of the time. Series are read at different times: each counts
 * with its last reading in a part, or before it while that holds.
 */
export function aggregates(list: readonly { label: string; series: GaugeSeries }[], groupOf: (series: GaugeSeries) => string, from: number, to: number, parts: number): Aggregate[] {
  const width = (to - from) / parts || 1;
  return sort(group(list, ({ series }) => groupOf(series)), ([label]) => label).map(([label, members]) => {
    const columns = members.map(({ series }) => held(series, from, width, parts));
    const out: Aggregate = { label, count: members.length, time: [], mean: [], low: [], high: [] };
    for (let part = 0; part < parts; part += 1) {
      const known = columns.flatMap((column) => column[part] ?? []);
      if (known.length === 0 && out.time.length === 0) continue;
      out.time.push(from + (part + 1) * width);
      out.mean.push(mean(known) ?? null);
      out.low.push(min(known) ?? null);
      out.high.push(max(known) ?? null);
    }
    while (out.mean.length > 0 && out.mean.at(-1) === null) for (const column of [out.time, out.mean, out.low, out.high]) column.pop();
    return out;
  });
}

/** Returns the reading of each part of the time: its last one, or one before that still holds. */
function held(series: GaugeSeries, from: number, width: number, parts: number): Value[] {
  const out: Value[] = new Array<Value>(parts).fill(null);
  series.time.forEach((time, i) => {
    const value = series.mean[i];
    if (value == null) return;
    const first = Math.min(parts - 1, Math.floor((time - from) / width));
    const last = Math.min(parts - 1, Math.floor((time + HOLDS_SECONDS - from) / width));
    for (let part = Math.max(0, first); part <= last; part += 1) out[part] = value;
  });
  return out;
}

/** Returns what a series belongs to: the role of its GPU, rank or server, else its machine's. */
export function roleOf(all: readonly GaugeSeries[]): (series: GaugeSeries) => string {
  const given = new Map(all.filter((one) => one.name === "gpu_given").map((one) => [`${one.node}/${one.gpu}`, one.component === "trainer" ? "trainer" : "engines"]));
  return (series) => {
    if (series.gpu !== null) return given.get(`${series.node}/${series.gpu}`) ?? "not used";
    if (series.rank !== null) return "trainer";
    return series.server !== null ? "engines" : "machines";
  };
}

const ROLE_COLORS: Record<string, string> = { engines: "--c1", trainer: "--c2", machines: "--c3" };

/** Returns the color token of a role: the same in the map and in every chart. */
export const roleColor = (role: string): string => ROLE_COLORS[role] ?? "--ink3";

/** Returns the role of a device of a machine. */
export const roleOfDevice = (device: Device): string => (/trainer|rank/.test(device.role) ? "trainer" : /server|inference/.test(device.role) ? "engines" : "not used");

/** Returns the members of a chart in words: `8 GPUs`. */
export function membersOf(series: readonly GaugeSeries[]): string {
  const one = series[0];
  const noun = !one ? "series" : one.server !== null ? "server" : one.rank !== null ? "rank" : one.gpu !== null ? "GPU" : "machine";
  return `${series.length} ${noun}${series.length === 1 ? "" : "s"}`;
}

const SHOWN = new Set(SECTIONS.flatMap((section) => section.charts.flatMap((chart) => chart.names)));

/** Returns a chart for any other gauge: counters as rates, histograms as means. Null for parts of a histogram and known ones. */
export function otherChart(name: string, names: ReadonlySet<string>): ChartSpec | null {
  if (SHOWN.has(name) || name === "gpu_given" || /_(bucket|created|count)$/.test(name)) return null;
  const title = visible(name.replace(/^(vllm|telescope):/, ""));
  const histogram = /^(.+)_sum$/.exec(name)?.[1];
  if (histogram && names.has(`${histogram}_count`)) return { title: title.replace(/_sum$/, ""), unit: "mean", ...meanSeconds(histogram) };
  if (/_total$/.test(name)) return { title, unit: "a second", names: [name], of: rates, low: 0 };
  return { title, unit: "", names: [name] };
}

export interface Device {
  name: string;
  role: string;
  /** Mean and last load from 0 to 1; null when it is not measured. */
  load: Value;
  mean: Value;
  used: Value;
  total: Value;
}

export interface Machine {
  name: string;
  cpu: Value;
  cpuMean: Value;
  memoryUsed: Value;
  memoryTotal: Value;
  load: Value;
  devices: Device[];
}

/** Returns a line for the devices of each role: `8 GPUs`, their mean load, the sum of their memory. */
export function byRole(devices: readonly Device[]): Device[] {
  const kindOf = (device: Device) => device.role.replace(/ \d+(, .*)?$/, "");
  const total = (values: Value[]): Value => (values.every((value) => value === null) ? null : sum(values));
  return sort(group(devices, kindOf), ([kind]) => kind).map(([kind, mine]): Device => {
    const noun = mine[0]!.name.replace(/ \d+$/, "");
    return {
      name: mine.length === 1 ? mine[0]!.name : `${mine.length} ${noun}s`,
      role: mine.length === 1 ? mine[0]!.role : kind,
      load: mean(mine, (device) => device.load) ?? null,
      mean: mean(mine, (device) => device.mean) ?? null,
      used: total(mine.map((device) => device.used)),
      total: total(mine.map((device) => device.total)),
    };
  });
}

/** The machines of a run with their GPUs; without GPUs, with its processes. Those without a reading since `begun` are left out, unless all are. */
export function machines(ever: readonly GaugeSeries[], begun = 0): Machine[] {
  const current = ever.filter((one) => (one.time.at(-1) ?? 0) >= begun);
  const all = current.length ? current : ever;
  const nodes = [...new Set(all.map((one) => one.node).filter((node): node is string => node !== null))].sort();
  const pick = (name: string, match: (one: GaugeSeries) => boolean) => all.find((one) => one.name === name && match(one));
  const last = (name: string, match: (one: GaugeSeries) => boolean): Value => lastOf(pick(name, match));
  const share = (value: Value) => (value === null ? null : value / 100);
  return nodes.map((node): Machine => {
    const here = (one: GaugeSeries) => one.node === node;
    const cpu = pick("cpu_utilization_percent", here);
    const gpus = [...new Set(all.filter((one) => here(one) && one.gpu !== null && one.name.startsWith("gpu_")).map((one) => one.gpu!))].sort((a, b) => a - b);
    const roles = (gpu: number) => {
      const given = all.filter((one) => one.name === "gpu_given" && here(one) && one.gpu === gpu);
      return given.map((one) => (one.component === "trainer" ? `trainer rank ${one.rank}` : `server ${one.server}`)).join(", ") || "not used";
    };
    const devices = gpus.map((gpu): Device => {
      const mine = (one: GaugeSeries) => here(one) && one.gpu === gpu;
      const load = pick("gpu_utilization_percent", mine);
      return { name: `GPU ${gpu}`, role: roles(gpu), load: share(lastOf(load)), mean: share(meanReading(load)), used: last("gpu_memory_used_bytes", mine), total: last("gpu_memory_total_bytes", mine) };
    });
    if (gpus.length === 0) {
      for (const busy of all.filter((one) => here(one) && one.name === "telescope:engine_busy_seconds_total")) {
        const clock = pick("telescope:engine_clock_seconds", (one) => sameOwner(one, busy));
        const share = clock ? perOther(busy, clock) : null;
        devices.push({ name: `server ${busy.server}`, role: "inference", load: lastOf(share), mean: meanReading(share), used: null, total: null });
      }
      for (const rank of all.filter((one) => here(one) && one.name === "process_memory_bytes")) {
        devices.push({ name: `rank ${rank.rank}`, role: "trainer", load: null, mean: null, used: lastOf(rank), total: null });
      }
    }
    return {
      name: node,
      cpu: share(lastOf(cpu)),
      cpuMean: share(meanReading(cpu)),
      memoryUsed: last("memory_used_bytes", here),
      memoryTotal: last("memory_total_bytes", here),
      load: last("load_average_1m", here),
      devices,
    };
  });
}
