/** Config and code of two runs or more: what differs, and what is equal on request. */

import { useMemo } from "react";
import { moment, NONE, setting } from "../format";
import { Failure, Quiet } from "../shell/App";
import { useResource } from "../state/resource";
import { useRunId, useRunInfo, useRuns } from "../state/run";
import { runColor } from "../state/theme";
import { useOthers, useParam } from "../state/url";
import type { Comparison, RunInfo } from "../types";
import "./compare.css";

export function Compare() {
  const run = useRunId();
  const others = useOthers();
  const ids = [run, ...others];
  const { data, error } = useResource<Comparison>(others.length ? "/api/compare" : null, { runs: ids.join(",") });
  if (others.length === 0) return <Quiet title="Compare with which run?" text="Choose other runs with Compare in the header; their config and code stand here side by side." />;
  if (error && !data) return <Failure error={error} />;
  if (!data) return null;
  return <Loaded ids={ids} data={data} />;
}

function Loaded({ ids, data }: { ids: string[]; data: Comparison }) {
  const listed = useRuns().data?.runs ?? [];
  const [search, setSearch] = useParam("search");
  const [all, setAll] = useParam("equal");
  const infos = [useRunInfo(ids[0] ?? null), useRunInfo(ids[1] ?? null), useRunInfo(ids[2] ?? null), useRunInfo(ids[3] ?? null), useRunInfo(ids[4] ?? null), useRunInfo(ids[5] ?? null)]
    .slice(0, ids.length)
    .map((one) => one.data);
  const rows = useMemo(() => {
    const differing = data.config.map((row) => ({ ...row, equal: false }));
    if (!all) return differing;
    const known = new Set(data.config.map((row) => row.key.split(".")[0]));
    const equal = Object.entries(infos[0]?.config ?? {})
      .filter(([key]) => !known.has(key))
      .map(([key, value]) => ({ key, values: ids.map(() => value), equal: true }));
    return [...differing, ...equal].sort((a, b) => a.key.localeCompare(b.key));
  }, [data, all, ids.join(), ...infos]);
  const shown = rows.filter((row) => row.key.includes(search.trim()));
  return (
    <div className="compare">
      <h1 className="vh">Compare config and code</h1>
      <div className="toolbar">
        <input className="field" type="search" placeholder="Filter settings" aria-label="Filter settings" value={search} onChange={(event) => setSearch(event.target.value, true)} />
        <span className="d">
          {data.config.length === 0 ? "The configs are equal." : `${data.config.length} ${data.config.length === 1 ? "setting differs" : "settings differ"}`}
        </span>
        <span className="seg">
          <button aria-pressed={!all} onClick={() => setAll(null)}>
            Differences
          </button>
          <button aria-pressed={all === "1"} onClick={() => setAll("1")}>
            Everything
          </button>
        </span>
      </div>
      <div className="scroll">
        <table>
          <thead>
            <tr>
              <th>setting</th>
              {ids.map((id, i) => (
                <th key={id}>
                  <i className="dot" style={{ background: `var(${runColor(i)})` }} />
                  <b>{listed.find((row) => row.id === id)?.name ?? id}</b> <span className="f">{id}</span>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {shown.map((row) => (
              <tr key={row.key}>
                <td className="m">{row.key}</td>
                {row.values.map((value, i) => (
                  <td key={i} className={`m ${row.equal || setting(value) === setting(row.values[0]) ? "f" : ""}`}>
                    {i > 0 && !row.equal && setting(value) !== setting(row.values[0]) ? <b>{setting(value)}</b> : setting(value)}
                  </td>
                ))}
              </tr>
            ))}
            {shown.length === 0 && (
              <tr>
                <td className="f">{search ? "No setting has this name." : "Nothing differs."}</td>
              </tr>
            )}
            <tr className="part">
              <td colSpan={ids.length + 1}>Code and machine, newest attempt</td>
            </tr>
            {codeRows(infos).map((row) => (
              <tr key={row.name}>
                <td>{row.name}</td>
                {row.values.map((value, i) => (
                  <td key={i} className={value === row.values[0] ? (i > 0 ? "f" : "") : ""}>
                    {i > 0 && value !== row.values[0] ? <b>{value}</b> : value}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </div>
  );
}

function codeRows(infos: (RunInfo | undefined)[]): { name: string; values: string[] }[] {
  const newest = infos.map((info) => info?.attempts.at(-1));
  const versions = [...new Set(newest.flatMap((attempt) => Object.keys(attempt?.versions ?? {})))];
  const topology = [...new Set(newest.flatMap((attempt) => Object.keys(attempt?.topology ?? {})))];
  return [
    { name: "started", values: newest.map((attempt) => moment(attempt?.started_at)) },
    { name: "commit", values: newest.map((attempt) => (attempt?.git_commit ? `${attempt.git_commit.slice(0, 10)}${attempt.git_dirty ? ", changed" : ", clean"}` : NONE)) },
    { name: "host", values: newest.map((attempt) => attempt?.host ?? NONE) },
    ...versions.map((name) => ({ name, values: newest.map((attempt) => attempt?.versions[name] ?? NONE) })),
    ...topology.map((name) => ({ name, values: newest.map((attempt) => attempt?.topology[name] ?? NONE) })),
  ];
}
