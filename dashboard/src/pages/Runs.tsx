/** All runs: sorted, filtered, chosen for comparison. */

import {
  type ColumnDef,
  flexRender,
  getCoreRowModel,
  getFilteredRowModel,
  getSortedRowModel,
  type SortingState,
  useReactTable,
} from "@tanstack/react-table";
import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useMemo, useRef, useState } from "react";
import { count, duration, moment, NONE, number, percent, signed } from "../format";
import { Quiet } from "../shell/App";
import { statusClass, statusWord } from "../shell/Header";
import { useKeys } from "../shell/keys";
import { useRuns } from "../state/run";
import { runColor } from "../state/theme";
import { elsewhere, format, go, useParam, usePlace } from "../state/url";
import type { Problem, RunRow } from "../types";
import "./runs.css";

const ROW = 32;

const gain = (run: RunRow): number | null =>
  run.heldout_before === null || run.heldout_after === null ? null : run.heldout_after - run.heldout_before;
const shortModel = (model: string | null): string => model?.split("/").filter(Boolean).at(-1) ?? NONE;

export function Runs() {
  const runs = useRuns();
  const place = usePlace();
  const [search, setSearch] = useParam("search");
  const [sort, setSort] = useParam("sort", "-started_at");
  const [chosen, setChosen] = useState<string[]>([]);
  const [at, setAt] = useState(-1);
  const body = useRef<HTMLDivElement>(null);
  const sorting: SortingState = useMemo(() => [{ id: sort.replace(/^-/, ""), desc: sort.startsWith("-") }], [sort]);

  const columns = useMemo<ColumnDef<RunRow>[]>(
    () => [
      { id: "name", header: "run", accessorFn: (run) => run.name },
      { id: "status", header: "state", accessorFn: (run) => run.status },
      { id: "started_at", header: "started", accessorFn: (run) => run.started_at ?? 0, cell: ({ row }) => moment(row.original.started_at), sortDescFirst: true },
      { id: "duration", header: "took", accessorFn: (run) => run.duration ?? -1, cell: ({ row }) => duration(row.original.duration), meta: "r" },
      {
        id: "steps",
        header: "steps",
        accessorFn: (run) => run.steps,
        cell: ({ row: { original: run } }) => (
          <>
            {count(run.steps)}
            <span className="f">{run.num_steps ? ` of ${count(run.num_steps)}` : ""}</span>
          </>
        ),
        meta: "r",
      },
      {
        id: "reward_last",
        header: "reward, first to last",
        accessorFn: (run) => run.reward_last ?? -Infinity,
        cell: ({ row: { original: run } }) =>
          run.reward_last === null ? (
            NONE
          ) : (
            <>
              <span className="f">{number(run.reward_first, 2)} → </span>
              {number(run.reward_last, 2)}
            </>
          ),
        meta: "r",
      },
      {
        id: "heldout_after",
        header: "held out",
        accessorFn: (run) => run.heldout_after ?? run.heldout_before ?? -Infinity,
        cell: ({ row: { original: run } }) => percent(run.heldout_after ?? run.heldout_before),
        meta: "r",
      },
      {
        id: "gain",
        header: "gain, points",
        accessorFn: (run) => gain(run) ?? -Infinity,
        cell: ({ row: { original: run } }) => {
          const points = gain(run);
          return signed(points === null ? null : 100 * points, 1);
        },
        meta: "r",
      },
      { id: "algorithm", header: "algorithm", accessorFn: (run) => run.algorithm ?? "", cell: ({ getValue }) => (getValue() as string) || NONE },
      { id: "model", header: "model", accessorFn: (run) => shortModel(run.model), cell: ({ row }) => <span title={row.original.model ?? ""}>{shortModel(row.original.model)}</span> },
      { id: "environments", header: "environments", accessorFn: (run) => run.environments.join(", ") },
      { id: "tags", header: "tags", accessorFn: (run) => run.tags.join(", ") },
    ],
    [],
  );
  const table = useReactTable({
    data: runs.data?.runs ?? [],
    columns,
    state: { sorting, globalFilter: search },
    onSortingChange: (change) => {
      const [next] = typeof change === "function" ? change(sorting) : change;
      setSort(next ? `${next.desc ? "-" : ""}${next.id}` : null);
    },
    enableSortingRemoval: false,
    globalFilterFn: (row, _, text: string) => {
      const run = row.original;
      const all = [run.name, run.id, run.status, run.model, run.algorithm, run.project, ...run.environments, ...run.tags].join(" ").toLowerCase();
      return text.toLowerCase().split(/\s+/).every((word) => all.includes(word));
    },
    getCoreRowModel: getCoreRowModel(),
    getSortedRowModel: getSortedRowModel(),
    getFilteredRowModel: getFilteredRowModel(),
  });
  const rows = table.getRowModel().rows;
  const virtual = useVirtualizer({ count: rows.length, getScrollElement: () => body.current, estimateSize: () => ROW, overscan: 12 });
  const link = (id: string) => elsewhere(place, { run: id, page: "overview" });
  const compare = () => {
    const [first, ...rest] = chosen;
    if (first !== undefined) go(elsewhere(place, { run: first, page: "metrics" }, { with: rest.map(encodeURIComponent).join(",") }));
  };
  const move = (by: number) => {
    const next = Math.min(Math.max(0, at + by), rows.length - 1);
    setAt(next);
    virtual.scrollToIndex(next);
  };
  const toggle = (id: string) => setChosen((old) => (old.includes(id) ? old.filter((other) => other !== id) : [...old, id]));
  useKeys("Runs", [
    { keys: ["j", "ArrowDown"], does: "next run", run: () => move(1) },
    { keys: ["k", "ArrowUp"], does: "run before", run: () => move(-1) },
    { keys: ["Enter"], does: "open the run", run: () => rows[at] && go(link(rows[at].original.id)) },
    { keys: ["x"], does: "choose for comparison", run: () => rows[at] && toggle(rows[at].original.id) },
    { keys: ["c"], does: "compare the chosen runs", run: compare },
  ]);
  useEffect(() => setAt(-1), [search, sort]);

  if (runs.error && !runs.data) return <Quiet title="The server did not answer." text={runs.error.message} />;
  if (!runs.data) return null;
  const { runs: all, problems } = runs.data;
  if (all.length === 0)
    return (
      <Quiet title="No runs here yet." text={runs.data.roots.length ? `Looked in ${runs.data.roots.join(", ")}.` : "The folders given to telescope ui hold no run."}>
        <p>Make one in ten minutes, without a GPU:</p>
        <pre>make demo</pre>
        <p>or open the folder of a run:</p>
        <pre>telescope ui RUN_DIR</pre>
        <Problems problems={problems} />
      </Quiet>
    );
  const live = all.filter((run) => run.live).length;
  return (
    <div className="runs">
      <h1 className="vh">Runs</h1>
      <div className="toolbar">
        <input
          className="field"
          type="search"
          placeholder="Filter by name, model, environment, tag"
          aria-label="Filter runs"
          value={search}
          onChange={(event) => setSearch(event.target.value, true)}
        />
        <span className="d nb">
          {rows.length === all.length ? "" : `${count(rows.length)} of `}
          {count(all.length)} {all.length === 1 ? "run" : "runs"}
          {live > 0 ? `, ${count(live)} training now` : ""}
        </span>
        <span className="grow" />
        {chosen.length > 0 && (
          <button className="link" onClick={() => setChosen([])}>
            Clear
          </button>
        )}
        <button className="btn" disabled={chosen.length < 2} onClick={compare} title={chosen.length < 2 ? "Choose two or more runs" : "c"}>
          Compare{chosen.length > 0 ? ` ${chosen.length}` : ""}
        </button>
      </div>
      <div className="scroll" ref={body} tabIndex={-1}>
        <table>
          <thead>
            <tr>
              <th className="pick">
                <span className="vh">Compare</span>
              </th>
              {table.getFlatHeaders().map((header) => {
                const sorted = header.column.getIsSorted();
                return (
                  <th key={header.id} className={String(header.column.columnDef.meta ?? "")} aria-sort={sorted === "asc" ? "ascending" : sorted === "desc" ? "descending" : undefined}>
                    <button onClick={header.column.getToggleSortingHandler()}>
                      {flexRender(header.column.columnDef.header, header.getContext())}
                      {sorted ? (sorted === "asc" ? " ↑" : " ↓") : ""}
                    </button>
                  </th>
                );
              })}
            </tr>
          </thead>
          <tbody>
            <tr aria-hidden style={{ height: virtual.getVirtualItems()[0]?.start ?? 0 }} />
            {virtual.getVirtualItems().map((item) => {
              const row = rows[item.index]!;
              const run = row.original;
              const order = chosen.indexOf(run.id);
              return (
                <tr key={run.id} className={item.index === at ? "at" : ""} onClick={(event) => !(event.target as Element).closest("input, a") && go(link(run.id))}>
                  <td className="pick">
                    <input
                      type="checkbox"
                      aria-label={`Compare ${run.name}`}
                      checked={order >= 0}
                      style={order >= 0 ? { accentColor: `var(${runColor(order)})` } : undefined}
                      onChange={() => toggle(run.id)}
                    />
                  </td>
                  {row.getVisibleCells().map((cell) => (
                    <td key={cell.id} className={String(cell.column.columnDef.meta ?? "")}>
                      {cell.column.id === "name" ? (
                        <a href={format(link(run.id))}>
                          <b>{run.name}</b> <span className="f">{run.id === run.name ? "" : run.id}</span>
                        </a>
                      ) : cell.column.id === "status" ? (
                        <span className={`state ${statusClass(run.status)}`} title={run.error ?? undefined}>
                          <i />
                          {statusWord(run.status)}
                        </span>
                      ) : (
                        flexRender(cell.column.columnDef.cell, cell.getContext())
                      )}
                    </td>
                  ))}
                </tr>
              );
            })}
            <tr aria-hidden style={{ height: virtual.getTotalSize() - (virtual.getVirtualItems().at(-1)?.end ?? 0) }} />
          </tbody>
        </table>
        {rows.length === 0 && <p className="none d">No run matches “{search}”.</p>}
        <Problems problems={problems} />
      </div>
    </div>
  );
}

function Problems({ problems }: { problems: Problem[] }) {
  if (problems.length === 0) return null;
  return (
    <section className="problems">
      <h2>Folders that could not be read</h2>
      {problems.map((problem) => (
        <p key={problem.path} className="d">
          <span className="m">{problem.path}</span> {problem.problem}
        </p>
      ))}
    </section>
  );
}
