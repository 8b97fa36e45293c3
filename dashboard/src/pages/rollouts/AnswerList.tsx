import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useRef, useState } from "react";
import { get, type Query } from "../../api";
import { count, number } from "../../format";
import { promptLine } from "./conversation";
import { Plain } from "../../text/SafeText";
import { fate, level, type RewardScale } from "./squares";
import type { Value } from "../../types";
import type { SamplePage, SampleRow } from "./types";

const ROW = 20;
export const PAGE_ROWS = 200;

export const SORTS: [value: string, title: string][] = [
  ["step", "step"],
  ["-step", "newest step"],
  ["-reward", "highest reward"],
  ["reward", "lowest reward"],
  ["-advantage", "highest advantage"],
  ["advantage", "lowest advantage"],
  ["-completion_tokens", "longest"],
  ["completion_tokens", "shortest"],
  ["-age", "oldest weights"],
];

const METRIC = "metric:";

/** Orders by a metric of the environment. */
export const metricSorts = (name: string): [value: string, title: string][] => [
  [`-${METRIC}${name}`, `highest ${name}`],
  [`${METRIC}${name}`, `lowest ${name}`],
];

/** Returns the number that a list in this order shows beside the reward. */
function besideReward(row: SampleRow, sort: string): Value {
  const column = sort.replace(/^-/, "");
  if (column.startsWith(METRIC)) return row.metrics[column.slice(METRIC.length)] ?? null;
  return column === "advantage" || column === "age" ? row[column] : row.completion_tokens;
}

interface AnswerListProps {
  path: string;
  query: Query;
  version: string;
  first: SamplePage | undefined;
  sort: string;
  sample: string;
  scaleOf: (environment: string) => RewardScale;
  onSelect: (row: SampleRow) => void;
  onRows: (rows: SampleRow[]) => void;
}

/** Answers of all steps, in pages that are read when they come into view. */
export function AnswerList({ path, query, version, first, sort, sample, scaleOf, onSelect, onRows }: AnswerListProps) {
  const box = useRef<HTMLDivElement>(null);
  const key = JSON.stringify(query);
  const [pages, setPages] = useState<{ key: string; rows: Map<number, SampleRow[]> }>({ key, rows: new Map() });
  const asked = useRef(new Set<string>());
  const total = first?.total ?? 0;
  const rows = useVirtualizer({ count: total, getScrollElement: () => box.current, estimateSize: () => ROW, overscan: 16 });
  const items = rows.getVirtualItems();
  const rowAt = (index: number): SampleRow | undefined => {
    const page = Math.floor(index / PAGE_ROWS);
    if (page === 0) return first?.rows[index];
    return pages.key === key ? pages.rows.get(page)?.[index % PAGE_ROWS] : undefined;
  };
  const needed = [...new Set([items[0]?.index ?? 0, items.at(-1)?.index ?? 0].map((index) => Math.floor(index / PAGE_ROWS)))].filter((page) => page > 0).join();
  useEffect(() => {
    for (const page of needed.split(",").filter(Boolean).map(Number)) {
      const id = `${key}/${version}/${page}`;
      if (asked.current.has(id)) continue;
      asked.current.add(id);
      void get<SamplePage>(path, { ...query, offset: page * PAGE_ROWS, limit: PAGE_ROWS, facets: false })
        .then((answer) => setPages((old) => ({ key, rows: new Map(old.key === key ? old.rows : []).set(page, answer.rows) })))
        .catch(() => asked.current.delete(id));
    }
  }, [needed, key, version, path]);
  useEffect(() => {
    const known = items.map((item) => rowAt(item.index)).filter((row): row is SampleRow => row !== undefined);
    onRows(known);
  }, [first, pages, items[0]?.index, items.at(-1)?.index]);
  useEffect(() => {
    const at = items.find((item) => rowAt(item.index)?.sample_id === sample)?.index;
    if (at !== undefined) rows.scrollToIndex(at, { align: "auto" });
  }, [sample]);
  return (
    <div className="gl" ref={box} role="listbox" aria-label="Answers of all steps" tabIndex={0}>
      <div style={{ height: rows.getTotalSize(), position: "relative" }}>
        {items.map(({ index, start }) => {
          const row = rowAt(index);
          const style = { transform: `translateY(${start}px)` };
          if (!row) return <div key={index} className="ar f" style={style}>…</div>;
          const filled = level(row.reward, scaleOf(row.environment));
          return (
            <div
              key={`${row.attempt}/${row.sample_id}`}
              role="option"
              aria-selected={row.sample_id === sample}
              className={`ar${row.sample_id === sample ? " sel" : ""}${row.status === "kept" || row.status === "eval" ? "" : " x"}`}
              style={style}
              onClick={() => onSelect(row)}
              title={[row.sample_id, row.status, row.reason].filter(Boolean).join(", ")}
            >
              <span className="f r" title={row.eval_name ? `eval after ${row.step + 1} steps` : undefined}>{row.eval_name ? `◇${row.step + 1}` : count(row.step)}</span>
              <span className="sq"><i className={filled === null ? "none" : `l${filled}`} /></span>
              <span className="cut"><Plain text={row.prompt ? promptLine(row.prompt) : row.sample_id} /> <span className="f"><Plain text={row.completion ?? ""} /></span></span>
              <span className="r">{number(besideReward(row, sort))}</span>
              <span className="r">{number(row.reward, 2)}</span>
              <span className="s cut">{row.eval_name ?? fate({ ...row, reward_mean: row.reward }, scaleOf(row.environment))}</span>
            </div>
          );
        })}
      </div>
    </div>
  );
}
