/** What a live run does right now: phase, requests, groups, trainer, servers, speed. */

import { runPath } from "../../api";
import { count, duration } from "../../format";
import { useResource } from "../../state/resource";
import { useTick } from "../../state/timing";
import type { Now as NowState, RunInfo, Server } from "../../types";

/** The run writes its state every two seconds. */
const LOOK_MS = 2000;
/** A state that is older is not shown as present. */
const OLD_SECONDS = 30;

export function Now({ info }: { info: RunInfo }) {
  const tick = useTick(LOOK_MS);
  const now = useResource<NowState>(runPath(info.info.id, "now"), {}, tick).data;
  if (!now?.live || now.phase === null) return null;
  const wanted = info.config.prompts_batch_size_for_trainer;
  const servers = serversOf(now.servers);
  const share = (part: number | null, whole: unknown) => (part !== null && typeof whole === "number" && whole > 0 ? Math.min(1, part / whole) : null);
  const evaluating = now.eval_total !== null && now.eval_total > 0 && (now.eval_done ?? 0) < now.eval_total;
  const cells: Cell[] = [
    ...(now.trainer === null ? [] : [{ name: "Trainer", text: now.trainer }]),
    evaluating
      ? { name: "Eval", text: `${count(now.eval_done)} of ${count(now.eval_total)}`, share: share(now.eval_done, now.eval_total) }
      : { name: "Groups ready", text: typeof wanted === "number" ? `${count(now.num_finished_groups)} of ${count(wanted)}` : count(now.num_finished_groups), share: share(now.num_finished_groups, wanted), title: `${count(now.num_open_groups)} groups are open` },
    ...(!now.num_slots ? [] : [{
      name: "Requests",
      text: `${count(now.num_generating)} of ${count(now.num_slots)}`,
      share: share(now.num_generating, now.num_slots),
      title: [
        `${count(now.num_generating)} in flight on ${count(now.num_slots)} slots`,
        now.oldest_seconds !== null ? `the oldest for ${duration(now.oldest_seconds)}` : "",
        now.num_waiting !== null ? `${count(now.num_waiting)} wait in the engines` : "",
      ]
        .filter(Boolean)
        .join(", "),
    }]),
    ...(now.num_waiting === null ? [] : [{ name: "Queue", text: `${count(now.num_waiting)} waiting`, title: "Requests that wait in the engines" }]),
    ...(now.servers.length === 0 ? [] : [{ name: "Servers", text: servers.text, bad: servers.bad, title: now.servers.map((server) => `${server.name}: ${server.doing}`).join("\n") }]),
    ...(!now.num_slots ? [] : [{ name: "Speed", text: `${count(now.tokens_per_second)} tokens/s`, title: "Finished answers of the last 10 seconds" }]),
  ];
  return (
    <section className="now" aria-label="Now">
      <div className="phase">
        <span className="l">Now</span>
        <span className="v cut" title={Object.entries(now.components).map(([part, doing]) => `${part}: ${doing}`).join("\n")}>
          {(now.age_seconds ?? 0) > OLD_SECONDS ? `silent for ${duration(now.age_seconds)}` : now.phase}
        </span>
      </div>
      {cells.map((cell) => (
        <div key={cell.name} title={cell.title} className={cell.bad ? "w" : undefined}>
          <span className="l">{cell.name}</span>
          <span className="v cut">{cell.text}</span>
          {cell.share !== undefined && cell.share !== null && (
            <i>
              <i style={{ width: `${100 * cell.share}%` }} />
            </i>
          )}
        </div>
      ))}
    </section>
  );
}

interface Cell {
  name: string;
  text: string;
  title?: string;
  /** From 0 to 1, drawn as a bar. */
  share?: number | null;
  bad?: boolean;
}

const FINE = /^(serving|ready|receiving weights)/;

/** Returns how many servers serve, or what the first does that does not. */
export function serversOf(servers: Server[]): { text: string; bad: boolean } {
  const other = servers.filter((server) => !FINE.test(server.doing));
  if (servers.length === 0) return { text: "–", bad: false };
  const [first] = other;
  if (!first) {
    const syncing = servers.filter((server) => server.doing.startsWith("receiving")).length;
    return { text: syncing > 0 ? `${syncing} of ${servers.length} receiving weights` : servers.length === 1 ? "1 serving" : `all ${servers.length} serving`, bad: false };
  }
  return { text: `${servers.length - other.length} of ${servers.length} serving, ${servers.length > 1 ? `${first.name}: ` : ""}${first.doing}`, bad: /down|failed|restart/.test(first.doing) };
}
