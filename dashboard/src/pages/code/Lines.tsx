/** Lines of code or of a diff, of any number: only those in view are drawn. */

import { useVirtualizer } from "@tanstack/react-virtual";
import { useMemo, useRef } from "react";
import { Plain } from "../../text/SafeText";
import type { DiffRow } from "./diff";
import { languageOf, lines, type Piece } from "./highlight";

const LINE = 18;
/** Longer code is shown without colors. */
const LONGEST = 300_000;

interface Row {
  kind: DiffRow["kind"];
  numbers: (number | null)[];
  pieces: Piece[];
}

function Rows({ rows, label }: { rows: Row[]; label: string }) {
  const host = useRef<HTMLDivElement>(null);
  const virtual = useVirtualizer({ count: rows.length, getScrollElement: () => host.current, estimateSize: () => LINE, overscan: 30 });
  const widest = useMemo(() => rows.reduce((most, row) => Math.max(most, row.pieces.reduce((sum, piece) => sum + piece.text.length, 0)), 0), [rows]);
  const digits = String(rows.reduce((most, row) => Math.max(most, ...row.numbers.map((number) => number ?? 0)), 0)).length;
  const columns = rows[0]?.numbers.length ?? 1;
  return (
    <div className="lines" ref={host} tabIndex={0} role="region" aria-label={label}>
      <div style={{ height: virtual.getTotalSize(), minWidth: `calc(${widest + columns * (digits + 2) + 4}ch + 24px)` }}>
        {virtual.getVirtualItems().map((item) => {
          const row = rows[item.index]!;
          return (
            <div key={item.index} className={`line ${row.kind}`} style={{ transform: `translateY(${item.start}px)` }}>
              {row.numbers.map((number, i) => (
                <i key={i} style={{ width: `${digits + 1}ch` }}>
                  {number}
                </i>
              ))}
              {columns > 1 && <u>{row.kind === "added" ? "+" : row.kind === "removed" ? "−" : " "}</u>}
              {row.pieces.map((piece, i) => (
                <span key={i} className={piece.className || undefined}>
                  <Plain text={piece.text} />
                </span>
              ))}
            </div>
          );
        })}
      </div>
    </div>
  );
}

export function CodeLines({ path, text }: { path: string; text: string }) {
  const rows = useMemo(
    () => lines(text.replace(/\n$/, ""), text.length > LONGEST ? "" : languageOf(path)).map((pieces, i): Row => ({ kind: "same", numbers: [i + 1], pieces })),
    [path, text],
  );
  return <Rows rows={rows} label={path} />;
}

export function DiffLines({ path, rows }: { path: string; rows: DiffRow[] }) {
  const shown = useMemo(() => {
    const language = rows.reduce((sum, row) => sum + row.text.length, 0) > LONGEST ? "" : languageOf(path);
    // Each side is colored as a whole, so that a string over several lines has one color; equal lines take those of the new side.
    const side = (other: DiffRow["kind"]) => {
      const of = rows.filter((row) => row.kind === "same" || row.kind === other);
      const colored = lines(of.map((row) => row.text).join("\n"), language);
      return new Map(of.map((row, i) => [row, colored[i]!]));
    };
    const [before, after] = [side("removed"), side("added")];
    return rows.map((row): Row => ({ kind: row.kind, numbers: [row.old, row.new], pieces: after.get(row) ?? before.get(row) ?? [{ text: row.text, className: "" }] }));
  }, [path, rows]);
  return <Rows rows={shown} label={`Changes of ${path}`} />;
}
