/** A section of a layout: its charts, and what changes the section. */

import { useState } from "react";
import type { DrawnRun } from "../../charts/runs";
import { type Layout, moveMetric, moveSection, removeSection, renameSection, stepMetric, toggleMetric } from "../../state/layouts";
import { DRAGGED_METRIC, DRAGGED_SECTION, Grip, useDrop } from "./Grip";
import { MetricChart } from "./MetricChart";
import type { View } from "./series";
import { visible } from "../../text/hostile";

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
  fill: (metric: string) => void;
  /** Whether the search finds a chart. */
  found: (metric: string) => boolean;
}

export function ChartSection({ index, layout, change, isNew, runs, view, open, fill, found }: SectionProps) {
  const { metrics: all } = layout.sections[index]!;
  const title = visible(layout.sections[index]!.title);
  const metrics = all.filter(found);
  const [naming, setNaming] = useState(isNew);
  const rename = (name: string) => {
    setNaming(false);
    if (name.trim() && name.trim() !== title) change(renameSection(layout, index, name.trim()));
  };
  const { isOver, handlers } = useDrop([DRAGGED_METRIC, DRAGGED_SECTION], (data) => {
    const metric = data.getData(DRAGGED_METRIC);
    const section = data.getData(DRAGGED_SECTION);
    if (metric) change(moveMetric(layout, metric, index, null));
    else if (section) change(moveSection(layout, Number(section), index));
    return true;
  });
  return (
    <section aria-label={title} className={isOver ? "target" : undefined} {...handlers}>
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
              if (event.key === "Enter" && !event.nativeEvent.isComposing) rename(event.currentTarget.value);
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
        <span>{metrics.length < all.length ? `${metrics.length} of ` : ""}{all.length === 1 ? "1 chart" : `${all.length} charts`}</span>
        <button className="take f" aria-label={`Remove the section ${title}`} title="Remove the section with its charts" onClick={() => change(removeSection(layout, index))}>
          ×
        </button>
      </h2>
      {all.length === 0 && <p className="none f">Drag metrics or charts here, or choose them at the left.</p>}
      <div className="row">
        {metrics.map((metric) => (
          <MetricChart
            key={metric}
            metric={metric}
            runs={runs}
            view={view}
            open={() => open(metric)}
            fill={() => fill(metric)}
            remove={() => change(toggleMetric(layout, metric))}
            drop={(moved) => change(moveMetric(layout, moved, index, metric))}
            move={(by) => change(stepMetric(layout, metric, by))}
          />
        ))}
      </div>
    </section>
  );
}
