/** The row over the lists: counts for the current search by status, environment, reward, tags and more; ranges; export. */

import { useId, useRef, useState } from "react";
import { address } from "../../api";
import { count } from "../../format";
import { toggled } from "../../lists";
import { Select } from "../../shell/controls";
import { formatList, parseList, setParams, usePlace, useRange } from "../../state/url";
import { FACETS, formatRange, MOST_EXPORTED, NUMBERS, type NumberRange, parseRange, problemOf, queryOf, rangeWords } from "./filters";
import type { Samples } from "../../types";
import { visible } from "../../text/hostile";

const TAG = "tag:";
const MOST_SHOWN = 8;

/** Counts for the current search. A click filters; a facet with nothing stays, dim. */
export function Facets({ counts, total }: { counts: Samples["facets"]; total: number }) {
  const { params } = usePlace();
  const values = (text: string | undefined) => (text ?? "").split(",").filter(Boolean);
  const tags = parseList(params.tags);
  const known = FACETS.map(([name, title]) => ({ name, title, chosen: values(params[name]), choose: (value: string) => ({ [name]: toggled(values(params[name]), value).join(",") }) }));
  const ofTags = Object.keys(counts)
    .filter((name) => name.startsWith(TAG))
    .map((name) => {
      const title = name.slice(TAG.length);
      const chosen = tags.filter((tag) => tag.startsWith(`${title}=`)).map((tag) => tag.slice(title.length + 1));
      return { name, title, chosen, choose: (value: string) => ({ tags: formatList(toggled(tags, `${title}=${value}`)) }) };
    });
  return [...known, ...ofTags].map(({ name, title, chosen, choose }) => {
    const entries = counts[name];
    if (!entries || entries.length === 0 || (entries.length === 1 && name !== "status" && chosen.length === 0)) return null;
    return (
      <dl key={name}>
        <dt>{visible(title)}</dt>
        {entries.slice(0, MOST_SHOWN).map((entry) => {
          const on = chosen.length === 0 || chosen.includes(entry.value);
          return (
            <dd key={entry.value} style={{ "--s": total ? entry.count / total : 0 } as React.CSSProperties}>
              <button
                role="checkbox"
                aria-checked={chosen.includes(entry.value)}
                className={`${on ? "" : "off"} ${entry.count ? "" : "zero"}`}
                onClick={() => setParams({ ...choose(entry.value), list: "answers" })}
              >
                {visible(entry.value)}
                <b>{count(entry.count)}</b>
              </button>
            </dd>
          );
        })}
      </dl>
    );
  });
}

/** Limits of numbers and metrics, after a form for another one. It stands first, because the end of the row may be cut. */
export function Ranges({ metrics }: { metrics: readonly string[] }) {
  const { params } = usePlace();
  const ranges = parseList(params.ranges);
  const change = (next: string[]) => setParams({ ranges: formatList(next), list: "answers" });
  return (
    <dl>
      <dt>Range</dt>
      <dd>
        <RangeForm metrics={metrics} add={(range) => change([...ranges, formatRange(range)])} />
      </dd>
      {ranges.map((text) => {
        const range = parseRange(text);
        return (
          <dd key={text}>
            <button title="Take this range away" onClick={() => change(ranges.filter((other) => other !== text))}>
              {visible(range ? rangeWords(range) : text)} ×
            </button>
          </dd>
        );
      })}
    </dl>
  );
}

function RangeForm({ metrics, add }: { metrics: readonly string[]; add: (range: NumberRange) => void }) {
  const id = useId();
  const form = useRef<HTMLFormElement>(null);
  const anchor = useRef<HTMLButtonElement>(null);
  const [range, setRange] = useState<NumberRange>({ name: NUMBERS[0]![0], low: "", high: "" });
  const [tried, setTried] = useState(false);
  const problem = problemOf(range);
  const submit = (event: React.FormEvent) => {
    event.preventDefault();
    setTried(true);
    if (problem) return;
    add(range);
    setRange({ ...range, low: "", high: "" });
    setTried(false);
    form.current?.hidePopover();
  };
  const place = () => {
    const box = anchor.current!.getBoundingClientRect();
    form.current!.style.top = `${box.bottom + 8}px`;
    form.current!.style.left = `${Math.max(8, Math.min(box.left, innerWidth - form.current!.offsetWidth - 8))}px`;
  };
  const end = (name: "low" | "high", label: string) => (
    <input className="field" inputMode="decimal" aria-label={label} placeholder={label} value={range[name]} onChange={(event) => setRange({ ...range, [name]: event.target.value })} />
  );
  return (
    <>
      <button ref={anchor} popoverTarget={id} className="d">
        add
      </button>
      <form ref={form} id={id} popover="auto" className="rangeform" aria-label="Range of a number" onSubmit={submit} onToggle={(event) => event.newState === "open" && place()}>
        <Select label="Number" value={range.name} options={[...NUMBERS, ...metrics.map((name) => [name, name] as const)]} choose={(name) => setRange({ ...range, name })} />
        {end("low", "from")}
        {end("high", "to")}
        <button className="btn">Add</button>
        {tried && problem && <p className="w">{problem}</p>}
      </form>
    </>
  );
}

/** A link that saves the selection as JSONL, and says how much of it. */
export function Export({ path, total }: { path: string; total: number }) {
  const { params } = usePlace();
  const [range] = useRange();
  if (total === 0) return null;
  const part = total > MOST_EXPORTED ? `the first ${count(MOST_EXPORTED)} of ${count(total)} answers` : total === 1 ? "1 answer" : `${count(total)} answers`;
  return (
    <a className="link" href={address(`${path}.jsonl`, queryOf(params, range))} download title={`Save ${part} with prompts, texts, metrics and tags, a line of JSON each`}>
      {total > MOST_EXPORTED ? `JSONL, first ${count(MOST_EXPORTED)}` : "JSONL"}
    </a>
  );
}
