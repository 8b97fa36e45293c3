/** Keys: pages register theirs, `?` lists all that work here. Keys in a row are written `g r`. */

import { useEffect, useRef } from "react";
import { Dialog } from "./Dialog";

interface Key {
  keys: string[];
  does: string;
  run: () => unknown;
}

type Listed = Omit<Key, "run">;

interface Group {
  title: string;
  keys: Key[];
}

/** Keys that parts of a page handle themselves while they have the focus, by their selectors. */
const FOCUSED: { of: string; title: string; keys: Listed[] }[] = [
  {
    of: ".chart .p",
    title: "A chart with the focus",
    keys: [
      { keys: ["ArrowLeft", "ArrowRight"], does: "read it" },
      { keys: ["PageUp", "PageDown"], does: "in large steps" },
      { keys: ["Home", "End"], does: "its first and last value" },
      { keys: ["Shift+ArrowLeft", "Shift+ArrowRight"], does: "select a range" },
      { keys: ["Enter"], does: "zoom to the range, or select the step" },
    ],
  },
  { of: ".ruler a", title: "A mark of the ruler", keys: [{ keys: ["ArrowLeft", "ArrowRight"], does: "other marks" }, { keys: ["Enter"], does: "open what it marks" }] },
  { of: ".heat", title: "The heat strip", keys: [{ keys: ["ArrowLeft", "ArrowRight", "Home", "End"], does: "other steps" }] },
  { of: ".tree .ls", title: "The tree of metrics", keys: [{ keys: ["ArrowUp", "ArrowDown"], does: "other metrics" }] },
  { of: ".grip", title: "A grip", keys: [{ keys: [" "], does: "pick up, or drop" }, { keys: ["ArrowLeft", "ArrowRight"], does: "move the chart or section" }] },
  { of: "[aria-label^='Tokens:']", title: "Tokens", keys: [{ keys: ["ArrowLeft", "ArrowRight", "Home", "End"], does: "other tokens" }] },
];

/** Returns the active keys. If two groups have the same key, the later group wins. */
function listed(): { title: string; keys: Listed[] }[] {
  const taken = new Set<string>();
  const own = [...groups].reverse().map(({ current }) => {
    const keys = current.keys.map((key) => ({ ...key, keys: key.keys.filter((one) => !taken.has(one)) })).filter((key) => key.keys.length > 0);
    for (const key of keys) for (const one of key.keys) taken.add(one);
    return { title: current.title, keys };
  });
  return [...own.reverse(), ...FOCUSED.filter(({ of }) => document.querySelector(of))].filter((group) => group.keys.length > 0);
}

const groups = new Set<{ current: Group }>();
const FOLLOW_MS = 1200;

/** Makes keys work while the component is on the page. */
export function useKeys(title: string, keys: Key[]): void {
  const group = useRef<Group>({ title, keys });
  group.current = { title, keys };
  useEffect(() => {
    groups.add(group);
    return () => void groups.delete(group);
  }, []);
}

let before: { key: string; time: number } | null = null;

function pressed(event: KeyboardEvent): void {
  const target = event.target as HTMLElement;
  const typing = target.matches('input:not([type="checkbox"]), textarea, select, [contenteditable]');
  // On many keyboards of Macs, brackets are written with Option.
  const isAlt = event.altKey && /^\w/.test(event.key);
  const chord = `${event.ctrlKey ? "Control+" : ""}${event.metaKey ? "Meta+" : ""}${isAlt ? "Alt+" : ""}${event.key}`;
  if (typing && event.key === "Escape") target.blur();
  if (typing && !event.ctrlKey && !event.metaKey) return;
  if (event.key === "Escape" && document.querySelector(":popover-open")) return; // the browser closes the menu
  // These press the control that has the focus.
  if ((event.key === "Enter" || event.key === " ") && target.matches("a[href], button, summary, input")) return;
  if (document.querySelector("dialog[open]") && !event.ctrlKey && !event.metaKey) return;
  const inRow = before && Date.now() - before.time < FOLLOW_MS ? `${before.key} ${chord}` : null;
  const all = [...groups].reverse().flatMap((group) => group.current.keys);
  const match = all.find((key) => inRow !== null && key.keys.includes(inRow)) ?? all.find((key) => key.keys.includes(chord));
  const starts = all.some((key) => key.keys.some((keys) => keys.startsWith(`${chord} `)));
  before = starts && !match ? { key: chord, time: Date.now() } : null;
  if (!match) return;
  event.preventDefault();
  match.run();
}

/** Listens for keys; returns a function that ends it. */
export function startKeys(): () => void {
  document.addEventListener("keydown", pressed);
  return () => document.removeEventListener("keydown", pressed);
}

const SHOWN: Record<string, string> = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", Escape: "Esc", " ": "space" };
const show = (key: string) => key.replace("Control+", "Ctrl ").replace("Meta+", "⌘ ").replace("Shift+", "⇧ ").replace("Page", "Pg").replace(/Arrow\w+|Escape|^ $/g, (name) => SHOWN[name] ?? name);

export function KeysDialog({ close }: { close: () => void }) {
  return (
    <Dialog close={close} title="Keys" wide>
      <div className="keys">
        {listed().map((group) => (
          <section key={group.title}>
            <h3>{group.title}</h3>
            <dl>
              {group.keys.map((key) => (
                <div key={key.keys.join()}>
                  <dt>
                    {key.keys.filter((keys) => !keys.startsWith("Meta+")).map((keys) => (
                      <span key={keys}>{show(keys).split(" ").map((one, i) => <kbd key={i}>{one}</kbd>)}</span>
                    ))}
                  </dt>
                  <dd>{key.does}</dd>
                </div>
              ))}
            </dl>
          </section>
        ))}
      </div>
    </Dialog>
  );
}
