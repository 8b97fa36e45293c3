import { useVirtualizer } from "@tanstack/react-virtual";
import { range } from "d3-array";
import { useEffect, useRef } from "react";
import { address, type Query } from "../../api";
import { count, number } from "../../format";
import { inLine } from "./conversation";
import { useResources } from "../../state/resource";
import { Plain } from "../../text/SafeText";
import { fate, type Filling, level, METRIC, type RewardScale, squareValue } from "./squares";
import type { SampleRow, Samples, Value } from "../../types";
import { visible } from "../../text/hostile";

const ROW = 20;
/** Height of a search hit: one line for its numbers, one for the text around the match. */
const HIT = 42;
/** Two screens of rows: a new filter waits for the first page. */
export const PAGE_ROWS = 50;

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

/** Orders by a metric of the environment. */
export const metricSorts = (name: string): [value: string, title: string][] => [
  [`-${METRIC}${name}`, `highest ${name}`],
  [`${METRIC}${name}`, `lowest ${name}`],
];

/** Returns what a list in this order shows beside the reward: its title, and the number of an answer. */
function beside(sort: string): { title: string; of: (row: SampleRow) => Value } {
  const column = sort.replace(/^-/, "");
  const metric = column.startsWith(METRIC) ? column.slice(METRIC.length) : null;
  if (metric !== null) return { title: metric, of: (row) => row.metrics[metric] ?? null };
  return column === "advantage" || column === "age" ? { title: column, of: (row) => row[column] } : { title: "tokens", of: (row) => row.completion_tokens };
}

/** Characters before a match that the server sends. */
const BEFORE_MATCH = 24;

/** Returns the text around a match as one line that starts at the beginning of a word. */
function snippetLine(text: string, search: string): string {
  const isCut = text.toLowerCase().indexOf(search.toLowerCase()) >= BEFORE_MATCH;
  return (isCut ? text.replace(/^\S{0,12}\s/, "… ") : text).replace(/\s+/g, " ");
}

interface AnswerListProps {
  path: string;
  query: Query;
  version: string;
  first: Samples | undefined;
  sort: string;
  search: string;
  sample: string;
  scaleOf: (environment: string) => RewardScale;
  filling: Filling;
  onSelect: (row: SampleRow) => void;
  onRows: (rows: SampleRow[]) => void;
}

/** Answers of all steps, in pages that are read when they come into view. */
export function AnswerList({ path, query, version, first, sort, search, sample, scaleOf, filling, onSelect, onRows }: AnswerListProps) {
  const box = useRef<HTMLDivElement>(null);
  const key = JSON.stringify(query);
  const other = beside(sort);
  const total = first?.total ?? 0;
  const height = search ? HIT : ROW;
  const rows = useVirtualizer({ count: total, getScrollElement: () => box.current, estimateSize: () => height, overscan: 8 });
  useEffect(() => rows.measure(), [height]);
  useEffect(() => void box.current?.scrollTo(0, 0), [key]); // which returns a promise in newer browsers
  const items = rows.getVirtualItems();
  const pageOf = (index: number | undefined) => Math.floor((index ?? 0) / PAGE_ROWS);
  const pages = range(Math.max(1, pageOf(items[0]?.index)), pageOf(items.at(-1)?.index) + 1);
  const read = useResources<Samples>(pages.map((page) => address(path, { ...query, offset: page * PAGE_ROWS, limit: PAGE_ROWS, facets: false })), pages.map(() => version));
  const rowAt = (index: number): SampleRow | undefined => (index < PAGE_ROWS ? first : read[pages.indexOf(pageOf(index))]?.data)?.rows[index % PAGE_ROWS];
  useEffect(() => void onRows(items.flatMap((item) => rowAt(item.index) ?? [])));
  useEffect(() => {
    const at = items.find((item) => rowAt(item.index)?.sample_id === sample)?.index;
    // At the top, the first row is in view: a new filter need not wait for the layout.
    if (at !== undefined && (at > 0 || rows.scrollOffset)) rows.scrollToIndex(at, { align: "auto" });
  }, [sample]);
  return (
    <>
      {total > 0 && !search && (
        <div className="ar head s f" aria-hidden="true">
          <span className="r">step</span>
          <span />
          <span className="cut">prompt, answer</span>
          <span className="r cut">{visible(other.title)}</span>
          <span className="r cut">reward</span>
          <span>status</span>
        </div>
      )}
      {!first && <p className="none d" role="status">{search ? "Searching all texts of the run." : "Reading the answers."}</p>}
      {first && total === 0 && <p className="none d">{search ? `No answer, prompt, tool call or note has “${search}” and passes the filters.` : "No answer passes the filters."}</p>}
      <div className="gl" ref={box} role="listbox" aria-label="Answers of all steps" tabIndex={0}>
        <div style={{ height: rows.getTotalSize(), position: "relative" }}>
          {items.map(({ index, start }) => {
            const row = rowAt(index);
            const style = { transform: `translateY(${start}px)` };
            if (!row) return <div key={index} className="ar f" style={style}>…</div>;
            const filled = level(squareValue(row, filling.by), filling.scaleOf(row.environment));
            const square = <span className="sq"><i className={filled === null ? "none" : `l${filled}`} /></span>;
            const why = row.eval_name ? `eval ${visible(row.eval_name)}` : fate({ ...row, reward_mean: row.reward }, scaleOf(row.environment));
            const step = row.eval_name ? `◇${row.step + 1}` : count(row.step);
            const common = {
              role: "option",
              "aria-selected": row.sample_id === sample,
              style,
              onClick: () => onSelect(row),
              title: visible([row.sample_id, row.status, row.reason].filter(Boolean).join(", ")),
            };
            const look = `${row.sample_id === sample ? " sel" : ""}${row.status === "kept" || row.status === "eval" ? "" : " x"}`;
            if (search) {
              return (
                <div key={index} className={`hit${look}`} {...common}>
                  <span className="s">
                    {square} <span className="cut">step {step}, <Plain text={row.environment} /></span> <span className="f cut">{why}</span> <span className="r">reward {number(row.reward, 2)}</span>
                  </span>
                  <span className="cut"><Plain text={snippetLine(row.snippet ?? row.completion ?? "", search)} search={search} /></span>
                </div>
              );
            }
            return (
              <div key={index} className={`ar${look}`} {...common}>
                <span className="f r" title={row.eval_name ? `eval after ${row.step + 1} steps` : undefined}>{step}</span>
                {square}
                <span className="cut"><Plain text={row.prompt ? inLine(row.prompt) : row.sample_id} /> <span className="f"><Plain text={row.completion ?? ""} /></span></span>
                <span className="r">{number(other.of(row))}</span>
                <span className="r">{number(row.reward, 2)}</span>
                <span className="s cut">{why}</span>
              </div>
            );
          })}
        </div>
      </div>
    </>
  );
}
