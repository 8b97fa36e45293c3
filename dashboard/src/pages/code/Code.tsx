/** The code that a run started with: files, uncommitted changes, and what differs from another run's. */

import { useMemo } from "react";
import { runPath } from "../../api";
import { count } from "../../format";
import { Failure, Quiet } from "../../shell/Quiet";
import { neighbor } from "../../lists";
import { runOption, Select } from "../../shell/controls";
import { useKeys } from "../../shell/keys";
import { useVersion } from "../../state/live";
import { useResource } from "../../state/resource";
import { useRunId, useRuns } from "../../state/run";
import { useOpened } from "../../state/timing";
import { setParams, useOthers, useParam } from "../../state/url";
import type { Code as CodeState, CodeDifference, CodeFile } from "../../types";
import { hunkRows, parseGitDiff } from "./diff";
import { type Entry, Files } from "./Files";
import { CodeLines, DiffLines } from "./Lines";
import "./code.css";

/** Prefix of a file of the uncommitted changes in the address. */
const CHANGE = "@";

export function Code() {
  const run = useRunId();
  const others = useOthers();
  const [attempt] = useParam("attempt");
  const [against] = useParam("against", others[0] ?? "");
  const code = useResource<CodeState>(runPath(run, "code"), { attempt }, useVersion(run, "attempts"));
  const difference = useResource<CodeDifference>(against ? runPath(run, "code", "diff") : null, { against }, useOpened());
  if (code.error && !code.data) return <Failure error={code.error} />;
  if (!code.data) return null;
  if (code.data.attempt === null)
    return <Quiet title="The record has no code of this run." text="A run keeps its sources, its commit and its uncommitted changes at each start. Older versions did not, and a run whose folder was copied may lack them." />;
  return (
    <div className="page code-page">
      <h1 className="vh">Code</h1>
      <Toolbar run={run} code={code.data} against={against} difference={difference.data} />
      {against ? <Difference run={run} against={against} data={difference.data} error={difference.error} /> : <Sources run={run} code={code.data} />}
    </div>
  );
}

function Toolbar({ run, code, against, difference }: { run: string; code: CodeState; against: string; difference: CodeDifference | undefined }) {
  const rest = (useRuns().data?.runs ?? []).filter((other) => other.id !== run);
  const git = code.git as Record<string, string | boolean | null | undefined>;
  const commit = typeof git.commit === "string" ? git.commit.slice(0, 10) : null;
  return (
    <div className="toolbar">
      <span className="nb">
        <span className="d">Compare with </span>
        <Select label="Compare with" value={against} options={[["", "no other run"], ...rest.map(runOption)]} choose={(next) => setParams({ against: next, file: null, with: null })} />
      </span>
      {code.attempts.length > 1 && !against && (
        <span className="nb">
          <span className="d">Attempt </span>
          <Select label="Attempt" value={code.attempt ?? ""} options={code.attempts.map((number) => [number, String(number)])} choose={(next) => setParams({ attempt: next, file: null })} />
        </span>
      )}
      {against ? (
        <span className="d">
          {difference &&
            (difference.files.length === 0
              ? "The code of both runs is the same."
              : `${count(difference.files.length)} ${difference.files.length === 1 ? "file differs" : "files differ"}, ${count(difference.num_equal)} are the same`)}
        </span>
      ) : (
        <span className="d">
          {commit ? (
            <>
              commit <span className="m">{commit}</span>
              {git.branch ? ` on ${git.branch}` : ""}
              {git.dirty ? ", with uncommitted changes" : ", clean"}
            </>
          ) : (
            "no git checkout"
          )}
          {typeof git.remote === "string" ? `, ${git.remote}` : ""}
        </span>
      )}
      {!against && code.left_out.length > 0 && (
        <span className="f" title={code.left_out.join("\n")}>
          {count(code.left_out.length)} {code.left_out.length === 1 ? "file" : "files"} left out
        </span>
      )}
    </div>
  );
}

/** Returns a file below the part of the snapshot that it belongs to (`record.code_snapshot`). */
function placed(path: string): Entry {
  const [, part, rest] = /^(sources|telescope|environments\/\d+)\/(.*)$/.exec(path) ?? [path, "", path];
  const sections: Record<string, string> = { sources: "Checkout", telescope: "Installed package" };
  return { id: path, path: rest!, section: sections[part!] ?? (part ? "Folder of environments" : "Files") };
}

/** The chosen file of a list, and keys that go through it. */
function useChoice(entries: Entry[]): [string, (id: string) => void] {
  const [chosen, setChosen] = useParam("file", entries[0]?.id ?? "");
  const move = (by: number) => {
    const next = neighbor(entries, entries.findIndex((entry) => entry.id === chosen), by);
    if (next) setChosen(next.id, true);
  };
  useKeys("Code", [
    { keys: ["j"], does: "next file", run: () => move(1) },
    { keys: ["k"], does: "file before", run: () => move(-1) },
  ]);
  return [chosen, setChosen];
}

function Sources({ run, code }: { run: string; code: CodeState }) {
  const changes = useMemo(() => parseGitDiff(code.changes), [code.changes]);
  const entries = useMemo(
    () => [
      ...changes.map((file): Entry => ({ id: CHANGE + file.path, path: file.path, section: "Uncommitted changes", added: file.added, removed: file.removed })),
      ...code.files.map((file): Entry => ({ ...placed(file.path), size: file.size })),
    ],
    [changes, code.files],
  );
  const [chosen, choose] = useChoice(entries);
  const change = chosen.startsWith(CHANGE) ? changes.find((file) => CHANGE + file.path === chosen) : undefined;
  return (
    <div className="panes">
      <Files entries={entries} chosen={chosen} choose={choose} />
      {change ? <DiffLines path={change.path} rows={change.rows} /> : chosen.startsWith(CHANGE) ? <p className="none d">There is no such change.</p> : <File run={run} attempt={code.attempt!} path={chosen} />}
    </div>
  );
}

function File({ run, attempt, path }: { run: string; attempt: number; path: string }) {
  const { data, error } = useResource<CodeFile>(path ? runPath(run, "code", "file") : null, { attempt, path });
  if (error) return <p className="none w">{error.message}</p>;
  if (!data) return <div />;
  if (data.text === null) return <p className="none d">{count(data.size)} bytes that are no text, or too many to show.</p>;
  if (data.text === "") return <p className="none d">An empty file.</p>;
  return <CodeLines path={path} text={data.text} />;
}

function Difference({ run, against, data, error }: { run: string; against: string; data: CodeDifference | undefined; error: Error | null }) {
  const entries = useMemo(
    () =>
      (data?.files ?? []).map((file): Entry => ({
        ...placed(file.path),
        section: { added: "Only here", removed: "Only there" }[file.status] ?? "Changed",
        added: file.added ?? undefined,
        removed: file.removed ?? undefined,
      })),
    [data],
  );
  const order = ["Changed", "Only here", "Only there"];
  const sorted = useMemo(() => [...entries].sort((a, b) => order.indexOf(a.section) - order.indexOf(b.section)), [entries]);
  const [chosen, choose] = useChoice(sorted);
  const known = data?.files.find((file) => file.path === chosen);
  const alone = useResource<CodeDifference>(known && known.diff === null ? runPath(run, "code", "diff") : null, { against, path: chosen }).data?.files[0];
  const diff = known?.diff ?? alone?.diff ?? null;
  const rows = useMemo(() => (diff === null ? [] : hunkRows(diff)), [diff]);
  if (error) return <Quiet title="The code cannot be compared." text={error.message} />;
  if (!data || data.files.length === 0) return null;
  return (
    <div className="panes">
      <Files entries={sorted} chosen={chosen} choose={choose} />
      {diff !== null ? <DiffLines path={chosen} rows={rows} /> : known && alone ? <p className="none d">This file is no text, or has too many lines to compare.</p> : <div />}
    </div>
  );
}

