/** What stands in place of a page that has nothing to show. */

import type { ReactNode } from "react";
import { ApiError } from "../api";
import { mayPass, RETRY_MS } from "../state/resource";
import { useRunInfo, useStatus } from "../state/run";
import { elsewhere, format, usePlace } from "../state/url";
import { visible } from "../text/hostile";

/** Why a page has nothing to show, and what to do. */
export function Quiet({ title, text, children }: { title: string; text?: ReactNode; children?: ReactNode }) {
  const unreadable = useRunInfo(usePlace().run).data?.unreadable ?? [];
  return (
    <section className="quiet">
      <h1>{title}</h1>
      {text && <p>{text}</p>}
      {unreadable.length > 0 && <p className="w">A part of the record cannot be read: {unreadable.map(visible).join(", ")}</p>}
      {children}
    </section>
  );
}

/** Returns why an ended run has no step, and where to look. Only `run.json` says that it was a run, not evals alone. */
export function useEnd(): [string, ReactNode] {
  const place = usePlace();
  const page = (name: string, title: string) => <a className="link" href={format(elsewhere(place, { page: name }))}>{title}</a>;
  if (useStatus(place.run).status === "unknown") return ["The record has no training step.", <>{page("evals", "Its evals")} and {page("rollouts", "its answers")} have pages of their own.</>];
  return ["This run ended before its first step.", <>{page("logs", "Its logs")} show what it did.</>];
}

/** What a page of a live run waits for. A run that has ended says so instead. */
export function Waiting({ title, text }: { title: string; text: string }) {
  const place = usePlace();
  const { live } = useStatus(place.run);
  const [why, look] = useEnd();
  return live ? <Quiet title={title} text={text} /> : <Quiet title={why} text={look} />;
}

/** Says what a page waits for, unless it comes at once. */
export function Reading({ what }: { what: string }) {
  return <p className="quiet reading" role="status">Reading {what}.</p>;
}

/** Says why a read failed. `wasThere`: the page has shown the run. */
export function Failure({ error, wasThere = false }: { error: Error; wasThere?: boolean }) {
  const status = error instanceof ApiError ? error.status : 0;
  const title = wasThere ? "This run was removed or moved." : status === 404 ? "This run was not found." : status === 400 ? "The address has a value that is not valid." : status >= 500 ? "The server failed." : "The server did not answer.";
  return (
    <Quiet title={title} text={error.message}>
      {mayPass(error) && (
        <p>
          Retrying every {RETRY_MS / 1000} seconds.{" "}
          <button className="link" onClick={() => location.reload()}>
            Try again
          </button>
        </p>
      )}
      <p>
        <a className="link" href="#/">
          All runs
        </a>
      </p>
    </Quiet>
  );
}
