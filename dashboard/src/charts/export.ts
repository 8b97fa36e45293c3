/** Files that the pages make: CSV of charts and tables. */

import type { Value } from "../types";

/** Hands a file to the browser's downloads. */
export function download(name: string, content: Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Returns a name that every file system takes. */
export const fileName = (title: string): string => title.replace(/[^\w.-]+/g, "_").replace(/^_+|_+$/g, "");

/** Returns lines of CSV; a field with a comma, a quote or a line end is quoted. */
export function csv(header: string[], rows: (string | number | null | undefined)[][]): string {
  const field = (value: string | number | null | undefined): string => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [header, ...rows].map((row) => row.map(field).join(",")).join("\r\n") + "\r\n";
}

/** Returns one row for each place on the axis, and a column for each line's measured values. */
export function linesCsv(axis: string, lines: { label: string; x: number[]; values: Value[] }[]): string {
  const places = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const maps = lines.map((line) => new Map(line.x.map((x, row) => [x, line.values[row]])));
  return csv(
    [axis, ...lines.map((line) => line.label)],
    places.map((x) => [x, ...maps.map((map) => map.get(x))]),
  );
}
