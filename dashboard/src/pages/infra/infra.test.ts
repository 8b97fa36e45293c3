import { expect, test } from "vitest";
import type { GaugeSeries } from "../gauges";
import { aggregates, byRole, machines, membersOf, otherChart, roleColor, roleOf, roleOfDevice, SANDBOXES, SECTIONS, seriesOf } from "./infra";

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

const at = (time: number[], values: (number | null)[], more: Partial<GaugeSeries> = {}) => ({ label: "", series: one("x", values, { time, ...more }) });

test("an aggregate is over the series of a group, though they are read at different times", () => {
  const list = [at([1, 11], [10, 30]), at([4, 14], [20, 50])];
  const [all] = aggregates(list, () => "trainer", 0, 20, 2);
  expect(all).toEqual({ label: "trainer", count: 2, time: [10, 20], mean: [15, 40], low: [10, 30], high: [20, 50] });
});

test("a constant reading holds until the next is due, then it is a gap", () => {
  const [all] = aggregates([at([0], [7]), at([0, 40], [9, 9])], () => "", 0, 50, 5);
  expect(all!.mean).toEqual([8, 8, null, null, 9]);
});

test("an aggregate begins and ends with its readings", () => {
  const [all] = aggregates([at([21, 25], [1, 2])], () => "", 0, 100, 10);
  expect(all!.time).toEqual([30, 40]);
});

test("GPUs are aggregated by the role of the process that has them", () => {
  const given = (gpu: number, component: string) => one("gpu_given", [1], { gpu, component });
  const role = roleOf([given(0, "trainer"), given(1, "inference")]);
  expect([0, 1, 2].map((gpu) => role(one("x", [], { gpu })))).toEqual(["trainer", "engines", "not used"]);
  expect(role(one("x", [], { server: 0 }))).toBe("engines");
  expect(role(one("x", []))).toBe("machines");
});

test("the members of a chart are named and counted", () => {
  expect(membersOf([one("x", [], { gpu: 0 }), one("x", [], { gpu: 1 })])).toBe("2 GPUs");
  expect(membersOf([one("x", [], { server: 0 })])).toBe("1 server");
  expect(membersOf([one("x", []), one("x", [], { node: "b" })])).toBe("2 machines");
});

test("any other gauge has a chart: a counter is a rate, a histogram its mean", () => {
  const names = new Set(["vllm:a_seconds_sum", "vllm:a_seconds_count"]);
  expect(otherChart("vllm:a_seconds_sum", names)).toMatchObject({ title: "a_seconds", unit: "mean", names: ["vllm:a_seconds_sum", "vllm:a_seconds_count"] });
  expect(otherChart("vllm:b_total", names)).toMatchObject({ title: "b_total", unit: "a second" });
  expect(otherChart("custom", names)).toEqual({ title: "custom", unit: "", names: ["custom"] });
  for (const name of ["vllm:a_seconds_bucket", "vllm:a_seconds_count", "gpu_given", "vllm:num_requests_running"]) expect(otherChart(name, names)).toBeNull();
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

test("a process that moved to another machine with a new attempt is shown there alone", () => {
  const rank = (node: string, time: number[]) => ({ ...one("process_memory_bytes", time, { node, rank: 0 }), time });
  const moved = [rank("a", [1, 2]), rank("b", [11, 12])];
  expect(machines(moved, 10).map(({ name }) => name)).toEqual(["b"]);
  expect(machines(moved, 20).map(({ name }) => name)).toEqual(["a", "b"]);
});

test("the devices of one role on a machine are one line: mean load, all memory", () => {
  const device = (n: number, role: string, load: number | null) => ({ name: `GPU ${n}`, role, load, mean: load, used: 1, total: 2 });
  expect(byRole([device(0, "trainer rank 0", 0.5), device(1, "trainer rank 1", 1), device(2, "server 0", null)])).toEqual([
    { name: "GPU 2", role: "server 0", load: null, mean: null, used: 1, total: 2 },
    { name: "2 GPUs", role: "trainer rank", load: 0.75, mean: 0.75, used: 2, total: 4 },
  ]);
});

test("a device has the role of what runs on it, and a role one color", () => {
  const device = (role: string) => ({ name: "GPU 0", role, load: 0.5, mean: 0.5, used: null, total: null });
  expect(["server 1", "inference", "trainer rank 3", "not used"].map((role) => roleOfDevice(device(role)))).toEqual(["engines", "engines", "trainer", "not used"]);
  expect(roleColor("trainer")).not.toBe(roleColor("engines"));
});

test("numbers of sandboxes have a line for each provider and kind of failure, and rates a minute", () => {
  const of = (name: string, labels: Record<string, string>, values: number[]) => one(name, values, { component: "sandbox", node: null, labels });
  const all = [
    of("sandboxes_alive", { provider: "local" }, [1, 2]), of("sandboxes_alive", { provider: "modal" }, [3, 4]),
    of("sandbox_creates_total", { provider: "local" }, [1, 3]),
    of("sandbox_failures_total", { provider: "modal", operation: "create", error: "SandboxBusyError" }, [0, 1]),
  ];
  const drawn = SECTIONS.find((section) => section.title === SANDBOXES)!.charts.map((spec) => [spec.title, spec.each, seriesOf(spec, all).map((line) => [line.label, line.series.mean.at(-1)])]);
  expect(drawn).toEqual([
    ["Alive", true, [["local", 2], ["modal", 4]]], ["Created", true, [["local", 120]]], ["Commands", true, []],
    ["Failures", true, [["Busy create modal", 1]]],
  ]);
});
