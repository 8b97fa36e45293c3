/** Ctrl-K: pages, runs, metrics and commands by name. */

import { useEffect, useMemo, useRef, useState } from "react";
import { runPath } from "../api";
import { embedded } from "../embedded";
import { ROUTES } from "../routes";
import { useRuns } from "../state/run";
import { useSteps } from "../state/steps";
import { setTheme, THEMES } from "../state/theme";
import { elsewhere, go, setParams, usePlace } from "../state/url";
import type { Opened } from "./App";
import { Dialog } from "./Dialog";
import { statusWord } from "./Header";
import { visible } from "../text/hostile";

interface Command {
  title: string;
  hint: string;
  run: () => void;
}

const SHOWN = 12;

/** Returns how well all words are found in the text: less is better, null is not at all. */
function matchWords(text: string, words: string[]): number | null {
  const low = text.toLowerCase();
  let sum = 0;
  for (const word of words) {
    const at = low.indexOf(word);
    if (at < 0) return null;
    sum += at === 0 || /[\s/_-]/.test(low[at - 1]!) ? at : at + 50;
  }
  return sum + low.length / 100;
}

export function Palette({ opened, close, openOther }: { opened: boolean; close: () => void; openOther: (what: Opened) => void }) {
  return (
    <Dialog opened={opened} close={close} title="Search everything" bare>
      {opened && <Search close={close} openOther={openOther} />}
    </Dialog>
  );
}

function Search({ close, openOther }: { close: () => void; openOther: (what: Opened) => void }) {
  const place = usePlace();
  const runs = useRuns().data?.runs;
  const { steps } = useSteps(place.run);
  const [text, setText] = useState("");
  const [at, setAt] = useState(0);
  const list = useRef<HTMLUListElement>(null);
  const commands = useMemo(() => {
    const out: Command[] = [];
    for (const route of ROUTES) {
      if (route.ofRun && place.run === null) continue;
      const run = route.ofRun ? place.run : null;
      out.push({ title: route.title, hint: "page", run: () => go(elsewhere(place, { run, page: route.page })) });
    }
    for (const run of runs ?? [])
      out.push({ title: visible(run.name), hint: `run ${run.id}, ${statusWord(run.status)}`, run: () => go(elsewhere(place, { run: run.id, page: "overview" })) });
    if (place.run !== null)
      for (const metric of Object.keys(steps?.metrics ?? {}))
        out.push({ title: metric, hint: "metric", run: () => go(elsewhere(place, { page: "metrics" }, { metric })) });
    for (const theme of THEMES) out.push({ title: `Theme: ${theme}`, hint: "command", run: () => setTheme(theme) });
    if (place.run !== null && !embedded) {
      const run = place.run;
      out.push({ title: "Compare with other runs", hint: "command", run: () => openOther("compare") });
      out.push({ title: "Export the run as one HTML file", hint: "command", run: () => location.assign(runPath(run, "export")) });
    }
    if (place.run !== null) {
      out.push({ title: "Clear range and step", hint: "command", run: () => setParams({ range: null, step: null }) });
    }
    return out;
  }, [place, runs, steps, openOther]);
  const found = useMemo(() => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    return commands
      .map((command) => ({ command, rank: matchWords(`${command.title} ${command.hint}`, words) }))
      .filter((entry): entry is { command: Command; rank: number } => entry.rank !== null)
      .sort((a, b) => (words.length ? a.rank - b.rank : 0))
      .slice(0, SHOWN)
      .map((entry) => entry.command);
  }, [commands, text]);
  useEffect(() => setAt(0), [text]);
  useEffect(() => {
    list.current?.children[at]?.scrollIntoView({ block: "nearest" });
  }, [at]);
  const choose = (command: Command | undefined) => {
    if (!command) return;
    close();
    command.run();
  };
  const key = (event: React.KeyboardEvent) => {
    if (event.key === "ArrowDown") setAt((at + 1) % Math.max(1, found.length));
    else if (event.key === "ArrowUp") setAt((at + found.length - 1) % Math.max(1, found.length));
    else if (event.key === "Enter") choose(found[at]);
    else return;
    event.preventDefault();
  };
  return (
    <div className="palette">
      <input
        className="field"
        placeholder="A page, run, metric or command"
        aria-label="Search everything"
        role="combobox"
        aria-expanded
        aria-controls="palette-list"
        aria-activedescendant={`palette-${at}`}
        value={text}
        onChange={(event) => setText(event.target.value)}
        onKeyDown={key}
      />
      <ul id="palette-list" role="listbox" ref={list}>
        {found.map((command, i) => (
          <li
            key={`${command.hint}${command.title}`}
            id={`palette-${i}`}
            role="option"
            aria-selected={i === at}
            onPointerMove={() => setAt(i)}
            onClick={() => choose(command)}
          >
            <span className="cut">{command.title}</span>
            <span className="f cut">{command.hint}</span>
          </li>
        ))}
        {found.length === 0 && <li className="f">No match.</li>}
      </ul>
    </div>
  );
}
