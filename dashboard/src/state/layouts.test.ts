import { expect, test } from "vitest";
import { addSection, formatScales, formatSections, moveMetric, moveSection, parseKept, parseScales, parseSections, removeSection, renameSection, saveLayout, sectionFor, stepMetric, toggleMetric } from "./layouts";

const layout = {
  name: "mine",
  sections: [
    { title: "A", metrics: ["a", "b"] },
    { title: "B", metrics: ["c"] },
  ],
};

const metrics = (of: { sections: { metrics: string[] }[] }) => of.sections.map((section) => section.metrics);

test("a metric is added at the end, and taken away where it is", () => {
  expect(metrics(toggleMetric(layout, "d"))).toEqual([["a", "b"], ["c", "d"]]);
  expect(metrics(toggleMetric(layout, "a"))).toEqual([["b"], ["c"]]);
});

test("a new metric goes to the section with its like", () => {
  const sectionOf = (name: string) => name.split("/")[0]!;
  const mixed = { name: "mine", sections: [{ title: "A", metrics: ["loss/a"] }, { title: "B", metrics: ["x", "loss/b", "loss/c"] }, { title: "C", metrics: [] }] };
  expect(sectionFor(mixed, "loss/d", sectionOf)).toBe(1);
  expect(sectionFor(mixed, "other", sectionOf)).toBe(2);
});

test("sections are added, renamed, moved and removed, and an empty one stays", () => {
  const titles = (of: typeof layout) => of.sections.map((section) => section.title);
  const three = addSection(layout, "C");
  expect(titles(three)).toEqual(["A", "B", "C"]);
  expect(titles(renameSection(three, 1, "Time"))).toEqual(["A", "Time", "C"]);
  expect(titles(moveSection(three, 2, 0))).toEqual(["C", "A", "B"]);
  expect(moveSection(three, 0, -1)).toEqual(three);
  expect(titles(removeSection(three, 0))).toEqual(["B", "C"]);
  expect(metrics(toggleMetric(layout, "c"))).toEqual([["a", "b"], []]);
  expect(parseSections(formatSections(three.sections))).toEqual(three.sections);
});

test("a metric of the tree is dropped into a section", () => {
  expect(metrics(moveMetric(layout, "new", 0, "b"))).toEqual([["a", "new", "b"], ["c"]]);
});

test("a chart moves in front of another, also into another section", () => {
  expect(metrics(moveMetric(layout, "b", 0, "a"))).toEqual([["b", "a"], ["c"]]);
  expect(metrics(moveMetric(layout, "a", 1, "c"))).toEqual([["b"], ["a", "c"]]);
  expect(metrics(moveMetric(layout, "a", 1, null))).toEqual([["b"], ["c", "a"]]);
});

test("a chart moves by keys", () => {
  expect(metrics(stepMetric(layout, "a", 1))).toEqual([["b", "a"], ["c"]]);
  expect(metrics(stepMetric(layout, "b", -1))).toEqual([["b", "a"], ["c"]]);
  expect(metrics(stepMetric(layout, "a", -1))).toEqual([["a", "b"], ["c"]]);
});

test("a saved layout replaces that of its name", () => {
  const saved = saveLayout([layout], { name: "mine", sections: [] });
  expect(saved).toEqual([{ name: "mine", sections: [] }]);
  expect(saveLayout(saved, { name: "b", sections: [] }).map((one) => one.name)).toEqual(["b", "mine"]);
});

test("what is kept is read, and nonsense is nothing", () => {
  expect(parseKept({ layouts: [layout], other: 1 })).toEqual([layout]);
  expect(parseKept(null)).toEqual([]);
  expect(parseKept({ layouts: [{ name: 1 }, null] })).toEqual([]);
});

test("sections survive the address", () => {
  const sections = [{ title: "Time: a;b", metrics: ["x/y,z", "entropy"] }];
  expect(parseSections(formatSections(sections))).toEqual(sections);
});

test("a layout without its last section is not the saved one again", () => {
  // An empty parameter is none.
  expect(formatSections([])).not.toBe("");
  expect(parseSections(formatSections([]))).toEqual([]);
});

test("axes of charts are one text of the address", () => {
  const scales = { entropy: { log: true }, "reward/total/mean": { low: -1, high: 2.5, x: "eval/math,500/accuracy" }, grad_norm: { log: false, high: 1e-3 } };
  expect(parseScales(formatScales(scales))).toEqual(scales);
  expect(formatScales({ entropy: { low: undefined } })).toBe("none");
  expect(parseScales("none")).toEqual({});
  expect(parseScales("entropy:what,a..b;:;x")).toEqual({});
});

test("a kept layout has the axes of its charts", () => {
  const layout = { name: "mine", sections: [], scales: { entropy: { log: true, low: 1 } } };
  expect(parseKept({ layouts: [layout] })).toEqual([layout]);
});
