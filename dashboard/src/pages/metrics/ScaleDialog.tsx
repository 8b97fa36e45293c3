/** Edits the axes of one chart: range and scale of y, and the metric of x. Empty fields use the settings of all charts. */

import { useId, useState } from "react";
import { Segments } from "../../shell/controls";
import { Dialog } from "../../shell/Dialog";
import type { Scale } from "../../state/layouts";
import { visible } from "../../text/hostile";

interface ScaleDialogProps {
  metric: string;
  scale: Scale;
  names: string[];
  set: (scale: Scale) => void;
  close: () => void;
}

export function ScaleDialog({ metric, scale, names, set, close }: ScaleDialogProps) {
  const [low, setLow] = useState(String(scale.low ?? ""));
  const [high, setHigh] = useState(String(scale.high ?? ""));
  const [log, setLog] = useState(scale.log);
  const [x, setX] = useState(scale.x ?? "");
  const ends = [low, high].map((text) => (text.trim() === "" ? undefined : Number(text.replace(",", "."))));
  const problem = problemOf(ends, log === true) ?? (x && !names.includes(x) ? `There is no metric ${visible(x)}.` : null);
  return (
    <Dialog close={close} title={`Axes of ${visible(metric)}`}>
      <form
        className="axes"
        onSubmit={(event) => {
          event.preventDefault();
          if (problem) return;
          set({ low: ends[0], high: ends[1], log, x: x || undefined });
          close();
        }}
      >
        <label>
          <span className="d">y from</span>
          <input className="field" inputMode="decimal" placeholder="values" value={low} onChange={(event) => setLow(event.target.value)} />
        </label>
        <label>
          <span className="d">to</span>
          <input className="field" inputMode="decimal" placeholder="values" value={high} onChange={(event) => setHigh(event.target.value)} />
        </label>
        <Segments label="Scale of y" value={log} options={[[undefined, "As all charts"], [false, "Linear"], [true, "Log"]]} choose={setLog} />
        <label className="long">
          <span className="d">x</span>
          <MetricField names={names} value={x} change={setX} placeholder="As all charts" />
        </label>
        <p className="long w" role="status">{problem}</p>
        <p className="long ends">
          <button className="btn" disabled={problem !== null}>
            Apply
          </button>
          <button type="button" className="link" onClick={() => (set({ low: undefined, high: undefined, log: undefined, x: undefined }), close())}>
            Reset
          </button>
        </p>
      </form>
    </Dialog>
  );
}

/** Returns why two ends are not a valid axis; null if they are. */
function problemOf([low, high]: (number | undefined)[], log: boolean): string | null {
  if (Number.isNaN(low) || Number.isNaN(high)) return "Enter a number, or leave the field empty.";
  if (low !== undefined && high !== undefined && low >= high) return "The end of the axis must lie above its start.";
  return log && (low ?? 1) <= 0 ? "A log scale must start above 0." : null;
}

/** A field for the name of a metric, with all names to choose from. */
export function MetricField({ names, value, change, placeholder }: { names: string[]; value: string; change: (name: string) => void; placeholder: string }) {
  const id = useId();
  return (
    <>
      <input className="field" list={id} aria-label="Metric of the x axis" placeholder={placeholder} value={value} onChange={(event) => change(event.target.value)} />
      <datalist id={id}>
        {names.map((name) => (
          <option key={name} value={name} />
        ))}
      </datalist>
    </>
  );
}
