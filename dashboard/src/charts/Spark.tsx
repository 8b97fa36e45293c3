/** A line of a few pixels: raw faint, smoothed in ink. */

import { extent } from "d3-array";
import { useMemo } from "react";
import type { Value } from "../types";
import { smooth } from "./math";

interface SparkProps {
  values: Value[];
  height?: number;
  keep?: number;
  color?: string;
  raw?: boolean;
}

const WIDTH = 100;
const POINTS = 300;

export function Spark({ values, height = 30, keep = 0.6, color = "var(--ink)", raw = true }: SparkProps) {
  const paths = useMemo(() => {
    const thin = values.length > POINTS ? values.filter((_, i) => i % Math.ceil(values.length / POINTS) === 0) : values;
    const [low, high] = extent(thin, (value) => value);
    if (low === undefined) return null;
    // Values that differ by rounding alone are equal.
    const flat = high - low <= 1e-9 * Math.max(Math.abs(high), Math.abs(low));
    const y = (value: number) => (flat ? height - 4 : height - 4 - ((value - low) / (high - low)) * (height - 8));
    const path = (line: Value[]) => {
      let text = "";
      let on = false;
      line.forEach((value, i) => {
        if (value === null) {
          on = false;
          return;
        }
        text += `${on ? "L" : "M"}${((i / Math.max(1, line.length - 1)) * WIDTH).toFixed(1)} ${y(value).toFixed(1)}`;
        on = true;
      });
      return text;
    };
    return { raw: path(thin), smooth: path(smooth(thin, keep)) };
  }, [values, height, keep]);
  if (!paths) return <svg className="spark" width="100%" height={height} aria-hidden />;
  return (
    <svg className="spark" viewBox={`0 0 ${WIDTH} ${height}`} width="100%" height={height} preserveAspectRatio="none" aria-hidden>
      {raw && <path d={paths.raw} stroke={color} strokeWidth={1} opacity={0.35} />}
      <path d={paths.smooth} stroke={color} strokeWidth={1.5} />
    </svg>
  );
}
