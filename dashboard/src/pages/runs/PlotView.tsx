/** Chooses between the table of runs and its plots, and the fields of the plots. Both choices are in the address. */

import { useMemo, useState } from "react";
import { Chooser, type Option } from "../../shell/Chooser";
import { Segments } from "../../shell/controls";
import { formatList, parseList, setParams, useParam, usePlace } from "../../state/url";
import { visible } from "../../text/hostile";
import type { Field, RunRow } from "../../types";
import { type Column, columnOptions, columnsOf, differingSettings } from "./columns";
import { Parallel, Scatter } from "./Plots";

const VIEWS: [string, string][] = [
  ["table", "Table"],
  ["scatter", "Scatter"],
  ["parallel", "Parallel"],
];
const FIRST_AXES = 6;

/** Returns the view that the address names: the table for any other name. */
export function useView(): string {
  const [view] = useParam("view", "table");
  return VIEWS.some(([name]) => name === view) ? view : "table";
}

/** Returns the fields of the chosen plot: x and y, or all axes with the outcome last. Empty for the table. */
export function usePlotFields(fields: Field[]): string[] {
  const { params } = usePlace();
  const { view, x, y, axes, outcome } = params;
  return useMemo(() => {
    const differing = differingSettings(fields);
    const main = fields.some((field) => field.name.startsWith("eval.")) ? "heldout" : "reward";
    if (view === "scatter") return [x ?? differing[0] ?? "steps", y ?? main];
    const last = outcome ?? main;
    if (view === "parallel") return [...(axes === undefined ? differing.slice(0, FIRST_AXES) : parseList(axes)).filter((id) => id !== last), last];
    return [];
  }, [fields, view, x, y, axes, outcome]);
}

export function ViewChoice() {
  const view = useView();
  const [, setView] = useParam("view", "table");
  return <Segments label="View" value={view} options={VIEWS} choose={setView} />;
}

interface PlotViewProps {
  runs: RunRow[];
  fields: Field[];
  tagColumn: Column;
  colorOf: (run: RunRow) => string;
  hrefOf: (run: RunRow) => string;
}

export function PlotView({ runs, fields, tagColumn, colorOf, hrefOf }: PlotViewProps) {
  const view = useView();
  const ids = usePlotFields(fields);
  const columns = useMemo(() => columnsOf(ids, tagColumn), [ids, tagColumn]);
  const options = useMemo(() => columnOptions(fields, tagColumn), [fields, tagColumn]);
  const [opened, setOpened] = useState(false);
  const offered = options.filter((option) => !option.section.startsWith("Settings, the same"));
  if (view === "scatter") {
    const [x, y] = columns as [Column, Column];
    const choices = (
      <>
        <FieldSelect label="x" id={x.id} options={offered} choose={(id) => setParams({ x: id })} />
        <FieldSelect label="y" id={y.id} options={offered} choose={(id) => setParams({ y: id })} />
      </>
    );
    return <Scatter {...{ runs, x, y, choices, colorOf, hrefOf }} />;
  }
  const axes = ids.slice(0, -1);
  const choices = (
    <>
      <button className="btn" onClick={() => setOpened(true)}>
        Settings
      </button>
      <FieldSelect label="outcome" id={ids.at(-1)!} options={offered} choose={(id) => setParams({ outcome: id })} />
    </>
  );
  const choose = (chosen: string[] | null) => setParams({ axes: chosen && (formatList(chosen) || ",") }); // an empty parameter is none
  return (
    <>
      <Parallel {...{ runs, columns, choices, hrefOf }} />
      {opened && <Chooser title="Axes" close={() => setOpened(false)} options={options} chosen={axes} onChange={choose} reset={() => choose(null)} />}
    </>
  );
}

function FieldSelect({ label, id, options, choose }: { label: string; id: string; options: Option[]; choose: (id: string) => void }) {
  const sections = [...new Set(options.map((option) => option.section))];
  return (
    <label className="nb">
      <span className="d">{label} </span>
      <select className="field" aria-label={label} value={id} onChange={(event) => choose(event.target.value)}>
        {!options.some((option) => option.id === id) && <option value={id}>{id}</option>}
        {sections.map((section) => (
          <optgroup key={section} label={section}>
            {options.filter((option) => option.section === section).map((option) => (
              <option key={option.id} value={option.id}>
                {visible(option.title)}
              </option>
            ))}
          </optgroup>
        ))}
      </select>
    </label>
  );
}
