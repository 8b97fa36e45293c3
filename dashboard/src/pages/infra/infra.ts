/** What Infra shows of the gauges: which charts there are, and the machines with their GPUs. */

import type { Value } from "../../types";
import { lastOf, meanOf, ownerOf, perOther, rate, type GaugeSeries } from "../gauges";

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

/** The mean of a histogram between two readings: growth of its sum over growth of its count. */
const meanSeconds = (metric: string): Pick<ChartSpec, "names" | "of"> => ({
  names: [`${metric}_sum`, `${metric}_count`],
  of: (series) => paired(series, `${metric}_sum`, `${metric}_count`),
});

function paired(series: GaugeSeries[], over: string, under: string): GaugeSeries[] {
  return named(series, over).flatMap((one) => {
    const other = named(series, under).find((candidate) => sameOwner(candidate, one) && JSON.stringify(candidate.labels) === JSON.stringify(one.labels));
    return other ? [perOther(one, other)] : [];
  });
}

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
      { title: "Busy", unit: "share of time", names: ["telescope:engine_busy_seconds_total", "telescope:engine_clock_seconds"], of: (series) => paired(series, "telescope:engine_busy_seconds_total", "telescope:engine_clock_seconds"), low: 0, high: 1 },
      { title: "Requests running", unit: "", names: ["vllm:num_requests_running"], low: 0 },
      { title: "Requests waiting", unit: "", names: ["vllm:num_requests_waiting"], low: 0 },
      { title: "Generated", unit: "tokens/s", names: ["vllm:generation_tokens_total"], of: rates, low: 0 },
      { title: "Prompts read", unit: "tokens/s", names: ["vllm:prompt_tokens_total"], of: rates, low: 0 },
      { title: "KV cache in use", unit: "%", names: ["vllm:kv_cache_usage_perc"], scale: 100, low: 0 },
      { title: "Time to first token", unit: "s, mean", ...meanSeconds("vllm:time_to_first_token_seconds"), low: 0 },
      { title: "Request, end to end", unit: "s, mean", ...meanSeconds("vllm:e2e_request_latency_seconds"), low: 0 },
      { title: "Prefix cache hits", unit: "share", names: ["vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"], of: (series) => paired(series, "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"), low: 0, high: 1 },
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
    title: "Machines",
    charts: [
      { title: "CPU", unit: "%", names: ["cpu_utilization_percent"], low: 0, high: 100 },
      { title: "Load", unit: "1 min", names: ["load_average_1m"], low: 0 },
      { title: "Memory", unit: "GiB", names: ["memory_used_bytes"], scale: 1 / GIB, low: 0 },
      { title: "Shared memory", unit: "GiB", names: ["shared_memory_used_bytes"], scale: 1 / GIB, low: 0 },
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

/** The mean of several series at each of their times: the aggregate line. */
export function aggregate(list: readonly GaugeSeries[]): { time: number[]; mean: Value[] } {
  const sums = new Map<number, { sum: number; n: number }>();
  for (const series of list) {
    series.time.forEach((time, i) => {
      const value = series.mean[i];
      if (value === null || value === undefined) return;
      const cell = sums.get(time) ?? { sum: 0, n: 0 };
      sums.set(time, { sum: cell.sum + value, n: cell.n + 1 });
    });
  }
  const times = [...sums.keys()].sort((a, b) => a - b);
  return { time: times, mean: times.map((time) => sums.get(time)!.sum / sums.get(time)!.n) };
}

interface Device {
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

/** The machines of a run with their GPUs; without GPUs, with its processes. */
export function machines(all: readonly GaugeSeries[]): Machine[] {
  const nodes = [...new Set(all.map((one) => one.node).filter((node): node is string => node !== null))].sort();
  const pick = (name: string, match: (one: GaugeSeries) => boolean) => all.find((one) => one.name === name && match(one));
  const last = (name: string, match: (one: GaugeSeries) => boolean): Value => {
    const found = pick(name, match);
    return found ? lastOf(found) : null;
  };
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
      return { name: `GPU ${gpu}`, role: roles(gpu), load: share(load ? lastOf(load) : null), mean: share(load ? meanOf(load) : null), used: last("gpu_memory_used_bytes", mine), total: last("gpu_memory_total_bytes", mine) };
    });
    if (gpus.length === 0) {
      for (const busy of all.filter((one) => here(one) && one.name === "telescope:engine_busy_seconds_total")) {
        const clock = pick("telescope:engine_clock_seconds", (one) => sameOwner(one, busy));
        const share = clock ? perOther(busy, clock) : null;
        devices.push({ name: `server ${busy.server}`, role: "inference", load: share ? lastOf(share) : null, mean: share ? meanOf(share) : null, used: null, total: null });
      }
      for (const rank of all.filter((one) => here(one) && one.name === "process_memory_bytes")) {
        devices.push({ name: `rank ${rank.rank}`, role: "trainer", load: null, mean: null, used: lastOf(rank), total: null });
      }
    }
    return {
      name: node,
      cpu: share(cpu ? lastOf(cpu) : null),
      cpuMean: share(cpu ? meanOf(cpu) : null),
      memoryUsed: last("memory_used_bytes", here),
      memoryTotal: last("memory_total_bytes", here),
      load: last("load_average_1m", here),
      devices,
    };
  });
}
