import { expect, test } from "vitest";
import type { GaugeSeries } from "../gauges";
import { aggregate, machines, SECTIONS, seriesOf } from "./infra";

const one = (name: string, values: (number | null)[], more: Partial<GaugeSeries> = {}): GaugeSeries => ({
  name, component: "gpu", node: "a", gpu: null, rank: null, server: null, labels: {}, time: values.map((_, i) => i), min: values, mean: values, max: values, ...more,
});
const chart = (title: string) => SECTIONS.flatMap((section) => section.charts).find((spec) => spec.title === title)!;

test("bytes are shown in GiB, and a chart has only its gauges", () => {
  const [memory] = seriesOf(chart("Memory"), [one("memory_used_bytes", [2 ** 30]), one("load_average_1m", [1])]);
  expect(memory!.series.mean).toEqual([1]);
});

test("mean latency is the growth of the sum over that of the count", () => {
  const all = [one("vllm:time_to_first_token_seconds_sum", [0, 6], { server: 0 }), one("vllm:time_to_first_token_seconds_count", [0, 3], { server: 0 })];
  expect(seriesOf(chart("Time to first token"), all)[0]!.series.mean).toEqual([null, 2]);
});

test("the aggregate is the mean over the series at each time", () => {
  expect(aggregate([one("x", [1, null]), one("x", [3, 5])])).toEqual({ time: [0, 1], mean: [2, 5] });
});

test("a GPU has the role of the process that it was given to", () => {
  const [machine] = machines([
    one("gpu_utilization_percent", [50, 100], { gpu: 0 }),
    one("gpu_given", [1], { gpu: 0, component: "trainer", rank: 2 }),
    one("cpu_utilization_percent", [20, 40]),
  ]);
  expect(machine!.devices).toEqual([{ name: "GPU 0", role: "trainer rank 2", load: 1, mean: 0.75, used: null, total: null }]);
  expect([machine!.cpu, machine!.cpuMean]).toEqual([0.4, 0.3]);
});
