import { expect, test } from "vitest";
import { align, overhang } from "./plot";

test("lines of other places share an axis: a gap is null, a place of another line is undefined", () => {
  const { x, data, rows } = align([0, 1], [
    { label: "a", color: "--c1", x: [0, 2], values: [1, null] },
    { label: "b", color: "--c2", x: [1, 2], values: [3, 4], raw: [5, 6], bands: [{ low: [0, 0], high: [9, 9], opacity: 1 }] },
  ]);
  expect(x).toEqual([0, 1, 2]);
  expect(data.slice(1)).toEqual([[1, undefined, null], [undefined, 9, 9], [undefined, 0, 0], [undefined, 5, 6], [undefined, 3, 4]]);
  expect(rows).toEqual([1, 5]);
});

test("lines of the same places are taken as they are", () => {
  const x = [0, 1];
  expect(align(x, [{ label: "a", color: "--c1", x, values: [1, 2] }])).toEqual({ x, data: [x, [1, 2]], rows: [1] });
});

test("a label at the end of the axis gets room for its half, one before it needs none", () => {
  const wide = () => 30;
  expect(overhang(10, [0, 10], 100, wide)).toBe(16);
  expect(overhang(9, [0, 10], 100, wide)).toBe(6);
  expect(overhang(5, [0, 10], 100, wide)).toBeLessThan(0);
  expect(overhang(undefined, [0, 10], 100, wide)).toBe(0);
});
