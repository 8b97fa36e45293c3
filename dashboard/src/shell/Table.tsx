/** Tables, whose columns say what they show of each row, and lists of names with their values. */

import type { HTMLAttributes, Key, ReactNode } from "react";
import { visible } from "../text/hostile";

export interface Column<T> {
  head?: ReactNode;
  /** Explains the head. */
  hint?: string;
  /** Of the head and of all cells. */
  className?: string;
  cell: (row: T) => ReactNode;
  title?: (row: T) => string | undefined;
}

interface TableProps<T> extends Omit<HTMLAttributes<HTMLTableElement>, "rows"> {
  rows: readonly T[];
  columns: readonly Column<T>[];
  keyOf: (row: T) => Key;
  /** Attributes of a row. */
  row?: (row: T) => HTMLAttributes<HTMLTableRowElement>;
}

export function Table<T>({ rows, columns, keyOf, row, children, ...table }: TableProps<T>) {
  const heads = columns.map(({ head, hint, className }, i) => <th key={i} className={className} title={hint}>{head}</th>);
  return (
    <table {...table}>
      {children}
      {columns.some(({ head }) => head !== undefined) && <thead><tr>{heads}</tr></thead>}
      <tbody>
        {rows.map((one) => (
          <tr key={keyOf(one)} {...row?.(one)}>
            {columns.map(({ className, cell, title }, i) => <td key={i} className={className} title={title?.(one)}>{cell(one)}</td>)}
          </tr>
        ))}
      </tbody>
    </table>
  );
}

export type Row = [string, ReactNode];

/** Names with their values, a line each. */
export function Rows({ rows }: { rows: readonly Row[] }) {
  return (
    <dl className="kv">
      {rows.map(([name, value]) => (
        <div key={name}>
          <dt className="cut" title={visible(name)}>{visible(name)}</dt>
          <dd>{typeof value === "string" ? visible(value) : value}</dd>
        </div>
      ))}
    </dl>
  );
}

interface FactsProps {
  title: ReactNode;
  /** Beside the title. */
  note?: ReactNode;
  rows: readonly Row[];
  /** Between the title and the rows. */
  children?: ReactNode;
  after?: ReactNode;
}

/** A section of a side pane. */
export function Facts({ title, note, rows, children, after }: FactsProps) {
  return (
    <section className="sec">
      <h2>{title}{note !== undefined && <> <span>{note}</span></>}</h2>
      {children}
      <Rows rows={rows} />
      {after}
    </section>
  );
}
