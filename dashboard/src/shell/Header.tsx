/** Mark, run, state, pages and tools: the same on every page. */

import { useEffect, useRef } from "react";
import { runPath } from "../api";
import { embedded } from "../embedded";
import { moment, statusClass, statusWord } from "../format";
import { ROUTES } from "../routes";
import { useBehind, useRefusal } from "../state/live";
import { useRunInfo, useStatus } from "../state/run";
import { setTheme, THEMES, useTheme } from "../state/theme";
import { elsewhere, format, useOthers, usePlace } from "../state/url";
import { CopyButton } from "./controls";
import type { Opened } from "./Palette";
import { visible } from "../text/hostile";

export function Header({ open }: { open: (what: Opened) => void }) {
  const place = usePlace();
  const others = useOthers();
  const info = useRunInfo(place.run).data?.info;
  const { status } = useStatus(place.run);
  const behind = useBehind();
  const refusal = useRefusal();
  const nav = useRef<HTMLElement>(null);
  useEffect(() => {
    // On a phone the pages are a line that scrolls.
    const current = nav.current?.querySelector<HTMLElement>("[aria-current]");
    if (current) nav.current!.scrollLeft = current.offsetLeft - nav.current!.clientWidth / 2;
  }, [place.page]);
  const shown = ROUTES.filter((route) => !route.hidden && (!route.ofRun || place.run !== null));
  return (
    <header className="bar">
      <a className="mark" href={format(embedded ? place : elsewhere(place, { run: null, page: "runs" }))} aria-label={embedded ? "Telescope" : "Telescope, all runs"}>
        <svg width={20} height={20} viewBox="0 0 20 20" fill="none" stroke="currentColor" strokeWidth={1.5} aria-hidden>
          <circle cx={10} cy={10} r={8.2} />
          <path d="M1.8 10h3M15.2 10h3M10 1.8v3M10 15.2v3" />
          <circle cx={10} cy={10} r={1.6} fill="currentColor" stroke="none" />
        </svg>
      </a>
      <div className="id">
        <b title={place.run ?? undefined}>{info ? visible(info.name) : place.run === null ? "Telescope" : ""}</b>
        {behind !== null && (info || place.run === null) ? (
          <span className="state bad" role="status" title={refusal ?? "The server does not respond. The page shows the last state that it received, and reconnects."}>
            <i />
            as of {new Date(behind).toLocaleTimeString("en-GB")}, {refusal ? "needs the new address" : "reconnecting"}
          </span>
        ) : (
          place.run !== null &&
          status && (
            <span className={`state ${statusClass(status)}`}>
              <i />
              {statusWord(status)}
            </span>
          )
        )}
      </div>
      <nav ref={nav} aria-label="Pages">
        {shown.map((route) => (
          <a
            key={route.page}
            href={format(elsewhere(place, route.ofRun ? { page: route.page } : { run: null, page: route.page }))}
            aria-current={route.page === place.page ? "page" : undefined}
            title={`g ${route.key}`}
          >
            {route.title}
          </a>
        ))}
      </nav>
      <div className="tools">
        {embedded ? (
          <span title={`It has ${embedded.left_out.join("; ")}.`}>exported {moment(embedded.written_at)}</span>
        ) : (
          <>
            {place.run !== null && <button className="narrowed" onClick={() => open("compare")}>Compare{others.length > 0 ? ` ${others.length + 1}` : ""}</button>}
            {place.run !== null && (
              <a className="wide" href={runPath(place.run, "export")} download title="Save the run as one HTML file that opens without a server">
                Export
              </a>
            )}
            <CopyButton className="wide" title="Copy link" text={() => location.href} />
          </>
        )}
        <ThemeButton />
        <button onClick={() => open("palette")} title="Search everything">
          <span className="word">Search </span>
          <kbd>Ctrl K</kbd>
        </button>
        <button className="narrowed" onClick={() => open("keys")} aria-label="Keys">
          <kbd>?</kbd>
        </button>
      </div>
    </header>
  );
}

function ThemeButton() {
  const { theme } = useTheme();
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]!;
  return (
    <button onClick={() => setTheme(next)} aria-label={`Theme: ${theme}. Change to ${next}`} title={`Theme: ${theme}`} className="theme">
      <svg width={14} height={14} viewBox="0 0 14 14" aria-hidden>
        <circle cx={7} cy={7} r={5.7} fill="none" stroke="currentColor" strokeWidth={1.3} />
        {theme !== "light" && <path d={theme === "dark" ? "M7 1.3a5.7 5.7 0 0 1 0 11.4a5.7 5.7 0 0 1 0-11.4z" : "M7 1.3a5.7 5.7 0 0 1 0 11.4z"} fill="currentColor" />}
      </svg>
    </button>
  );
}
