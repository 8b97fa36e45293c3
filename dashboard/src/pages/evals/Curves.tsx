/** Charts of an eval: accuracy over checkpoints, pass@k of two of them, other metrics. */

import { useMemo } from "react";
import { Chart } from "../../charts/Chart";
import type { Band, Line } from "../../charts/props";
import { nearest } from "../../charts/math";
import { number, percent, resultFormat } from "../../format";
import { COLORS, useRunColors } from "../../state/colors";
import { curveOf, useEvalsOf, useRunId, useRuns } from "../../state/run";
import { type Range, setParams, useOthers } from "../../state/url";
import { visible } from "../../text/hostile";
import type { EvalRow, EvalSample, Value } from "../../types";
import { isInRange, passCurve } from "./items";

const wholePercent = (share: number): string => `${number(100 * share, 0)} %`;

export function Curve({ name, curve, range }: { name: string; curve: EvalRow[]; range: Range | null }) {
  const others = useOthers();
  const runs = useRuns().data?.runs;
  const run = useRunId();
  const mine = visible(runs?.find((row) => row.id === run)?.name ?? "this run");
  const theirs = useEvalsOf(others);
  const colors = useRunColors();
  const lines = useMemo(() => {
    const all = [{ id: run, label: mine, rows: curve }, ...others.map((id, i) => ({ id, label: visible(runs?.find((row) => row.id === id)?.name ?? id), rows: curveOf((theirs[i] ?? []).filter((row) => row.name === name && isInRange(row, range))) }))];
    return all.flatMap(({ id, label, rows }, i): Line[] => {
      if (rows.length === 0) return [];
      const low = rows.map((row) => row.accuracy_low);
      const high = rows.map((row) => row.accuracy_high);
      return [
        {
          label,
          color: colors.of(id),
          x: rows.map((row) => row.version),
          values: rows.map((row) => row.accuracy),
          width: i === 0 ? 2 : 1.5,
          bands: [intervals(low, high, 0.15)],
          whiskers: i === 0 ? { low, high } : undefined,
          direct: all.length > 1 ? label : undefined,
        },
      ];
    });
  }, [curve, mine, name, runs, run, colors, range?.from, range?.to, others.join(), ...theirs]);
  const x = useMemo(() => curve.map((row) => row.version), [curve]);
  const { isShare, label, value } = resultFormat(curve[0]?.metric);
  return <Chart title={label[0]!.toUpperCase() + label.slice(1)} unit="after steps, 95 % intervals" axis="version" x={x} lines={lines} onPick={(version) => setParams({ after: String(x[nearest(x, version)]) })} low={isShare ? 0 : undefined} format={(one) => value(one)} tickFormat={isShare ? wholePercent : undefined} right={lines.length > 1 ? 90 : 12} />;
}

interface PassesProps {
  before?: EvalRow;
  after: EvalRow;
  samplesBefore?: EvalSample[];
  samplesAfter?: EvalSample[];
}

/** Room for a label such as "10000 steps". */
const LABEL_PX = 88;

const intervals = (low: Value[], high: Value[], opacity: number): Band => ({ low, high, opacity, measured: { names: ["95 % low", "95 % high"], low, high } });

/** pass@k with its interval, and dashed pass^k, of both checkpoints. */
export function Passes({ before, after, samplesBefore, samplesAfter }: PassesProps) {
  const lines = useMemo(() => {
    const curves = [before && before !== after && samplesBefore ? { row: before, samples: samplesBefore, color: "--r3" } : null, samplesAfter ? { row: after, samples: samplesAfter, color: "--c1" } : null];
    return curves.flatMap((curve): Line[] => {
      if (!curve) return [];
      const { k, one, low, high, all } = passCurve(curve.samples);
      const name = `${curve.row.version} steps`;
      const common = { color: curve.color, x: k.map(Math.log2), width: curve.color === "--c1" ? 2 : 1.5, direct: name };
      return [
        { ...common, label: `pass@k after ${name}`, values: one, bands: [intervals(low, high, 0.12)] },
        { ...common, label: `pass^k after ${name}`, values: all, dash: [5, 3], silent: true },
      ];
    });
  }, [before, after, samplesBefore, samplesAfter]);
  return <Chart title="pass@k" unit="95 % intervals; dashed: pass^k" axis="k" x={lines.at(-1)?.x ?? []} lines={lines} low={0} high={1} right={LABEL_PX} format={(value) => percent(value)} tickFormat={wholePercent} xFormat={(at) => String(2 ** at)} />;
}

/** Returns metrics that say more than the accuracy and the passes do, four at most. */
export function otherMetrics(curve: EvalRow[]): string[] {
  const names = new Set(curve.flatMap((row) => Object.keys(row.metrics)));
  return [...names].filter((name) => !/^pass[@^]/.test(name) && name !== curve[0]?.metric && curve.some((row) => row.metrics[name] !== row.accuracy)).slice(0, 4);
}

export function OtherMetrics({ curve }: { curve: EvalRow[] }) {
  const lines = useMemo(() => otherMetrics(curve).map((name, i): Line => ({ label: visible(name), color: Object.values(COLORS)[i]!, x: curve.map((row) => row.version), values: curve.map((row) => row.metrics[name] ?? null), direct: visible(name) })), [curve]);
  const x = useMemo(() => curve.map((row) => row.version), [curve]);
  if (lines.length === 0) return null;
  return <Chart title="Other metrics" unit="after steps" axis="version" x={x} lines={lines} low={0} right={LABEL_PX} />;
}
