/** Files that the pages make: CSV of charts and tables. */

import type { Value } from "../types";
import { joinPlaces } from "./math";

/** Hands a file to the browser's downloads. */
export function download(name: string, content: Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Returns a name that every file system takes. */
export const fileName = (title: string): string => title.replace(/[^\p{L}\p{M}\p{N}_.-]+/gu, "_").replace(/^_+|_+$/g, "");

/** Returns lines of CSV; a field with a comma, a quote or a line end is quoted. */
export function csv(header: string[], rows: (string | number | null | undefined)[][]): string {
  const field = (value: string | number | null | undefined): string => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [header, ...rows].map((row) => row.map(field).join(",")).join("\r\n") + "\r\n";
}

/** Returns the places on the axis as rows, and a column for each line's measured values. */
export function linesCsv(axis: string, lines: { label: string; x: number[]; values: Value[] }[]): string {
  const { x, rows } = joinPlaces(lines.map((line) => line.x));
  return csv(
    [axis, ...lines.map((line) => line.label)],
    x.map((place, at) => [place, ...lines.map((line, i) => line.values[rows[i]![at] ?? -1])]),
  );
}
