/** The browser's own modal dialog: it keeps the focus inside, Escape and a click beside it close it. */

import { type ReactNode, useEffect, useRef } from "react";

interface DialogProps {
  opened: boolean;
  close: () => void;
  title: string;
  bare?: boolean;
  wide?: boolean;
  /** As large as the window. */
  full?: boolean;
  children: ReactNode;
}

export function Dialog({ opened, close, title, bare = false, wide = false, full = false, children }: DialogProps) {
  const dialog = useRef<HTMLDialogElement>(null);
  // A text that is selected beyond the dialog's edge ends in a click beside it.
  const pressed = useRef<EventTarget>(null);
  useEffect(() => {
    const element = dialog.current!;
    if (opened && !element.open) {
      element.showModal();
      element.querySelector<HTMLElement>("textarea, input")?.focus(); // not the button that closes it
    }
    if (!opened && element.open) element.close();
  }, [opened]);
  return (
    <dialog ref={dialog} className={full ? "full" : wide ? "wide" : undefined} aria-label={title} onClose={close} onPointerDown={(event) => (pressed.current = event.target)} onClick={(event) => event.target === dialog.current && pressed.current === dialog.current && close()}>
      <div className="in">
        {!bare && (
          <h2>
            {title}
            <button onClick={close} aria-label="Close, Esc">
              <kbd>Esc</kbd>
            </button>
          </h2>
        )}
        {children}
      </div>
    </dialog>
  );
}
