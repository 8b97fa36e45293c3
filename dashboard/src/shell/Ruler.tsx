/**
 * The ruler of steps under every header. A place on it is a number of finished steps: step s lies between s and s + 1,
 * an eval of version v at v. Dragging selects the range of the page, a double click clears it. Marks lead to what they mark;
 * Tab reaches one of them, arrows the others.
 */

import { memo, type ReactNode, useDeferredValue, useMemo, useState } from "react";
import { ticks } from "../charts/math";
import { count, duration } from "../format";
import { placeOf } from "../state/alerts";
import { useNotes } from "../state/notes";
import { useEvals, useHealth, useRunId, useRunInfo, useStatus } from "../state/run";
import { checkpointMarks, useSteps } from "../state/steps";
import { elsewhere, format, parseRange, parseStep, place, setParams, usePlace, useRange } from "../state/url";
import { useKeys } from "./keys";
import { openNote } from "./NoteDialog";
import { useSize } from "./size";
import { visible } from "../text/hostile";

export function Ruler() {
  const run = useRunId();
  const { steps } = useSteps(run);
  const read = useRunInfo(run).data;
  const info = read?.info;
  const health = useHealth(run).data;
  const evals = useEvals(run).data;
  const written = useNotes(run).notes;
  const { live } = useStatus(run);
  const [range, setRange] = useRange();
  const { host, width } = useSize();
  const [drag, setDrag] = useState<{ from: number; to: number } | null>(null);

  const last = steps?.step.at(-1);
  const done = last === undefined ? (info?.steps ?? 0) : last + 1;
  const end = Math.max(done, info?.num_steps ?? 0, 1);
  const here = usePlace();
  // Hundreds of marks lead elsewhere after each change of the address: the page itself is drawn first.
  const later = useDeferredValue(here);
  const selected = parseStep(here.params.step);
  const step = (by: 1 | -1) => {
    const now = selected ?? (by > 0 ? -1 : done);
    setParams({ step: String(Math.min(Math.max(0, now + by), Math.max(0, done - 1))) }, true);
  };
  // The range grows from the selected step, or from the newest one.
  const widen = (by: 1 | -1) => {
    const now = parseRange(place().params.range);
    const from = selected ?? done - 1;
    const moving = (now === null ? from : now.from === from ? now.to : now.from) + by;
    const to = Math.min(Math.max(0, moving), Math.max(0, done - 1));
    setParams({ step: String(from), range: to === from ? null : `${Math.min(from, to)}-${Math.max(from, to)}` }, true);
  };
  useKeys("Steps", [
    { keys: ["["], does: "step before", run: () => step(-1) },
    { keys: ["]"], does: "step after", run: () => step(1) },
    { keys: ["{"], does: "select a range back from this step", run: () => widen(-1) },
    { keys: ["}"], does: "select a range on from this step", run: () => widen(1) },
    { keys: ["Escape"], does: "clear the selected step and range", run: () => setParams({ step: null, range: null }) },
  ]);

  const X = (value: number) => (value / end) * width;
  const stepAt = (event: React.PointerEvent) => {
    const box = host.current!.getBoundingClientRect();
    return Math.min(Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * end)), end - 1);
  };
  const down = (event: React.PointerEvent) => {
    event.currentTarget.setPointerCapture(event.pointerId);
    const at = stepAt(event);
    setDrag({ from: at, to: at });
  };
  const move = (event: React.PointerEvent) => drag && setDrag({ from: drag.from, to: stepAt(event) });
  const up = () => {
    if (drag) {
      const [from, to] = [Math.min(drag.from, drag.to), Math.max(drag.from, drag.to)];
      if (from === to) setParams({ step: place().params.step === String(from) ? null : String(Math.min(from, Math.max(0, done - 1))) });
      else setRange({ from, to });
    }
    setDrag(null);
  };
  const clear = () => setParams({ step: null, range: null });

  const shown = drag && drag.from !== drag.to ? { from: Math.min(drag.from, drag.to), to: Math.max(drag.from, drag.to) } : range;
  const labels = ticks(0, end, Math.max(2, Math.min(10, Math.floor(width / 90)))).filter((tick) => Number.isInteger(tick) && tick > 0);
  const minor = end <= width / 5 ? Array.from({ length: end + 1 }, (_, i) => i) : ticks(0, end, Math.max(4, width / 8));
  const attempts = (read?.attempts ?? []).filter((attempt) => attempt.first_step !== null && attempt.first_step > 0);
  const checkpoints = useMemo(() => checkpointMarks(steps, read?.checkpoints ?? [], read?.written), [steps, read?.checkpoints, read?.written]);
  const notes = useMemo(() => written.filter((note) => note.step !== null && note.step < end), [written, end]);
  const alerts = useMemo(() => (health?.alerts ?? []).filter((alert) => alert.step !== null && alert.level !== "info"), [health]);
  const marked = [...alerts, ...notes].map((one) => one.step!);
  const marks = useMemo((): MarkProps[] => {
    const atStep = (step: number) => format({ ...later, params: { ...later.params, step: String(step) } });
    return [
      ...notes.map((note) => ({
        at: note.step! + 0.5,
        y: 7,
        label: `step ${note.step}: ${note.text}`,
        href: atStep(note.step!),
        open: () => openNote(note),
        shape: <path d="M-3.5 -3.5h7v5h-3l-2 2.5v-2.5h-2z" fill="var(--ground)" stroke="var(--ink3)" />,
      })),
      ...[...new Set(evals?.map((row) => row.version))].map((version) => ({
        at: version,
        y: 32,
        label: `eval after ${version} steps`,
        href: format(elsewhere(later, { page: "evals" }, { after: String(version) })),
        shape: <path d="M0 -4l4 4-4 4-4-4z" fill="var(--ground)" stroke="var(--ink2)" strokeWidth={1.2} />,
      })),
      ...checkpoints.map(({ step: at, kept }) => ({
        at,
        y: 32,
        label: kept ? `checkpoint after ${at} steps` : `checkpoint after ${at} steps, not in the run directory any more`,
        href: atStep(Math.max(0, at - 1)),
        shape: <rect x={-2} y={-2} width={4} height={4} fill={kept ? "var(--ink)" : "var(--ground)"} stroke={kept ? "none" : "var(--ink3)"} />,
      })),
      ...alerts.map((alert) => ({
        at: alert.step! + 0.5,
        y: 7,
        label: `${alert.count > 1 ? `steps ${alert.first_step} to` : "step"} ${alert.step}: ${visible(alert.title)}`,
        href: format(placeOf(alert, later)),
        shape: <path d="M0 -5l5 9h-10z" fill={alert.resolved || !live ? "var(--ink3)" : "var(--warn)"} />,
      })),
    ].sort((a, b) => a.at - b.at);
  }, [notes, evals, checkpoints, alerts, later, live]);
  return (
    <section className="ruler" aria-label="Progress">
      <span title={done > 0 ? `Steps are numbered from 0: the newest is step ${done - 1}` : undefined}>
        <b>{count(done)}</b> <span className="d">{info?.num_steps ? `of ${count(info.num_steps)} steps` : done === 1 ? "step" : "steps"}</span>
      </span>
      <div ref={host} className="rl" onPointerDown={down} onPointerMove={move} onPointerUp={up} onPointerCancel={() => setDrag(null)} onDoubleClick={clear}>
        <svg width={width} height={36} role="group" aria-label={`Progress: ${done} of ${end} steps`}>
          <line className="ax" x1={0} x2={width} y1={25.5} y2={25.5} />
          {minor.map((tick) => (
            <line
              key={tick}
              x1={X(tick)}
              x2={X(tick)}
              y1={labels.includes(tick) || tick === 0 ? 19 : 22}
              y2={25}
              stroke={tick <= done ? "var(--ink2)" : "var(--line2)"}
              shapeRendering="crispEdges"
            />
          ))}
          {/* An alert or a note would cover the number. */}
          {labels.filter((tick) => marked.every((step) => Math.abs(X(step + 0.5) - X(tick)) > 16)).map((tick) => (
            <text key={tick} x={X(tick)} y={15} textAnchor={X(tick) > width - 16 ? "end" : "middle"}>
              {count(tick)}
            </text>
          ))}
          <rect x={0} y={24} width={X(done)} height={3} fill="var(--ink)" />
          {shown && <Selection from={X(shown.from)} to={X(shown.to + 1)} />}
          {selected !== null && <Selection from={X(selected)} to={X(selected + 1)} />}
          {attempts.map(({ attempt, first_step }) => (
            <path key={attempt} d={`M${X(first_step!)} 13v22`} stroke="var(--ink2)" strokeDasharray="2 2">
              <title>{`attempt ${attempt} from step ${first_step}`}</title>
            </path>
          ))}
          <Marks marks={marks} scale={width / end} />
          {live && <circle cx={X(done)} cy={25.5} r={4.5} fill="var(--live)" stroke="var(--ground)" strokeWidth={1.5} />}
        </svg>
      </div>
      <span className="d right">
        {range ? (
          <button className="btn" onClick={() => setRange(null)}>
            steps {range.from} to {range.to} ×
          </button>
        ) : (
          <Times live={live} seconds={info?.duration ?? null} left={health?.progress.seconds_left ?? null} rows={steps?.step.length ?? 0} />
        )}
      </span>
    </section>
  );
}

interface MarkProps {
  /** In steps. */
  at: number;
  y: number;
  label: string;
  href: string;
  /** Instead of going to the address. */
  open?: () => void;
  shape: ReactNode;
}

/** Pixels around a mark that belong to it. */
const HIT = 6;

const Marks = memo(function Marks({ marks, scale }: { marks: MarkProps[]; scale: number }) {
  const [reached, reach] = useState(0);
  const key = (event: React.KeyboardEvent, at: number) => {
    const by = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (by === 0) return;
    event.preventDefault();
    event.stopPropagation();
    event.currentTarget.parentElement!.querySelectorAll("a")[Math.max(0, at + by)]?.focus();
  };
  return marks.map((mark, i) => (
    <a
      key={`${mark.label}${i}`}
      href={mark.href}
      aria-label={mark.label}
      tabIndex={i === Math.min(reached, marks.length - 1) ? 0 : -1}
      onFocus={() => reach(i)}
      onKeyDown={(event) => key(event, i)}
      onPointerDown={(event) => event.stopPropagation()}
      onClick={(event) => mark.open && (event.preventDefault(), mark.open())}
    >
      <title>{mark.label}</title>
      <g transform={`translate(${mark.at * scale} ${mark.y})`}>
        <rect x={-HIT} y={-HIT} width={2 * HIT} height={2 * HIT} fill="transparent" />
        {mark.shape}
      </g>
    </a>
  ));
});

function Selection({ from, to }: { from: number; to: number }) {
  const right = Math.max(to, from + 2);
  return (
    <>
      <rect x={from} width={right - from} y={4} height={26} fill="var(--c1)" opacity={0.12} />
      <path d={`M${from} 4v26M${right} 4v26`} stroke="var(--c1)" strokeWidth={1.5} />
    </>
  );
}

function Times({ live, seconds, left, rows }: { live: boolean; seconds: number | null; left: number | null; rows: number }) {
  if (live && left !== null)
    return (
      <>
        {duration(seconds)} in, <b className="ink">{duration(left)} left</b>
      </>
    );
  if (live) return <>{duration(seconds)} in</>;
  return rows === 0 ? <>no steps</> : <>{duration(seconds)} in all</>;
}
