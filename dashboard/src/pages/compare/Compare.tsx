/** Config and code of two runs or more: what differs from the first one, and what is equal on request. */

import type { ReactNode } from "react";
import { moment, NONE, setting } from "../../format";
import { toggled } from "../../lists";
import { Segments } from "../../shell/controls";
import { Failure, Quiet } from "../../shell/Quiet";
import { type Column, Table } from "../../shell/Table";
import { useResource } from "../../state/resource";
import { useRunId, useRuns } from "../../state/run";
import { comparedRows } from "../../state/settings";
import { useRunColors } from "../../state/colors";
import { useOpened } from "../../state/timing";
import { elsewhere, format, setOthers, useOthers, useParam, usePlace, useSearchText } from "../../state/url";
import type { Comparison, Start } from "../../types";
import { visible } from "../../text/hostile";
import "../code/code.css";

export function Compare() {
  const run = useRunId();
  const others = useOthers();
  const ids = [run, ...others];
  const [all] = useParam("equal");
  const { data, error } = useResource<Comparison>(others.length ? "/api/compare" : null, { runs: ids, equal: all === "1" || null }, useOpened());
  if (others.length === 0) return <Quiet title="Compare with which run?" text="Choose other runs with Compare in the header; their config and code stand here side by side." />;
  if (error && !data) return <Failure error={error} />;
  if (!data) return null;
  return <Loaded data={data} all={all === "1"} />;
}

interface Row {
  name: string;
  values: ReactNode[];
  mono?: boolean;
  /** The title of the rows below it. */
  isPart?: boolean;
}

function Loaded({ data, all }: { data: Comparison; all: boolean }) {
  const place = usePlace();
  const others = useOthers();
  const listed = useRuns().data?.runs ?? [];
  const [search] = useParam("search");
  const [text, setText] = useSearchText();
  const [, setAll] = useParam("equal");
  const colors = useRunColors();
  const ids = data.runs;
  const settings = data.config
    .filter((row) => row.key.toLowerCase().includes(search.trim().toLowerCase()))
    .sort((a, b) => Number(a.bookkeeping) - Number(b.bookkeeping) || a.key.localeCompare(b.key))
    .flatMap((row) => comparedRows(row.key, row.values, all))
    .map(([name, values]): Row => ({ name, values: values.map(setting), mono: true }));
  const nameOf = (id: string) => visible(listed.find((row) => row.id === id)?.name ?? id);
  const rows: Row[] = [
    ...settings,
    ...(settings.length === 0 ? [{ name: search ? "No setting has this name." : "Nothing differs.", values: [] }] : []),
    { name: "Code and machine, newest attempt", isPart: true, values: ids.map((id, i) => i > 0 && <a className="link" href={format(elsewhere(place, { run: id, page: "code" }, { against: ids[0]! }))}>compare files</a>) },
    ...codeRows(data.attempts).filter((row) => all || row.values.some((value) => value !== row.values[0])),
  ];
  const columns: Column<Row>[] = [
    { head: "setting", cell: ({ name, mono }) => <span className={mono ? "m" : undefined}>{visible(name)}</span> },
    ...ids.map((id, i): Column<Row> => ({
      head: (
        <>
          <i className="dot" style={{ background: `var(${colors.of(id)})` }} />
          <a href={format(elsewhere(place, { run: id, page: "overview" }))} title={id}>
            <b>{nameOf(id)}</b> <span className="f">{nameOf(id) === id ? "" : id}</span>
          </a>
          {i > 0 && <button className="f" aria-label={`Take ${nameOf(id)} away`} title="Take away" onClick={() => setOthers(toggled(others, id))}>×</button>}
        </>
      ),
      cell: ({ values, mono, isPart }) => {
        if (isPart) return values[i];
        const [differs, equal] = [values[i] !== values[0], values.every((value) => value === values[0])];
        return <span className={`${mono ? "m" : ""} ${equal || (i > 0 && !differs) ? "f" : ""}`}>{differs ? <b>{values[i]}</b> : values[i]}</span>;
      },
    })),
  ];
  return (
    <div className="page compare">
      <h1 className="vh">Compare config and code</h1>
      <div className="toolbar">
        <input className="field" type="search" placeholder="Filter settings" aria-label="Filter settings" value={text} onChange={(event) => setText(event.target.value)} />
        <span className="d">
          {data.num_differing === 0 ? "The configs are equal." : `${data.num_differing} ${data.num_differing === 1 ? "setting differs" : "settings differ"}`}
        </span>
        <Segments label="Settings" value={all} options={[[false, "Differences"], [true, "Everything"]]} choose={(next) => setAll(next ? "1" : null)} />
      </div>
      <div className="scroll">
        <Table rows={rows} columns={columns} keyOf={(row) => row.name} row={(row) => ({ className: row.isPart ? "part" : undefined })} />
      </div>
    </div>
  );
}

function codeRows(starts: Start[]): Row[] {
  const keys = (of: (start: Start) => Record<string, string>) => [...new Set(starts.flatMap((start) => Object.keys(of(start))))];
  const row = (name: string, value: (start: Start) => string): Row => ({ name, values: starts.map(value) });
  return [
    row("started", (start) => moment(start.started_at)),
    row("commit", (start) => (start.git_commit ? `${start.git_commit.slice(0, 10)}${start.git_dirty === null ? "" : start.git_dirty ? ", changed" : ", clean"}` : NONE)),
    row("host", (start) => start.host ?? NONE),
    ...keys((start) => start.versions).map((name) => row(name, (start) => start.versions[name] ?? NONE)),
    ...keys((start) => start.topology).map((name) => row(name, (start) => start.topology[name] ?? NONE)),
  ];
}
