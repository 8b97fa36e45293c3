/** The runs on the page, with their values at the crosshair and the settings in which they differ. */

import { columnOf, commonStep, type DrawnRun, leavesOf, type XAxis } from "../../charts/runs";
import { lastRow, valueAt } from "../../charts/math";
import { count, difference, number, setting } from "../../format";
import { toggled } from "../../lists";
import { Segments } from "../../shell/controls";
import { Menu } from "../../shell/Menu";
import { type Column, Table } from "../../shell/Table";
import { COLORS, useRunColors } from "../../state/colors";
import { useCursor } from "../../state/cursor";
import { useResource } from "../../state/resource";
import type { Comparison } from "../../types";
import { SEEDS } from "../../state/groups";
import { elsewhere, format, setOthers, useOthers, useParam, usePlace } from "../../state/url";
import { visible } from "../../text/hostile";

const COLUMNS: [metric: string, title: string][] = [
  ["reward/all_groups/mean", "reward"],
  ["entropy", "entropy"],
  ["kl_divergence_inference", "KL"],
  ["grad_norm", "grad norm"],
  ["timing_step_total", "step, s"],
];
const MOST_SETTINGS = 3;
const LINES = [
  [false, "each run"],
  [true, "means, 95 % interval", "Runs whose settings are equal but for the seed, or as they are grouped on Runs: their mean with its 95 % interval"],
] as const;

export function RunTable({ runs, axis }: { runs: DrawnRun[]; axis: XAxis }) {
  const at = useCursor(axis);
  const place = usePlace();
  const others = useOthers();
  const colors = useRunColors();
  const [grouping, setGrouping] = useParam("group");
  const [last, setLast] = useParam("last");
  const [, setBaseline] = useParam("baseline");
  const comparison = useResource<Comparison>(others.length > 0 && runs.length > 1 ? "/api/compare" : null, { runs: runs.map((run) => leavesOf(run)[0]!.id) }).data;
  if (others.length === 0) return null;
  const differing = (comparison?.config ?? []).filter((row) => !row.bookkeeping).slice(0, MOST_SETTINGS);
  const value = (run: DrawnRun, metric: string) => {
    const { x, values } = columnOf(run, metric) ?? { x: [], values: [] };
    if (at !== null) return valueAt(x, values, at);
    const end = run.until === undefined ? undefined : run.steps.step.indexOf(run.until) + 1;
    return values[lastRow(values.slice(0, end))] ?? null;
  };
  const base = runs.find((run) => run.baseline);
  const common = commonStep(runs);
  const columns: Column<DrawnRun>[] = [
    {
      head: <span className="vh">Run</span>,
      cell: (run) => (
        <>
          <Menu
            label={`Color of ${run.name}`}
            className="swatch"
            button={<i className="dot" style={{ background: `var(${run.color})` }} />}
            items={Object.entries(COLORS).map(([title, color]) => ({ title, color, run: () => leavesOf(run).forEach((leaf) => colors.choose(leaf.id, color)) }))}
          />
          {run.members ? (
            <>
              <b>{run.name}</b> <span className="f">{run.members.length === 1 ? "1 run" : `mean of ${run.members.length} runs`}</span>
            </>
          ) : (
            <a href={format(elsewhere(place, { run: run.id, page: "overview" }))} title={visible(run.id)}>
              <b>{run.name}</b> <span className="f">{run.id === run.name ? "" : run.id}</span>
            </a>
          )}
          <button className="base f s" aria-pressed={run.baseline ?? false} title="Draw it in grey, and show the difference of other runs to it" aria-label={`${run.name} is the baseline`} onClick={() => setBaseline(run.baseline ? null : leavesOf(run)[0]!.id)}>
            {run.baseline ? "baseline" : "as baseline"}
          </button>
        </>
      ),
    },
    ...differing.map(({ key, values }): Column<DrawnRun> => {
      const text = (run: DrawnRun) => setting(values[runs.indexOf(run)]);
      return { head: key, className: "cut", title: text, cell: text };
    }),
    ...COLUMNS.map(([metric, title]): Column<DrawnRun> => ({
      head: title,
      className: "r",
      cell: (run) => <>{number(value(run, metric))}{base && <Difference value={base === run ? null : value(run, metric)} from={value(base, metric)} />}</>,
    })),
    { head: "length", className: "r", cell: (run) => <span className="f">{count(run.steps.step.length)} steps</span> },
    {
      head: <span className="vh">Take away</span>,
      className: "r",
      cell: (run) =>
        run !== runs[0] && !run.members && (
          <button className="f" aria-label={`Take ${run.name} away`} title="Take away" onClick={() => setOthers(toggled(others, run.id))}>
            ×
          </button>
        ),
    },
  ];
  return (
    <div className="runtable">
      <p className="choices s">
        <Segments label="Lines" className="tabs" value={Boolean(grouping)} options={LINES} choose={(means) => setGrouping(means ? grouping || SEEDS : null)} />
        <span className="tabs" role="group" aria-label="Values">
          <button aria-pressed={last !== "common"} onClick={() => setLast(null)} title="The last values of each run">
            at the end
          </button>
          <button aria-pressed={last === "common"} disabled={common === null} onClick={() => setLast("common")} title="At the last step that all runs have, here and in the titles of the charts">
            {common === null ? "no common step" : `at common step ${common}`}
          </button>
        </span>
        {at !== null && <span className="f">{axis === "step" ? `now at step ${at}` : "now at the crosshair"}</span>}
      </p>
      <Table rows={runs} columns={columns} keyOf={(run) => run.id} />
    </div>
  );
}

/** Shows the difference of a value to the baseline's, or an equally wide space if there is none. */
function Difference({ value, from }: { value: number | null; from: number | null }) {
  return <span className="delta f">{value === null || from === null ? "\u00a0" : difference(value - from)}</span>;
}
