/** Config and code of two runs or more: what differs from the first one, and what is equal on request. */

import { moment, NONE, setting } from "../../format";
import { toggled } from "../../lists";
import { Segments } from "../../shell/controls";
import { Failure, Quiet } from "../../shell/Quiet";
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
  values: string[];
  mono: boolean;
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
  return (
    <div className="compare">
      <h1 className="vh">Compare config and code</h1>
      <div className="toolbar">
        <input className="field" type="search" placeholder="Filter settings" aria-label="Filter settings" value={text} onChange={(event) => setText(event.target.value)} />
        <span className="d">
          {data.num_differing === 0 ? "The configs are equal." : `${data.num_differing} ${data.num_differing === 1 ? "setting differs" : "settings differ"}`}
        </span>
        <Segments label="Settings" value={all} options={[[false, "Differences"], [true, "Everything"]]} choose={(next) => setAll(next ? "1" : null)} />
      </div>
      <div className="scroll">
        <table>
          <thead>
            <tr>
              <th>setting</th>
              {ids.map((id, i) => (
                <th key={id}>
                  <i className="dot" style={{ background: `var(${colors.of(id)})` }} />
                  <a href={format(elsewhere(place, { run: id, page: "overview" }))} title={id}>
                    <b>{nameOf(id)}</b> <span className="f">{nameOf(id) === id ? "" : id}</span>
                  </a>
                  {i > 0 && (
                    <button className="f" aria-label={`Take ${nameOf(id)} away`} title="Take away" onClick={() => setOthers(toggled(others, id))}>
                      ×
                    </button>
                  )}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {settings.map((row) => (
              <Values key={row.name} row={row} />
            ))}
            {settings.length === 0 && (
              <tr>
                <td className="f">{search ? "No setting has this name." : "Nothing differs."}</td>
              </tr>
            )}
            <tr className="part">
              <td>Code and machine, newest attempt</td>
              {ids.map((id, i) => (
                <td key={id}>
                  {i > 0 && (
                    <a className="link" href={format(elsewhere(place, { run: id, page: "code" }, { against: ids[0]! }))}>
                      compare files
                    </a>
                  )}
                </td>
              ))}
            </tr>
            {codeRows(data.attempts)
              .filter((row) => all || row.values.some((value) => value !== row.values[0]))
              .map((row) => (
                <Values key={row.name} row={row} />
              ))}
          </tbody>
        </table>
      </div>
    </div>
  );
}

function Values({ row }: { row: Row }) {
  const equal = row.values.every((value) => value === row.values[0]);
  return (
    <tr>
      <td className={row.mono ? "m" : undefined}>{visible(row.name)}</td>
      {row.values.map((value, i) => {
        const differs = value !== row.values[0];
        return (
          <td key={i} className={`${row.mono ? "m" : ""} ${equal || (i > 0 && !differs) ? "f" : ""}`}>
            {differs ? <b>{value}</b> : value}
          </td>
        );
      })}
    </tr>
  );
}

function codeRows(starts: Start[]): Row[] {
  const keys = (of: (start: Start) => Record<string, string>) => [...new Set(starts.flatMap((start) => Object.keys(of(start))))];
  const row = (name: string, value: (start: Start) => string): Row => ({ name, values: starts.map(value), mono: false });
  return [
    row("started", (start) => moment(start.started_at)),
    row("commit", (start) => (start.git_commit ? `${start.git_commit.slice(0, 10)}${start.git_dirty === null ? "" : start.git_dirty ? ", changed" : ", clean"}` : NONE)),
    row("host", (start) => start.host ?? NONE),
    ...keys((start) => start.versions).map((name) => row(name, (start) => start.versions[name] ?? NONE)),
    ...keys((start) => start.topology).map((name) => row(name, (start) => start.topology[name] ?? NONE)),
  ];
}
