/** All runs: filtered, sorted, grouped, chosen for comparison; columns of any field. */

import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useMemo, useRef, useState } from "react";
import { ApiError } from "../../api";
import { download } from "../../charts/export";
import { meanOf } from "../../charts/math";
import { count } from "../../format";
import { toggled } from "../../lists";
import { Quiet } from "../../shell/Quiet";
import { Chooser } from "../../shell/Chooser";
import { useKeys } from "../../shell/keys";
import { Menu } from "../../shell/Menu";
import { useDocument } from "../../state/documents";
import { useResource } from "../../state/resource";
import { useLabels, useTags } from "../../state/labels";
import { useLiveRuns } from "../../state/run";
import { useTick } from "../../state/timing";
import { useRunColors } from "../../state/colors";
import { compare, groupFields, groupRuns, groupTitle, type RunGroup, SEEDS, type Sortable } from "../../state/groups";
import { elsewhere, format, formatList, go, MOST_RUNS, parseList, setParams, useParam, usePlace, useSearchText } from "../../state/url";
import type { Field, Problem, RunRow, Runs as RunList } from "../../types";
import { type Column, columnOptions, columnsOf, DEFAULT_COLUMNS, DEFAULT_SORT, fromBaseline, runsCsv, serverFields, shown } from "./columns";
import { fieldName, matches, parseFilter, renameField, toggleTerm, unknownFields, valueOf } from "./filter";
import { PlotView, usePlotFields, useView, ViewChoice } from "./PlotView";
import { ProjectsButton, ProjectsDialog } from "./Projects";
import { RenameDialog, TagDialog } from "./RunDialogs";
import { visible } from "../../text/hostile";
import "./runs.css";

const ROW = 32;
const NO_FIELDS: Field[] = [];
/** How often the page looks for fields of new runs. */
const FIELDS_MS = 30_000;
/** Settings that the menu of groups offers. */
const MOST_OFFERED = 12;

/** A line of the table. */
type Line = { group: RunGroup; run?: undefined } | { run: RunRow; group?: RunGroup };

/** What a button or a key does with the chosen runs, and why it cannot. */
interface Action {
  key: string;
  title: string;
  does: string;
  problem?: string;
  pressed?: boolean;
  run: () => void;
}

const keyOf = (line: Line): string => (line.run ? line.run.id : line.group.key);

export function Runs() {
  const [search] = useParam("search");
  const [sort] = useParam("sort", DEFAULT_SORT);
  const [grouping] = useParam("group");
  const { ids } = useColumns();
  const terms = useMemo(() => parseFilter(search), [search]);
  const named = [...terms.flatMap((term) => (term.field ? [term.field] : [])), ...groupFields(grouping)];
  const known = useResource<Field[]>("/api/fields", {}, useTick(FIELDS_MS)).data ?? NO_FIELDS;
  const plotted = usePlotFields(known);
  const fields = serverFields([...ids, ...plotted, sort.replace(/^-/, ""), ...named.flatMap((name) => fieldName(name) ?? [])]);
  const runs = useLiveRuns(fields);
  const [projectsOpened, setProjectsOpened] = useState(false);
  if (runs.error && !runs.data) return <Quiet title="The server did not answer." text={runs.error.message} />;
  if (!runs.data) return null;
  const openProjects = () => setProjectsOpened(true);
  return (
    <>
      {runs.data.runs.length === 0 ? <Nothing list={runs.data} openProjects={openProjects} /> : <Table list={runs.data} ids={ids} known={known} lost={runs.error} openProjects={openProjects} />}
      {/* Here, so that it stays open when the last project of the list is removed. */}
      {projectsOpened && <ProjectsDialog close={() => setProjectsOpened(false)} />}
    </>
  );
}

/** The ids of the columns: of the address, else those that the user keeps. */
function useColumns(): { ids: string[]; choose: (ids: string[] | null) => void } {
  const { value, change } = useDocument<{ columns?: string[] }>("runs");
  const [given] = useParam("columns");
  const kept = Array.isArray(value?.columns) ? value.columns.filter((id) => typeof id === "string") : DEFAULT_COLUMNS;
  const key = given || kept.join(",");
  return {
    ids: useMemo(() => key.split(",").filter(Boolean), [key]),
    choose: (ids) => {
      change((old) => ({ ...old, columns: ids ?? undefined }));
      setParams({ columns: null }, true);
    },
  };
}

/** Returns a list that the address holds, and how to replace it. */
function useListParam(name: string): [string[], (list: string[]) => void] {
  const [text, set] = useParam(name);
  const list = useMemo(() => parseList(text), [text]);
  return [list, (next) => set(formatList(next))];
}

function Table({ list, ids, known, lost, openProjects }: { list: RunList; ids: string[]; known: Field[]; lost: Error | null; openProjects: () => void }) {
  const labels = useLabels();
  const [archived, setArchived] = useParam("archived");
  const numArchived = list.runs.filter(labels.isArchived).length;
  const all = useMemo(() => (archived ? list.runs : list.runs.filter((run) => !labels.isArchived(run))), [list, archived, labels]);
  const view = useView();
  const [baselineId, setBaseline] = useParam("baseline");
  const baseline = list.runs.find((run) => run.id === baselineId);
  const place = usePlace();
  const [search] = useParam("search");
  const [sort, setSort] = useParam("sort", DEFAULT_SORT);
  const [grouping] = useParam("group");
  const [chosen, setChosen] = useListParam("chosen");
  const [opened, setOpened] = useState<"columns" | "tags" | "name" | null>(null);
  const [folds, setUnfolded] = useListParam("open");
  const unfolded = useMemo(() => new Set(folds), [folds]);
  const colors = useRunColors();
  const [pointed, point] = useState<string | null>(null);
  const body = useRef<HTMLDivElement>(null);
  const tags = useTags();
  const tagColumn = useTagColumn(tags.of);
  const columns = useMemo(() => [NAME, ...columnsOf(ids, tagColumn)], [ids, tagColumn]);
  const found = useMemo(() => {
    const terms = parseFilter(search);
    return all.filter((run) => matches(run, terms, tags.of(run)));
  }, [all, search, tags]);
  const lines = useMemo(
    () => linesOf(found, sort, grouping, columns, unfolded, (run, field) => valueOf(run, field, tags.of(run))),
    [found, sort, grouping, columns, unfolded, tags],
  );
  const virtual = useVirtualizer({ count: lines.length, getScrollElement: () => body.current, estimateSize: () => ROW, overscan: 12 });
  useEffect(() => point(null), [search, sort, grouping]);
  // Not by its place, which changes when a run begins.
  const at = lines.findIndex((line) => keyOf(line) === pointed);

  const here = new Set(all.map((run) => run.id));
  const picked = chosen.filter((id) => here.has(id));
  const link = (id: string) => elsewhere(place, { run: id, page: "overview" });
  const leave = (page: string) => {
    const [first, ...rest] = picked.slice(0, MOST_RUNS);
    const others = page === "metrics" && baseline && !picked.includes(baseline.id) ? [...rest, baseline.id] : rest;
    if (first !== undefined) go(elsewhere(place, { run: first, page }, { with: formatList(others), group: page === "metrics" ? grouping : "", baseline: page === "metrics" ? (baseline?.id ?? "") : "" }));
  };
  const chosenRuns = all.filter((run) => picked.includes(run.id));
  const [single] = chosenRuns.length === 1 ? chosenRuns : [];
  const areArchived = chosenRuns.length > 0 && chosenRuns.every(labels.isArchived);
  const save = () => {
    const rows = lines.flatMap((line) => (line.run ? [line.run] : unfolded.has(line.group.key) ? [] : line.group.runs));
    download("runs.csv", new Blob([runsCsv(rows, columns)], { type: "text/csv" }));
  };
  const pick = (members: RunRow[], on: boolean) => {
    const own = new Set(members.map((run) => run.id));
    setChosen([...chosen.filter((id) => !own.has(id)), ...(on ? own : [])]);
  };
  const fold = (key: string) => setUnfolded(toggled(folds, key));
  const membersOf = (line: Line) => (line.run ? [line.run] : line.group.runs);
  const isPicked = (line: Line) => membersOf(line).every((run) => picked.includes(run.id));
  const move = (by: number) => {
    const next = Math.min(Math.max(0, at + by), lines.length - 1);
    point(lines[next] ? keyOf(lines[next]) : null);
    virtual.scrollToIndex(next);
  };
  const open = (line: Line | undefined) => line && (line.run ? go(link(line.run.id)) : fold(line.group.key));
  const few = single ? "" : "Choose one run";
  const actions: Action[] = [
    { key: "c", title: "Draw in Metrics", does: "draw the selected runs in Metrics", run: () => leave("metrics") },
    { key: "d", title: "Compare config and code", does: "compare config and code of the selected runs", problem: picked.length < 2 ? "Choose two or more runs" : "", run: () => leave("compare") },
    { key: "t", title: "Tags", does: "tags of the selected runs", run: () => setOpened("tags") },
    { key: "r", title: "Rename", does: "rename the selected run", problem: few, run: () => setOpened("name") },
    { key: "a", title: areArchived ? "Unarchive" : "Archive", does: "archive the selected runs, or unarchive them", run: () => labels.archive(chosenRuns, !areArchived) },
    { key: "b", title: "Baseline", does: "use the selected run as the baseline", problem: few, pressed: single !== undefined && single === baseline, run: () => setBaseline(single === baseline ? null : single!.id) },
  ];
  useKeys("Runs", [
    { keys: ["j", "ArrowDown"], does: "next run", run: () => move(1) },
    { keys: ["k", "ArrowUp"], does: "run before", run: () => move(-1) },
    { keys: ["Enter"], does: "open the run, fold the group", run: () => open(lines[at]) },
    { keys: ["x"], does: "choose the run or the group", run: () => lines[at] && pick(membersOf(lines[at]), !isPicked(lines[at])) },
    ...actions.map(({ key, does, problem, run }) => ({ keys: [key], does, run: () => picked.length > 0 && !problem && run() })),
  ]);
  const live = all.filter((run) => run.live).length;
  const sortedBy = sort.replace(/^-/, "");
  return (
    <div className="page runs">
      <h1 className="vh">Runs</h1>
      <div className="toolbar">
        <Filter />
        <span className="d nb">
          {found.length === all.length ? "" : `${count(found.length)} of `}
          {count(all.length)} {all.length === 1 ? "run" : "runs"}
          {live > 0 ? `, ${count(live)} training now` : ""}
          {lost && <span className="w">, {lost instanceof ApiError ? lost.message : "the server does not answer"}</span>}
          {labels.error && <span className="w">, {labels.error.message}</span>}
        </span>
        <span className="grow" />
        {numArchived > 0 && (
          <button className="btn" aria-pressed={archived === "1"} onClick={() => setArchived(archived ? null : "1")}>
            {archived ? "Hide" : "Show"} {count(numArchived)} archived
          </button>
        )}
        <ViewChoice />
        <ProjectsButton open={openProjects} />
        <Grouping grouping={grouping} known={known} />
        <button className="btn" onClick={() => setOpened("columns")}>
          Columns
        </button>
        <button className="btn" onClick={save} title="Save the listed runs with these columns">
          CSV
        </button>
      </div>
      <Unknown terms={search} known={known} />
      {picked.length > 0 && (
        <div className="toolbar chosen">
          <b>
            {count(picked.length)} {picked.length === 1 ? "run" : "runs"} chosen
          </b>
          {actions.map(({ key, title, problem, pressed, run }) => (
            <button key={key} className="btn" disabled={Boolean(problem)} aria-pressed={pressed} onClick={run} title={problem || key}>
              {title}
            </button>
          ))}
          <button className="link" onClick={() => setChosen([])}>
            Clear
          </button>
          {picked.length > MOST_RUNS && (
            <span className="d">
              A view has {MOST_RUNS} runs at most: the first {MOST_RUNS} that you chose.
            </span>
          )}
        </div>
      )}
      {view !== "table" && (
        <PlotView runs={found} fields={known} tagColumn={tagColumn} colorOf={(run) => (run === baseline ? "--ink3" : colors.of(run.id))} hrefOf={(run) => format(link(run.id))} />
      )}
      <div className="scroll" ref={body} tabIndex={-1} hidden={view !== "table"}>
        <table>
          <thead>
            <tr>
              <th className="pick">
                <input
                  type="checkbox"
                  aria-label="Choose all that are listed"
                  checked={found.length > 0 && found.every((run) => picked.includes(run.id))}
                  onChange={(event) => pick(found, event.target.checked)}
                />
              </th>
              {columns.map((column) => {
                const sorted = column.id === sortedBy ? (sort.startsWith("-") ? "descending" : "ascending") : undefined;
                // Numbers and times begin with the largest.
                const first = column.right || column.id === "started_at" ? `-${column.id}` : column.id;
                return (
                  <th key={column.id} className={column.right ? "r" : undefined} aria-sort={sorted}>
                    <button title={column.hint ? `${column.id}: ${column.hint}` : column.id} onClick={() => setSort(sorted ? (sorted === "ascending" ? `-${column.id}` : column.id) : first)}>
                      {column.title}
                      {sorted ? (sorted === "ascending" ? " ↑" : " ↓") : ""}
                    </button>
                  </th>
                );
              })}
            </tr>
          </thead>
          <tbody>
            <tr aria-hidden style={{ height: virtual.getVirtualItems()[0]?.start ?? 0 }} />
            {virtual.getVirtualItems().map((item) => {
              const line = lines[item.index]!;
              const { run, group } = line;
              const members = membersOf(line);
              const whole = isPicked(line);
              const name = run ? visible(run.name) : `${group!.runs.length} runs of ${groupTitle(group!, grouping)}`;
              return (
                <tr
                  key={keyOf(line)}
                  className={[item.index === at ? "at" : "", run ? (group ? "member" : "") : "group"].join(" ")}
                  onClick={(event) => !(event.target as Element).closest("input, a, button") && open(line)}
                >
                  <td className="pick">
                    <input
                      type="checkbox"
                      aria-label={`Choose ${name}`}
                      checked={whole}
                      ref={(box) => {
                        if (box) box.indeterminate = !whole && members.some((one) => picked.includes(one.id));
                      }}
                      style={run ? { accentColor: `var(${colors.of(run.id)})` } : undefined}
                      onChange={() => pick(members, !whole)}
                    />
                  </td>
                  {run
                    ? columns.map((column) => {
                        const shown = column === NAME ? <Name run={run} color={run === baseline ? "--ink3" : colors.of(run.id)} href={format(link(run.id))} isArchived={labels.isArchived(run)} /> : column.show(run);
                        const delta = baseline && run !== baseline ? fromBaseline(column, run, baseline) : null;
                        return (
                          <td key={column.id} className={column.right ? "r" : undefined} title={typeof shown === "string" ? shown : undefined}>
                            {shown}
                            {delta && <span className="f s" title={`minus ${visible(baseline!.name)}`}> {delta}</span>}
                            {column === NAME && run === baseline && (
                              <button className="base s" title="Other runs show their difference to it. Click to remove the baseline" onClick={() => setBaseline(null)}>
                                baseline ×
                              </button>
                            )}
                          </td>
                        );
                      })
                    : columns.map((column) => (
                        <td key={column.id} className={column.right ? "r" : undefined}>
                          {column === NAME ? (
                            <button className="fold" aria-expanded={unfolded.has(group!.key)} onClick={() => fold(group!.key)}>
                              <span aria-hidden>{unfolded.has(group!.key) ? "▾" : "▸"}</span> <b>{groupTitle(group!, grouping)}</b>
                              <span className="f"> {group!.runs.length === 1 ? "1 run" : `${group!.runs.length} runs`}</span>
                            </button>
                          ) : (
                            shown(column, group!.runs)
                          )}
                        </td>
                      ))}
                </tr>
              );
            })}
            <tr aria-hidden style={{ height: virtual.getTotalSize() - (virtual.getVirtualItems().at(-1)?.end ?? 0) }} />
          </tbody>
        </table>
        {found.length === 0 && <p className="none d">No run fits “{search}”.</p>}
        <Problems problems={list.problems} />
      </div>
      {opened === "columns" && <ColumnChooser ids={ids} known={known} tagColumn={tagColumn} close={() => setOpened(null)} />}
      {opened === "name" && single && <RenameDialog run={single} close={() => setOpened(null)} />}
      {opened === "tags" && <TagDialog runs={chosenRuns} all={all} close={() => setOpened(null)} />}
    </div>
  );
}

const NAME: Column = { id: "name", title: "run", right: false, value: (run) => run.name, show: (run) => run.name };

/** Returns the lines of the table: runs, or groups, with their runs where they are unfolded. A seed alone is no group. */
function linesOf(runs: RunRow[], sort: string, grouping: string, columns: Column[], unfolded: Set<string>, value: (run: RunRow, field: string) => unknown): Line[] {
  const by = columns.find((column) => column.id === sort.replace(/^-/, "")) ?? columnsOf([sort.replace(/^-/, "")], NAME)[0]!;
  const down = sort.startsWith("-");
  const sorted = [...runs].sort((a, b) => compare(by.value(a), by.value(b), down));
  if (!grouping) return sorted.map((run) => ({ run }));
  const key = (group: RunGroup): Sortable => {
    const values = group.runs.map(by.value);
    return by.averaged ? (meanOf(values as (number | null)[])?.mean ?? null) : (values[0] ?? null);
  };
  const groups = groupRuns(sorted, groupFields(grouping), value);
  const lines = (group: RunGroup): Line[] => {
    if (grouping === SEEDS && group.runs.length === 1) return [{ run: group.runs[0]! }];
    return [{ group }, ...(unfolded.has(group.key) ? group.runs.map((run) => ({ run, group })) : [])];
  };
  return [...groups].sort((a, b) => compare(key(a), key(b), down)).flatMap(lines);
}

function Name({ run, color, href, isArchived }: { run: RunRow; color: string; href: string; isArchived: boolean }) {
  return (
    <a href={href} title={run.id}>
      <i className="dot" style={{ background: `var(${color})` }} />
      <b>{visible(run.name)}</b> <span className="f">{run.id === run.name ? "" : run.id}</span>
      {isArchived && <span className="f"> archived</span>}
    </a>
  );
}

function useTagColumn(of: (run: RunRow) => string[]): Column {
  const [search] = useParam("search");
  return useMemo(
    () => ({
      id: "tags",
      title: "tags",
      right: false,
      value: (run) => of(run).join(", ") || null,
      show: (run) => (
        <span className="tags">
          {of(run).map((tag) => {
            const term = `tag=${/\s/.test(tag) ? `"${tag}"` : tag}`;
            return (
              <button key={tag} aria-pressed={search.includes(term)} title={`Only runs with this tag`} onClick={() => setParams({ search: toggleTerm(search, term) })}>
                {visible(tag)}
              </button>
            );
          })}
        </span>
      ),
      together: (runs) => <span className="f">{[...new Set(runs.flatMap(of))].map(visible).join(", ")}</span>,
    }),
    [of, search],
  );
}

function Filter() {
  const [text, setText] = useSearchText();
  return (
    <input
      className="field"
      type="search"
      placeholder="Filter: words, learning_rate=1e-6, tag=sweep, reward>0.5"
      aria-label="Filter runs"
      title="Words, and conditions with = != > >= < <= on any setting, on name, status, model, tag, steps, reward, heldout, gain, on last.METRIC and eval.NAME. * stands for anything."
      value={text}
      onChange={(event) => setText(event.target.value)}
    />
  );
}

/** Warns of fields in the filter that no run has. */
function Unknown({ terms, known }: { terms: string; known: Field[] }) {
  const missing = useMemo(() => (known.length > 0 ? unknownFields(parseFilter(terms), known.map((field) => field.name)) : []), [terms, known]);
  if (missing.length === 0) return null;
  return (
    <p className="unknown w" role="status">
      {missing.map(({ field, meant }) => (
        <span key={field}>
          No field named {visible(field)}
          {meant === null ? "." : "; did you mean "}
          {meant !== null && (
            <button className="link" onClick={() => setParams({ search: renameField(terms, field, meant) })}>
              {meant}
            </button>
          )}
          {meant !== null && "? "}
        </span>
      ))}
    </p>
  );
}

function Grouping({ grouping, known }: { grouping: string; known: Field[] }) {
  const differing = known.filter((field) => field.name.startsWith("config.") && field.values > 1 && field.values < field.runs);
  const set = (group: string | null) => setParams({ group });
  const title = grouping === "" ? "none" : grouping === SEEDS ? "seeds" : grouping.replaceAll("config.", "").replaceAll(",", ", ");
  const parts = groupFields(grouping);
  return (
    <span className="nb">
      <span className="d">Group by </span>
      <Menu
        label="Group runs"
        button={<b>{title} ▾</b>}
        items={[
          { title: "none", run: () => set(null) },
          { title: "seeds: all settings equal but the seed", run: () => set(SEEDS) },
          ...differing.slice(0, MOST_OFFERED).map((field) => ({
            title: `${parts.includes(field.name) ? "− " : parts.length ? "+ " : ""}${field.name.slice("config.".length)}`,
            run: () => set(toggled(parts, field.name).join(",")),
          })),
        ]}
      />
    </span>
  );
}

function ColumnChooser({ ids, known, tagColumn, close }: { ids: string[]; known: Field[]; tagColumn: Column; close: () => void }) {
  const { choose } = useColumns();
  const options = useMemo(() => columnOptions(known, tagColumn), [known, tagColumn]);
  return <Chooser title="Columns" close={close} options={options} chosen={ids} onChange={choose} reset={() => choose(null)} />;
}

function Nothing({ list, openProjects }: { list: RunList; openProjects: () => void }) {
  return (
    <Quiet title="No runs here yet." text={list.roots.length ? `Looked in ${list.roots.join(", ")}. This page shows a run as soon as it starts.` : "The folders given to telescope ui hold no run."}>
      <p>Look at recorded runs:</p>
      <pre>telescope ui --demo</pre>
      <p>or train a model in ten minutes, without a GPU, in a clone of Telescope:</p>
      <pre>make demo</pre>
      <p>or open the folder of a run:</p>
      <pre>telescope ui RUN_DIR</pre>
      <ProjectsButton open={openProjects} tells />
      <Problems problems={list.problems} />
    </Quiet>
  );
}

function Problems({ problems }: { problems: Problem[] }) {
  if (problems.length === 0) return null;
  return (
    <section className="problems">
      <h2>What could not be read</h2>
      {problems.map((problem) => (
        <p key={problem.path} className="d">
          <span className="m">{problem.path}</span> {problem.problem}
        </p>
      ))}
    </section>
  );
}
