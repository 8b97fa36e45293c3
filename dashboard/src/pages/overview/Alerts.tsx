/** Lists open alerts with advice, then closed alerts and notes, each linked to its step. Eval results have a list of their own. */

import { useLayoutEffect, useRef, useState } from "react";
import { embedded } from "../../embedded";
import { unbroken } from "../../format";
import { lastedOf, momentOf, placeOf } from "../../state/alerts";
import { elsewhere, format, usePlace } from "../../state/url";
import type { Alert } from "../../types";

/** Closed alerts and notes, and eval results, that are shown before the list is expanded. */
const FEW = 6;
const FEW_RESULTS = 2;

/** Unless the run is `live`, every alert is closed; one that was open when the run ended says "at the end". */
export function Alerts({ alerts, live }: { alerts: Alert[]; live: boolean }) {
  const results = alerts.filter((alert) => alert.kind === "eval" && alert.level === "info");
  const others = alerts.filter((alert) => !results.includes(alert));
  const open = others.filter((alert) => !alert.resolved);
  const resolved = others.filter((alert) => alert.resolved && alert.level !== "info");
  const notes = others.filter((alert) => alert.level === "info");
  const closed = [...(live ? [] : open), ...resolved];
  const words = [live && open.length && `${open.length} open`, closed.length && `${closed.length} ${live ? "resolved" : "closed"}`, notes.length && `${notes.length} ${notes.length === 1 ? "notice" : "notices"}`].filter(Boolean).join(", ");
  return (
    <>
      <section className="sec">
        <h2>
          Alerts <span>{words || "none"}</span>
        </h2>
        <List always={open} rest={[...resolved, ...notes]} few={FEW} live={live} />
      </section>
      {results.length > 0 && (
        <section className="sec">
          <h2>
            Eval results <span>{results.length}</span>
          </h2>
          <List always={[]} rest={results} few={FEW_RESULTS} live={live} />
        </section>
      )}
    </>
  );
}

function List({ always, rest, few, live }: { always: Alert[]; rest: Alert[]; few: number; live: boolean }) {
  const [all, showAll] = useState(false);
  return (
    <>
      {[...always, ...(all ? rest : rest.slice(0, few))].map((alert, i) => (
        <One key={i} alert={alert} live={live} />
      ))}
      {rest.length > few && (
        <button className="link s f" aria-pressed={all} onClick={() => showAll(!all)}>
          {all ? "Show fewer" : `Show ${rest.length - few} more`}
        </button>
      )}
    </>
  );
}

function One({ alert, live }: { alert: Alert; live: boolean }) {
  const here = usePlace();
  const place = placeOf(alert, here);
  const isOpen = !alert.resolved && live;
  const text = alert.resolved ? "" : [alert.text, live && alert.advice, lastedOf(alert)].filter(Boolean).join(" ");
  const step = alert.first_step ?? alert.step;
  const changes = step === null || step < 1 || alert.level === "info" || embedded ? null : elsewhere(here, { page: "changes" }, { step: String(step), ...(alert.metrics[0] ? { metric: alert.metrics[0] } : {}) });
  return (
    <div className={`al ${isOpen ? "" : "done"}`}>
      <Mark alert={alert} open={isOpen} />
      <a className="clip" href={format(place)} title={unbroken(alert.title)}>
        {unbroken(alert.title)}
      </a>
      <span className="f s">{!alert.resolved && !live ? "at the end" : momentOf(alert)}</span>
      {text && <Clamped text={unbroken(text)} />}
      {changes && (
        <p className="s">
          <a className="link f" href={format(changes)}>
            What changed at step {step}
          </a>
        </p>
      )}
    </div>
  );
}

/** A text that is cut to three lines until it is expanded. */
function Clamped({ text }: { text: string }) {
  const [opened, open] = useState(false);
  const [cut, setCut] = useState(false);
  const host = useRef<HTMLParagraphElement>(null);
  useLayoutEffect(() => {
    const element = host.current!;
    if (!opened) setCut(element.scrollHeight > element.clientHeight + 1);
  }, [text, opened]);
  return (
    <>
      <p ref={host} className={`s d ${opened ? "" : "clip"}`}>
        {text}
      </p>
      {(cut || opened) && (
        <p className="s">
          <button className="link f" aria-expanded={opened} onClick={() => open(!opened)}>
            {opened ? "less" : "more"}
          </button>
        </p>
      )}
    </>
  );
}

function Mark({ alert, open }: { alert: Alert; open: boolean }) {
  const label = alert.level === "info" ? "note" : open ? "open" : alert.resolved ? "resolved" : "closed at the end";
  return (
    <svg width={12} height={11} role="img" aria-label={label}>
      {label === "note" ? (
        <circle cx={6} cy={6} r={1.5} fill="var(--ink3)" />
      ) : open ? (
        <path d="M6 .5l5.5 10h-11z" fill="var(--warn)" />
      ) : alert.resolved ? (
        <path d="M1.5 6l3 3 6-7" fill="none" stroke="var(--ink3)" strokeWidth={1.5} />
      ) : (
        <path d="M6 1.5l4.6 8.5H1.4z" fill="none" stroke="var(--ink3)" strokeWidth={1.2} />
      )}
    </svg>
  );
}
