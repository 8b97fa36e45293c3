/** A section of a layout: its charts, and what changes the section. */

import { useState } from "react";
import type { DrawnRun } from "../../charts/runs";
import { type Layout, moveMetric, moveSection, removeSection, renameSection, stepMetric, toggleMetric } from "../../state/layouts";
import { DRAGGED_METRIC, DRAGGED_SECTION, Grip } from "./Grip";
import { MetricChart } from "./MetricChart";
import type { View } from "./series";

interface SectionProps {
  /** Its place in the layout. */
  index: number;
  layout: Layout;
  change: (layout: Layout) => void;
  /** Whether it has just been made: its name is asked for. */
  isNew: boolean;
  runs: DrawnRun[];
  view: View;
  open: (metric: string) => void;
}

export function ChartSection({ index, layout, change, isNew, runs, view, open }: SectionProps) {
  const { title, metrics } = layout.sections[index]!;
  const [naming, setNaming] = useState(isNew);
  const [target, setTarget] = useState(false);
  const rename = (name: string) => {
    setNaming(false);
    if (name.trim() && name.trim() !== title) change(renameSection(layout, index, name.trim()));
  };
  const drop = (event: React.DragEvent) => {
    setTarget(false);
    const metric = event.dataTransfer.getData(DRAGGED_METRIC);
    const section = event.dataTransfer.getData(DRAGGED_SECTION);
    if (metric) change(moveMetric(layout, metric, index, null));
    else if (section) change(moveSection(layout, Number(section), index));
  };
  return (
    <section
      aria-label={title}
      className={target ? "target" : undefined}
      onDragOver={(event) => {
        if (!event.dataTransfer.types.some((type) => type === DRAGGED_METRIC || type === DRAGGED_SECTION)) return;
        event.preventDefault();
        setTarget(true);
      }}
      onDragLeave={() => setTarget(false)}
      onDrop={drop}
    >
      <h2>
        <Grip kind={DRAGGED_SECTION} name={String(index)} label={`the section ${title}`} move={(by) => change(moveSection(layout, index, index + by))} />
        {naming ? (
          <input
            className="field"
            autoFocus
            aria-label="Name of the section"
            defaultValue={title}
            onFocus={(event) => event.target.select()}
            onBlur={(event) => rename(event.target.value)}
            onKeyDown={(event) => {
              if (event.key === "Enter") rename(event.currentTarget.value);
              else if (event.key === "Escape") setNaming(false);
              else return;
              event.stopPropagation();
            }}
          />
        ) : (
          <button title="Rename the section" onClick={() => setNaming(true)}>
            {title}
          </button>
        )}
        <span>{metrics.length === 1 ? "1 chart" : `${metrics.length} charts`}</span>
        <button className="take f" aria-label={`Remove the section ${title}`} title="Remove the section with its charts" onClick={() => change(removeSection(layout, index))}>
          ×
        </button>
      </h2>
      {metrics.length === 0 && <p className="none f">Drag metrics or charts here, or choose them at the left.</p>}
      <div className="row">
        {metrics.map((metric) => (
          <MetricChart
            key={metric}
            metric={metric}
            runs={runs}
            view={view}
            open={() => open(metric)}
            remove={() => change(toggleMetric(layout, metric))}
            drop={(moved) => change(moveMetric(layout, moved, index, metric))}
            move={(by) => change(stepMetric(layout, metric, by))}
          />
        ))}
      </div>
    </section>
  );
}
