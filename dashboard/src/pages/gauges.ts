/** Series of gauges, for Timeline and Infra. */

import { bisectRight, mean } from "d3-array";
import type { GaugeSeries, Value } from "../types";
import { visible } from "../text/hostile";

export type { GaugeSeries };

/** Returns a counter's growth per second between its readings; a restart of its process gives a gap. */
export function rate(series: GaugeSeries): GaugeSeries {
  const grown = series.mean.map((_, i): Value => {
    const [before, now] = [series.max[i - 1], series.max[i]];
    const seconds = i > 0 ? series.time[i]! - series.time[i - 1]! : 0;
    if (before == null || now == null || seconds <= 0 || now < before) return null;
    return (now - before) / seconds;
  });
  return { ...series, mean: grown, min: grown, max: grown };
}

/** Returns the growth of one counter over that of another with the same readings: `over` per `under`. */
export function perOther(over: GaugeSeries, under: GaugeSeries): GaugeSeries {
  const at = new Map(under.time.map((time, i) => [time, i]));
  const share = over.time.map((time, i): Value => {
    const j = at.get(time);
    const [a0, a1] = [over.max[i - 1], over.max[i]];
    const before = at.get(over.time[i - 1] ?? NaN);
    if (j === undefined || before === undefined || a0 == null || a1 == null) return null;
    const grown = (under.max[j] ?? NaN) - (under.max[before] ?? NaN);
    return grown > 0 && a1 >= a0 ? (a1 - a0) / grown : null;
  });
  return { ...over, mean: share, min: share, max: share };
}

/** The last reading, and the mean of all. */
export const lastOf = (series: GaugeSeries | null | undefined): Value => series?.mean.findLast((value) => value !== null) ?? null;

export const meanReading = (series: GaugeSeries | null | undefined): Value => mean(series?.mean ?? []) ?? null;

/** The reading at or before a time. */
export function at(series: GaugeSeries, time: number): Value {
  return series.mean[bisectRight(series.time, time) - 1] ?? null;
}

/** Names classes of errors without the words that all of them have: `CommandTimeout`. */
export const shortError = (text: string): string => text.replaceAll(/\bSandbox(\w+)Error\b/g, "$1");

/** The nodes, GPUs and processes that series belong to, in words: `GPU 3`, `server 0`, `rank 1`. */
export function ownerOf(series: GaugeSeries, severalNodes: boolean): string {
  const own =
    series.gpu !== null ? `GPU ${series.gpu}` : series.rank !== null ? `rank ${series.rank}` : series.server !== null ? `server ${series.server}` : series.component;
  // Of a sandbox's failure the kind is the first word.
  if (own === "sandbox") return shortError(Object.values(series.labels).reverse().join(" "));
  const labels = Object.values(series.labels ?? {}).join(" ");
  return visible([severalNodes && series.node ? series.node : "", own, labels].filter(Boolean).join(" "));
}
