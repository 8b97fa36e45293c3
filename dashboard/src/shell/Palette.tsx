/** Ctrl-K: pages, runs, steps, metrics, settings and commands by name. */

import { useEffect, useMemo, useRef, useState } from "react";
import { runPath } from "../api";
import { embedded } from "../embedded";
import { setting, statusWord } from "../format";
import { ROUTES } from "../routes";
import { useRunInfo, useRuns } from "../state/run";
import { useSteps } from "../state/steps";
import { setTheme, THEMES } from "../state/theme";
import { elsewhere, go, type Place, setParams, usePlace } from "../state/url";
import { Dialog } from "./Dialog";
import { openNote } from "./NoteDialog";
import { visible } from "../text/hostile";

/** The dialog that is open. */
export type Opened = "palette" | "keys" | "compare" | null;

interface Command {
  title: string;
  hint: string;
  run: () => void;
}

const SHOWN = 12;

/** Matches the number of a step: "120" or "step 120". */
const STEP = /^\s*(?:steps?\s*)?(\d+)\s*$/i;

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

/** Returns the entries for a step: on the current page, and on the pages that show what happened in it. */
function stepCommands(place: Place, step: string): Command[] {
  const others = ROUTES.filter((route) => ["rollouts", "answers", "timeline"].includes(route.page) && route.page !== place.page);
  return [
    { title: `Step ${step}`, hint: "step, on this page", run: () => setParams({ step }) },
    ...others.map((route): Command => ({ title: `Step ${step}`, hint: `step, ${route.title}`, run: () => go(elsewhere(place, { page: route.page }, { step })) })),
  ];
}

export function Palette({ close, openOther }: { close: () => void; openOther: (what: Opened) => void }) {
  const place = usePlace();
  const runs = useRuns().data?.runs;
  const config = useRunInfo(place.run).data?.config;
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
        out.push({ title: visible(metric), hint: "metric", run: () => go(elsewhere(place, { page: "metrics" }, { metric })) });
    for (const [name, value] of Object.entries(config ?? {}))
      out.push({ title: visible(name), hint: `setting, ${setting(value)}`, run: () => go(elsewhere(place, { page: "overview" }, { config: "all", setting: name })) });
    for (const theme of THEMES) out.push({ title: `Theme: ${theme}`, hint: "command", run: () => setTheme(theme) });
    if (place.run !== null && !embedded) {
      const run = place.run;
      out.push({ title: "Write a note", hint: "command", run: () => openNote(null) });
      out.push({ title: "Compare with other runs", hint: "command", run: () => openOther("compare") });
      out.push({ title: "Export the run as one HTML file", hint: "command", run: () => location.assign(runPath(run, "export")) });
    }
    if (place.run !== null) {
      out.push({ title: "Clear range and step", hint: "command", run: () => setParams({ range: null, step: null }) });
    }
    out.push({ title: "Keys of this page", hint: "command", run: () => openOther("keys") });
    return out;
  }, [place, runs, steps, config, openOther]);
  const found = useMemo(() => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const step = STEP.exec(text)?.[1];
    const ofStep = step !== undefined && steps?.step.includes(Number(step)) ? stepCommands(place, String(Number(step))) : [];
    const named = commands
      .map((command) => ({ command, rank: matchWords(`${command.title} ${command.hint}`, words) }))
      .filter((entry): entry is { command: Command; rank: number } => entry.rank !== null)
      .sort((a, b) => (words.length ? a.rank - b.rank : 0))
      .map((entry) => entry.command);
    return [...ofStep, ...named].slice(0, SHOWN);
  }, [commands, text, place, steps]);
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
    if (event.nativeEvent.isComposing) return; // the key chooses a character of another script
    if (event.key === "ArrowDown") setAt((at + 1) % Math.max(1, found.length));
    else if (event.key === "ArrowUp") setAt((at + found.length - 1) % Math.max(1, found.length));
    else if (event.key === "Enter") choose(found[at]);
    else return;
    event.preventDefault();
  };
  return (
    <Dialog close={close} title="Search everything" bare>
      <div className="palette">
        <input
          className="field"
          placeholder={place.run === null ? "A page, run or command" : "A page, run, step, metric, setting or command"}
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
            <li key={`${command.hint}${command.title}`} id={`palette-${i}`} role="option" aria-selected={i === at} onPointerMove={() => setAt(i)} onClick={() => choose(command)}>
              <span className="cut">{command.title}</span>
              <span className="f cut">{command.hint}</span>
            </li>
          ))}
          {found.length === 0 && <li className="f">No match.</li>}
        </ul>
      </div>
    </Dialog>
  );
}
