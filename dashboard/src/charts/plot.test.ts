import uPlot from "uplot";
import { expect, test, vi } from "vitest";
import type { ChartProps } from "./props";
import { align, draw, overhang } from "./plot";

vi.mock("uplot", () => ({
  default: class {
    constructor(readonly options: uPlot.Options) {}
  },
}));

test("lines of other places share an axis: a gap is null, a place of another line is undefined", () => {
  const { x, data, rows } = align([0, 1], [
    { label: "a", color: "--c1", x: [0, 2], values: [1, null] },
    { label: "b", color: "--c2", x: [1, 2], values: [3, 4], raw: [5, 6], bands: [{ low: [0, 0], high: [9, 9], opacity: 1 }] },
  ]);
  expect(x).toEqual([0, 1, 2]);
  // Bands lie under measured lines, and these under the lines, of which the first is on top.
  expect(data.slice(1)).toEqual([[undefined, 9, 9], [undefined, 0, 0], [undefined, 5, 6], [undefined, 3, 4], [1, undefined, null]]);
  expect(rows).toEqual([5, 4]);
});

test("steps at one place of the axis are all kept beside another run", () => {
  const { x, data } = align([], [
    { label: "a", color: "--c1", x: [0.1, 0.4, 0.4], values: [1, 2, 3] },
    { label: "b", color: "--c2", x: [0.1, 0.2], values: [4, 5] },
  ]);
  expect(x).toEqual([0.1, 0.2, 0.4, 0.4]);
  expect(data.slice(1)).toEqual([[4, 5, undefined, undefined], [1, undefined, 2, 3]]);
});

test("lines of the same places are taken as they are", () => {
  const x = [0, 1];
  expect(align(x, [{ label: "a", color: "--c1", x, values: [1, 2] }])).toEqual({ x, data: [x, [1, 2]], rows: [1] });
});

test("areas of a stack keep their order", () => {
  const area = (label: string) => ({ label, color: "--c1", x: [0], values: [1], area: true });
  expect(align([0], [area("below"), area("above")]).rows).toEqual([1, 2]);
});

test("a label at the end of the axis gets room for its half, one before it needs none", () => {
  const wide = () => 30;
  expect(overhang(10, [0, 10], 100, wide)).toBe(16);
  expect(overhang(9, [0, 10], 100, wide)).toBe(6);
  expect(overhang(5, [0, 10], 100, wide)).toBeLessThan(0);
  expect(overhang(undefined, [0, 10], 100, wide)).toBe(0);
});

test("a plot that is drawn after its page has got another line draws those that it was made of", () => {
  const canvas = { measureText: () => ({ width: 8 }) } as Record<string, unknown>;
  for (const name of ["save", "restore", "beginPath", "arc", "fill", "stroke", "strokeText"]) canvas[name] = () => {};
  const written: string[] = [];
  canvas.fillText = (text: string) => written.push(text);
  vi.stubGlobal("document", { documentElement: { dataset: {} }, createElement: () => ({ getContext: () => canvas }) });
  vi.stubGlobal("getComputedStyle", () => ({ getPropertyValue: () => "#000000" }));
  vi.stubGlobal("devicePixelRatio", 1);
  const line = (label: string) => ({ label, direct: label, color: "--c1", values: [1, 2] });
  const latest = { current: { title: "reward", x: [0, 1], lines: [line("first")] } as ChartProps };
  const plot = draw({} as HTMLElement, latest, align([0, 1], latest.current.lines), { width: 300, height: 200 });
  latest.current = { ...latest.current, lines: [line("first"), line("second")] };
  const { hooks } = (plot as unknown as { options: uPlot.Options }).options;
  const shown = { ctx: canvas, bbox: { left: 0, top: 0, width: 300, height: 200 }, scales: { x: { min: 0, max: 1 } }, width: 300, valToPos: () => 10 };
  hooks!.draw!.forEach((hook) => hook!(shown as unknown as uPlot));
  expect(written).toEqual(["first"]);
  vi.unstubAllGlobals();
});
