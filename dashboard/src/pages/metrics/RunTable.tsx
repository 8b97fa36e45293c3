/** The runs on the page, with their values at the crosshair and the settings in which they differ. */

import type { DrawnRun, XAxis } from "../../charts/data";
import { lastRow, nearest } from "../../charts/math";
import { count, number, setting } from "../../format";
import { useCursor } from "../../state/cursor";
import { useResource } from "../../state/resource";
import type { Comparison } from "../../types";
import { elsewhere, format, setOthers, useOthers, usePlace } from "../../state/url";

const COLUMNS: [metric: string, title: string][] = [
  ["reward/all_groups/mean", "reward"],
  ["entropy", "entropy"],
  ["kl_divergence_inference", "KL"],
  ["grad_norm", "grad norm"],
  ["timing_step_total", "step, s"],
];
const MOST_SETTINGS = 3;

export function RunTable({ runs, axis }: { runs: DrawnRun[]; axis: XAxis }) {
  const at = useCursor(axis);
  const place = usePlace();
  const others = useOthers();
  const comparison = useResource<Comparison>(runs.length > 1 ? "/api/compare" : null, { runs: runs.map((run) => run.id).join(",") }).data;
  if (runs.length < 2) return null;
  const differing = (comparison?.config ?? []).filter((row) => !row.bookkeeping).slice(0, MOST_SETTINGS);
  const value = (run: DrawnRun, metric: string) => {
    const values = run.steps.metrics[metric] ?? [];
    if (at !== null && at > (run.x.at(-1) ?? -Infinity)) return null;
    return values[at === null ? lastRow(values) : nearest(run.x, at)] ?? null;
  };
  return (
    <div className="runtable">
      <table>
        <thead>
          <tr>
            <th>Run, values {at === null ? "at its end" : axis === "step" ? `at step ${at}` : "at the crosshair"}</th>
            {differing.map((row) => (
              <th key={row.key}>{row.key}</th>
            ))}
            {COLUMNS.map(([metric, title]) => (
              <th key={metric} className="r">
                {title}
              </th>
            ))}
            <th className="r">length</th>
            <th>
              <span className="vh">Take away</span>
            </th>
          </tr>
        </thead>
        <tbody>
          {runs.map((run, i) => (
            <tr key={run.id}>
              <td>
                <i className="dot" style={{ background: `var(${run.color})` }} />
                <a href={format(elsewhere(place, { run: run.id, page: "overview" }))}>
                  <b>{run.name}</b> <span className="f">{run.id === run.name ? "" : run.id}</span>
                </a>
              </td>
              {differing.map((row) => (
                <td key={row.key} className="cut" title={setting(row.values[i])}>
                  {setting(row.values[i])}
                </td>
              ))}
              {COLUMNS.map(([metric]) => (
                <td key={metric} className="r">
                  {number(value(run, metric))}
                </td>
              ))}
              <td className="r f">{count(run.steps.step.length)} steps</td>
              <td className="r">
                {i > 0 && (
                  <button className="f" aria-label={`Take ${run.name} away`} title="Take away" onClick={() => setOthers(others.filter((other) => other !== run.id))}>
                    ×
                  </button>
                )}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
