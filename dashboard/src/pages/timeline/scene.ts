/** What the canvas of the timeline shows. */

import type { GaugeSeries } from "../gauges";
import type { AlertMark, Outage } from "./alerts";
import type { Layout } from "./layout";
import type { Lanes, Outcome } from "./spans";
import type { View } from "./viewport";

export type Readings = Pick<GaugeSeries, "time" | "mean">;

export interface Gauge {
  title: string;
  unit: string;
  /** What the height of the plot stands for. */
  high: number;
  role: "engine" | "trainer" | "host";
  /** Writes the reading at a time. */
  read: (time: number) => string;
  series: Readings;
}

export interface Mark {
  time: number;
  label: string;
}

/** A node of the critical path: where the ink line goes, and its number. */
export interface PathNode {
  from: number;
  to: number;
  y: number;
  numbers: { n: number; at: number }[];
}

export interface Scene {
  lanes: Lanes;
  layout: Layout;
  view: View;
  origin: number;
  /** The newest time of a live run; null when it has ended, or its attempt has recorded nothing yet. */
  now: number | null;
  /** The newest time of the run. Gauges are drawn with their last reading until then. */
  end: number;
  batches: Mark[];
  /** Times at which groups were ready. */
  ready: number[];
  alerts: AlertMark[];
  outages: Outage[];
  gauges: Gauge[];
  path: PathNode[];
  /** Rows of the columns to outline: the samples of a group, and the selected one. */
  group: ReadonlySet<string>;
  sample: string;
  /** Requests that are hidden. */
  hidden: ReadonlySet<Outcome>;
}
