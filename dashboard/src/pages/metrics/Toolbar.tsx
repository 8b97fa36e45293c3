/** What all charts of the page share: axis, smoothing, spread, scale, and which samples they show. */

import { type ReactNode, useState } from "react";
import { runPath } from "../../api";
import type { BandKind } from "../../charts/data";
import { Segments } from "../../shell/controls";
import { Dialog } from "../../shell/Dialog";
import { Menu } from "../../shell/Menu";
import { useVersion } from "../../state/live";
import { useResource } from "../../state/resource";
import { setParams, useParam } from "../../state/url";
import type { Environment } from "../../types";
import { MetricField } from "./ScaleDialog";
import { titleOf } from "./tree";
import { visible } from "../../text/hostile";

const AXES: [string, string][] = [
  ["step", "Step"],
  ["time", "Time"],
  ["tokens", "Tokens"],
];
const SPREADS: [BandKind, string][] = [
  ["none", "None"],
  ["std", "Standard deviation"],
  ["percentiles", "Percentiles"],
  ["range", "Minimum to maximum"],
  ["heat", "Heat map"],
];

interface ToolbarProps {
  run: string;
  environments: readonly Environment[];
  keep: number;
  names: string[];
  openTree: () => void;
  children: ReactNode;
}

export function Toolbar({ run, environments, keep, names, openTree, children }: ToolbarProps) {
  const [axis] = useParam("axis", "step");
  const [x] = useParam("x");
  const [asked, setAsked] = useState(false);
  const [, setSmoothing] = useParam("smooth");
  const [band, setBand] = useParam("band", "percentiles");
  return (
    <div className="toolbar">
      <button className="btn narrow" onClick={openTree}>
        All metrics
      </button>
      {children}
      <Segments label="Axis" value={x ? "" : axis} options={AXES} choose={(name) => setParams({ axis: name === "step" ? null : name, x: null })}>
        <button aria-pressed={x !== ""} title={x ? `All charts over ${x}` : "Any metric as the x axis of all charts"} onClick={() => setAsked(true)}>
          {x ? titleOf(x).title : "Metric…"}
        </button>
      </Segments>
      <label className="smooth">
        Smooth
        <input type="range" min={0} max={0.99} step={0.01} value={keep} title="A double click chooses it by the length of the run" onDoubleClick={() => setSmoothing(null)} onChange={(event) => setSmoothing(event.target.value, true)} />
        <b>{keep.toFixed(2)}</b>
      </label>
      <Choice label="Spread" title={SPREADS.find(([name]) => name === band)?.[1] ?? band} items={SPREADS.map(([name, title]) => ({ title, run: () => setBand(name) }))} />
      <Samples run={run} environments={environments} />
      <span className="seg" role="group" aria-label="Scale">
        <Toggle name="log" title="Log" hint="Logarithmic axes (l)" />
        <Toggle name="trim" title="Trim" hint="Axes leave out the outermost 2 % on each side" />
        <Toggle name="fit" title="Fit" hint="Axes follow the values, also where an environment declares a range" />
      </span>
      {asked && <AxisDialog names={names} x={x} close={() => setAsked(false)} />}
    </div>
  );
}

/** Asks for the metric of the x axis of all charts. */
function AxisDialog({ names, x, close }: { names: string[]; x: string; close: () => void }) {
  const [name, setName] = useState(x);
  return (
    <Dialog close={close} title="Metric of the x axis">
      <form
        className="naming"
        onSubmit={(event) => {
          event.preventDefault();
          setParams({ x: name || null });
          close();
        }}
      >
        <MetricField names={names} value={name} change={setName} placeholder="Name of a metric" />
        <button className="btn" disabled={name !== "" && !names.includes(name)}>
          Apply
        </button>
      </form>
      <p className="f s">Each point is a step, in the order of this metric's values. Smoothing goes along it, and the range of the ruler chooses the steps.</p>
    </Dialog>
  );
}

function Toggle({ name, title, hint }: { name: string; title: string; hint: string }) {
  const [value, set] = useParam(name);
  return (
    <button aria-pressed={value === "1"} title={hint} onClick={() => set(value === "1" ? null : "1")}>
      {title}
    </button>
  );
}

function Choice({ label, title, items }: { label: string; title: string; items: { title: string; run: () => void }[] }) {
  return (
    <span className="layout nb">
      <span className="d">{label}</span>
      <Menu
        label={`Choose: ${label.toLowerCase()}`}
        button={
          <>
            <b>{title}</b> ▾
          </>
        }
        items={items}
      />
    </span>
  );
}

/** Which samples the charts show, where there is a choice. */
function Samples({ run, environments }: { run: string; environments: readonly Environment[] }) {
  const [environment, setEnvironment] = useParam("environment");
  const [tag, setTag] = useParam("tag");
  const tags = useResource<Record<string, string[]>>(runPath(run, "tags"), {}, useVersion(run, "samples")).data ?? {};
  const names = [...new Set(environments.filter((one) => one.purpose === "training").map((one) => one.name))];
  const values = Object.entries(tags)
    .sort(([a], [b]) => a.localeCompare(b))
    .flatMap(([name, all]) => [...all].sort((a, b) => a.localeCompare(b, undefined, { numeric: true })).map((value) => `${name}=${value}`));
  return (
    <>
      {(names.length > 1 || environment) && (
        <Choice label="Environment" title={visible(environment) || "all"} items={[{ title: "all", run: () => setEnvironment(null) }, ...names.map((name) => ({ title: visible(name), run: () => setEnvironment(name) }))]} />
      )}
      {(values.length > 1 || tag) && <Choice label="Tag" title={visible(tag) || "any"} items={[{ title: "any", run: () => setTag(null) }, ...values.map((value) => ({ title: visible(value), run: () => setTag(value) }))]} />}
    </>
  );
}
