/** The layout of charts: chosen, changed, saved under a name. */

import { useMemo, useState } from "react";
import { FieldForm } from "../../shell/controls";
import { Menu } from "../../shell/Menu";
import { formatScales, formatSections, type Layout, parseScales, parseSections, type Scale, useLayouts } from "../../state/layouts";
import { setParams, useParam } from "../../state/url";
import { allSections, mainSections } from "./tree";

const MAIN = "main";
const ALL = "all";

/** The chosen layout; a changed one is in the address until it is saved. */
export function useLayout(names: string[]) {
  const { layouts } = useLayouts();
  const [name] = useParam("layout", MAIN);
  const [charts] = useParam("charts");
  const [scales] = useParam("scales");
  const base: Layout = useMemo(() => {
    const own = layouts.find((layout) => layout.name === name);
    if (own) return own;
    return name === ALL ? { name: ALL, sections: allSections(names) } : { name: MAIN, sections: mainSections(names) };
  }, [name, layouts, names]);
  const layout = useMemo((): Layout & { scales: Record<string, Scale> } => {
    const sections = charts ? parseSections(charts) : base.sections;
    return { name: base.name, sections, scales: scales ? parseScales(scales) : (base.scales ?? {}) };
  }, [base, charts, scales]);
  return {
    layout,
    edited: charts !== "" || scales !== "",
    choose: (next: string) => setParams({ layout: next === MAIN ? null : next, charts: null, scales: null }),
    change: (next: Layout) => setParams({ charts: formatSections(next.sections) }),
    setScale: (metric: string, scale: Scale) => {
      const text = formatScales({ ...layout.scales, [metric]: scale });
      setParams({ scales: text === formatScales(base.scales ?? {}) ? null : text });
    },
  };
}

const titleOf = (name: string): string => (name === MAIN ? "Main" : name === ALL ? "All metrics" : name);

export function LayoutChoice({ layout, edited, choose }: { layout: Layout; edited: boolean; choose: (name: string) => void }) {
  const { layouts, save, remove, error } = useLayouts();
  const own = layouts.some((other) => other.name === layout.name);
  const [naming, setNaming] = useState<string | null>(null);
  const keep = (name: string) => {
    const clean = name.trim();
    if (!clean || clean === MAIN || clean === ALL) return;
    save({ name: clean, sections: layout.sections, scales: layout.scales });
    setNaming(null);
    choose(clean);
  };
  if (naming !== null)
    return <FieldForm label="Name of the layout" placeholder="Name of the layout" autoFocus value={naming} change={setNaming} submit={keep} button="Save" onKeyDown={(event) => event.key === "Escape" && setNaming(null)} />;
  return (
    <span className="layout nb">
      <span className="d">Layout</span>
      <Menu
        label="Choose a layout"
        button={
          <>
            <b>{titleOf(layout.name)}</b> {edited && <span className="f">edited </span>}▾
          </>
        }
        items={[
          ...[MAIN, ALL, ...layouts.map((other) => other.name)].map((name) => ({ title: titleOf(name), run: () => choose(name) })),
          { title: "Save under a name…", run: () => setNaming(own ? layout.name : "") },
          ...(own ? [{ title: `Delete “${layout.name}”`, run: () => (remove(layout.name), choose(MAIN)) }] : []),
        ]}
      />
      {error && <span className="w">{error.message}</span>}
      {edited && (
        <button className="btn" onClick={() => (own ? keep(layout.name) : setNaming(""))}>
          Save
        </button>
      )}
    </span>
  );
}
