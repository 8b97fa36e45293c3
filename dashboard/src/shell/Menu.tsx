/** A menu under a button, in the browser's own popover: Escape and a click elsewhere close it, arrows move in it. */

import { type ReactNode, useId, useLayoutEffect, useRef, useState } from "react";

export interface Item {
  title: string;
  /** Token of a color that is shown before the title. */
  color?: string;
  run: () => void;
}

export function Menu({ label, button, items, className }: { label: string; button: ReactNode; items: Item[]; className?: string }) {
  const id = useId();
  const menu = useRef<HTMLDivElement>(null);
  const anchor = useRef<HTMLButtonElement>(null);
  const [opened, setOpened] = useState(false);
  useLayoutEffect(() => {
    if (!opened) return;
    const box = anchor.current!.getBoundingClientRect();
    const element = menu.current!;
    element.style.top = `${Math.min(box.bottom + 4, innerHeight - element.offsetHeight - 8)}px`;
    element.style.left = `${Math.max(8, Math.min(box.right - element.offsetWidth, innerWidth - element.offsetWidth - 8))}px`;
    element.querySelector("button")?.focus();
  }, [opened]);
  const move = (event: React.KeyboardEvent) => {
    const by = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (!by) return;
    event.preventDefault();
    const buttons = [...menu.current!.querySelectorAll("button")];
    const at = buttons.indexOf(document.activeElement as HTMLButtonElement);
    buttons[(at + by + buttons.length) % buttons.length]?.focus();
  };
  return (
    <>
      <button ref={anchor} popoverTarget={id} aria-label={typeof button === "string" || className === "swatch" ? label : undefined} title={label} className={className}>
        {button}
      </button>
      <div ref={menu} id={id} popover="auto" role="menu" aria-label={label} className="menu" onToggle={(event) => setOpened(event.newState === "open")} onKeyDown={move}>
        {opened && items.map((item, i) => (
          <button
            key={i}
            role="menuitem"
            onClick={() => {
              menu.current?.hidePopover();
              item.run();
            }}
          >
            {item.color && <i className="dot" style={{ background: `var(${item.color})` }} />}
            {item.title}
          </button>
        ))}
      </div>
    </>
  );
}
