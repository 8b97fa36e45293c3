/** Alerts: open ones with what to try, then resolved ones and notes. Each leads to its moment. */

import { useState } from "react";
import { unbroken } from "../../format";
import { format, usePlace } from "../../state/url";
import type { Alert } from "../../types";
import { lastedOf, momentOf, placeOf } from "../../state/alerts";

/** Resolved alerts and notes that are shown at first. */
const FEW = 6;

export function Alerts({ alerts }: { alerts: Alert[] }) {
  const [all, showAll] = useState(false);
  const open = alerts.filter((alert) => !alert.resolved);
  const resolved = alerts.filter((alert) => alert.resolved && alert.level !== "info");
  const notes = alerts.filter((alert) => alert.level === "info");
  const rest = [...resolved, ...notes];
  const words = [open.length && `${open.length} open`, resolved.length && `${resolved.length} resolved`, notes.length && `${notes.length} ${notes.length === 1 ? "notice" : "notices"}`].filter(Boolean).join(", ");
  return (
    <section className="sec">
      <h2>
        Alerts <span>{words || "none"}</span>
      </h2>
      {[...open, ...(all ? rest : rest.slice(0, FEW))].map((alert, i) => (
        <One key={i} alert={alert} />
      ))}
      {rest.length > FEW && (
        <button className="link s f" aria-pressed={all} onClick={() => showAll(!all)}>
          {all ? "Show fewer" : `Show ${rest.length - FEW} more`}
        </button>
      )}
    </section>
  );
}

function One({ alert }: { alert: Alert }) {
  const place = placeOf(alert, usePlace());
  return (
    <div className={`al ${alert.resolved ? "done" : ""}`}>
      <Mark alert={alert} />
      <a href={format(place)} title={alert.metrics[0] ? `Show ${alert.metrics[0]}` : `Show on the page ${place.page}`}>
        {unbroken(alert.title)}
      </a>
      <span className="f s">{momentOf(alert)}</span>
      {!alert.resolved && (alert.text || alert.advice || alert.count > 1) && <p className="s d">{unbroken([alert.text, alert.advice, lastedOf(alert)].filter(Boolean).join(" "))}</p>}
    </div>
  );
}

function Mark({ alert }: { alert: Alert }) {
  const label = alert.level === "info" ? "note" : alert.resolved ? "resolved" : "open";
  return (
    <svg width={12} height={11} role="img" aria-label={label}>
      {label === "note" ? (
        <circle cx={6} cy={6} r={1.5} fill="var(--ink3)" />
      ) : alert.resolved ? (
        <path d="M1.5 6l3 3 6-7" fill="none" stroke="var(--ink3)" strokeWidth={1.5} />
      ) : (
        <path d="M6 .5l5.5 10h-11z" fill="var(--warn)" />
      )}
    </svg>
  );
}
