/** Samples that are being generated, by group: how long, and with how old weights. */

import { useEffect, useMemo, useState } from "react";
import { runPath } from "../../api";
import { count, duration, number } from "../../format";
import { useVersion } from "../../state/live";
import { useResource } from "../../state/resource";
import type { InFlight as Row } from "../../types";
import { flightGroups } from "./flight";
import { visible } from "../../text/hostile";

const TICK_MS = 1000;

/** `version` is the newest policy version, `size` the samples of a group where the config says so. */
export function InFlight({ run, version, size }: { run: string; version: number | null; size: number | null }) {
  const { data: rows, error } = useResource<Row[]>(runPath(run, "in_flight"), {}, useVersion(run, "in_flight"));
  const [now, setNow] = useState(() => Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now() / 1000), TICK_MS);
    return () => clearInterval(timer);
  }, []);
  const groups = useMemo(() => flightGroups(rows ?? []), [rows]);
  if (error && !rows) return <p className="none w">{error.message}</p>;
  if (!rows) return null;
  if (rows.length === 0) return <p className="none d">No answer is being generated right now.</p>;
  return (
    <div className="gl flight">
      <table>
        <caption className="d">
          {count(rows.length)} {rows.length === 1 ? "answer" : "answers"} of {groups.length === 1 ? "1 group" : `${count(groups.length)} groups, longest first`}
        </caption>
        <thead>
          <tr>
            <th>group</th>
            <th>environment</th>
            <th>running</th>
            <th className="r">since</th>
            <th className="r">weights</th>
          </tr>
        </thead>
        <tbody>
          {groups.map((group) => (
            <tr key={`${group.attempt}/${group.id}`}>
              <td className="f">{number(group.id)}</td>
              <td className="cut">{visible(group.environment)}</td>
              <td title={group.running.map((index) => `answer ${index + 1}`).join(", ")}>
                {count(group.running.length)}
                {size !== null && <span className="f"> of {count(size)}</span>}
              </td>
              <td className="r">{group.startedAt === null ? "" : duration(Math.max(0, now - group.startedAt))}</td>
              <td className="r">{behind(group.version, version)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function behind(version: number | null, newest: number | null): string {
  if (version === null) return "";
  const steps = newest === null ? 0 : newest - version;
  return steps <= 0 ? "newest" : `${count(steps)} behind`;
}
