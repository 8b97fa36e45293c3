/** Keys: pages register theirs, `?` lists all that work here. Keys in a row are written `g r`. */

import { useEffect, useRef } from "react";
import { Dialog } from "./Dialog";

export interface Key {
  keys: string[];
  does: string;
  run: () => unknown;
}

interface Group {
  title: string;
  keys: Key[];
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
  const typing = target.matches("input, textarea, select, [contenteditable]");
  const chord = `${event.ctrlKey ? "Control+" : ""}${event.metaKey ? "Meta+" : ""}${event.altKey ? "Alt+" : ""}${event.key}`;
  if (typing && event.key === "Escape") target.blur();
  if (typing && !event.ctrlKey && !event.metaKey) return;
  if (event.key === "Escape" && document.querySelector(":popover-open")) return; // the browser closes the menu
  // These press the control that has the focus.
  if ((event.key === "Enter" || event.key === " ") && target.matches("a[href], button, summary")) return;
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
const show = (key: string) => key.replace("Control+", "Ctrl ").replace("Meta+", "⌘ ").replace(/Arrow\w+|Escape|^ $/g, (name) => SHOWN[name] ?? name);

export function KeysDialog({ opened, close }: { opened: boolean; close: () => void }) {
  return (
    <Dialog opened={opened} close={close} title="Keys">
      <div className="keys">
        {opened &&
          [...groups].map(({ current }) => (
            <section key={current.title}>
              <h3>{current.title}</h3>
              <dl>
                {current.keys.map((key) => (
                  <div key={key.keys.join()}>
                    <dt>
                      {key.keys
                        .filter((keys) => !keys.startsWith("Meta+"))
                        .map((keys) => (
                          <span key={keys}>
                            {show(keys)
                              .split(" ")
                              .map((one, i) => (
                                <kbd key={i}>{one}</kbd>
                              ))}
                          </span>
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
