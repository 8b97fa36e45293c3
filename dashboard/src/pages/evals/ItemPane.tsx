/** The chosen item with its answers before and after, and all items as a list. */

import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useMemo, useRef } from "react";
import { count, number, resultFormat } from "../../format";
import { usePlace } from "../../state/url";
import type { EvalRow } from "../../types";
import { inLine } from "../rollouts/conversation";
import { answerAddress } from "../rollouts/select";
import { Plain } from "../../text/SafeText";
import { type Answered, type Block, blocksOf, isRight, type Item } from "./items";

interface ItemPaneProps {
  items: Item[];
  /** Why there are no items. */
  why: string;
  current?: Item;
  before?: EvalRow;
  after?: EvalRow;
  choose: (item: Item) => void;
}

const NAMES: Record<Block, string> = { lost: "Lost", gained: "Gained", right: "Right twice", wrong: "Wrong twice" };
const CUT = 1200;
const MOST_ANSWERS = 8;

type Row = { block: Block; number: number } | { item: Item };

export function ItemPane({ items, why, current, before, after, choose }: ItemPaneProps) {
  const list = useRef<HTMLDivElement>(null);
  const rows = useMemo(() => blocksOf(items).flatMap(({ block, items: own }): Row[] => (own.length ? [{ block, number: own.length }, ...own.map((item) => ({ item }))] : [])), [items]);
  const virtual = useVirtualizer({ count: rows.length, getScrollElement: () => list.current, estimateSize: (i) => ("block" in rows[i]! ? 28 : 20), overscan: 15 });
  useEffect(() => {
    const at = rows.findIndex((row) => "item" in row && row.item === current);
    if (at >= 0) virtual.scrollToIndex(at, { align: "auto" });
  }, [current, rows]);
  if (!before || !after) return <aside className="third" />;
  if (items.length === 0 || !current)
    return (
      <aside className="third" aria-label="Items">
        <p className="sec f">{why}</p>
      </aside>
    );
  return (
    <aside className="third" aria-label="Items">
      <section className="sec">
        <h2>
          <span className="cut name" title={current.prompt}>
            <Plain text={inLine(current.prompt).slice(0, 200)} />
          </span>
          <span>item {current.item}</span>
        </h2>
        <div className={`pair ${isShort(current) ? "" : "stacked"}`}>
          <Answers row={before} answered={current.before} />
          <Answers row={after} answered={current.after} />
        </div>
      </section>
      <div className="ft" ref={list} tabIndex={0} aria-label="Items">
        <div style={{ height: virtual.getTotalSize(), position: "relative" }}>
          {virtual.getVirtualItems().map(({ index, start }) => {
            const row = rows[index]!;
            const style = { transform: `translateY(${start}px)` };
            if ("block" in row)
              return (
                <div key={row.block} className="fr hd" style={style}>
                  <b>
                    {NAMES[row.block]}, {count(row.number)}
                  </b>
                  <span className="s f">{before.version} steps</span>
                  <span className="s f">{after.version} steps</span>
                </div>
              );
            const { item } = row;
            return (
              <button key={item.item} className={`fr ${item === current ? "sel" : ""}`} aria-pressed={item === current} style={style} onClick={() => choose(item)}>
                <span className="cut">
                  <Plain text={inLine(item.prompt).slice(0, 80)} />
                </span>
                <Short row={before} answered={item.before} />
                <Short row={after} answered={item.after} />
              </button>
            );
          })}
        </div>
      </div>
    </aside>
  );
}

/** An answer without its thinking and the marks of its template. Thinking without an end is all there is. */
const clean = (text: string): string => text.replace(/^[\s\S]*<\/think>/, "").replace(/<\|[a-z_]+\|>/g, "").replace(/<\/?(answer|think)>/g, "").trim();

/** Longest answer that fits half of the pane. */
const SHORT = 24;

const isShort = ({ before, after }: Item): boolean => [before, after].every(({ answers }) => answers.every(({ answer }) => clean(answer).length <= SHORT));

function Short({ row, answered }: { row: EvalRow; answered: Answered }) {
  const text = clean(answered.answers[0]?.answer ?? "");
  const { isShare, value } = resultFormat(row.metric);
  return (
    <span className={`m cut ${isRight(answered) ? "" : "f"}`}>
      {answered.answers.length > 1 ? `${value(answered.score, isShare ? 0 : 3)}${isShare ? ` of ${answered.answers.length}` : ""}` : <Plain text={text.slice(-60) || "(empty)"} />}
    </span>
  );
}

function Answers({ row, answered }: { row: EvalRow; answered: Answered }) {
  const place = usePlace();
  const { isShare } = resultFormat(row.metric);
  return (
    <div>
      <div className="s f">{row.version} steps</div>
      {answered.answers.slice(0, MOST_ANSWERS).map((answer) => (
        <div key={answer.sample_id}>
          <div className="m text">
            <Plain text={clean(answer.answer).slice(0, CUT) || "(empty)"} />
          </div>
          <div className="d">
            {answer.score === null ? "failed, counts as wrong" : !isShare || (answer.score > 0 && answer.score < 1) ? number(answer.score) : answer.score > 0 ? <b>right</b> : "wrong"}{" "}
            <a className="link" href={answerAddress(place, { ...answer, step: row.step, eval_name: row.eval_name })}>
              open
            </a>
          </div>
        </div>
      ))}
      {answered.answers.length > MOST_ANSWERS && <p className="f s">{count(answered.answers.length - MOST_ANSWERS)} more answers</p>}
    </div>
  );
}
