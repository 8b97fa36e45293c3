/** The browser's own modal dialog, open while it is mounted: it keeps the focus inside, Escape and a click beside it close it. */

import { type ReactNode, useLayoutEffect, useRef } from "react";

interface DialogProps {
  close: () => void;
  title: string;
  bare?: boolean;
  wide?: boolean;
  /** As large as the window. */
  full?: boolean;
  children: ReactNode;
}

export function Dialog({ close, title, bare = false, wide = false, full = false, children }: DialogProps) {
  const dialog = useRef<HTMLDialogElement>(null);
  // A text that is selected beyond the dialog's edge ends in a click beside it.
  const pressed = useRef<EventTarget>(null);
  useLayoutEffect(() => {
    const element = dialog.current!;
    element.showModal();
    element.querySelector<HTMLElement>("textarea, input")?.focus(); // not the button that closes it
    return () => element.close(); // gives the focus back
  }, []);
  return (
    <dialog ref={dialog} className={full ? "full" : wide ? "wide" : undefined} aria-label={title} onClose={(event) => event.currentTarget.open || close()} onPointerDown={(event) => (pressed.current = event.target)} onClick={(event) => event.target === dialog.current && pressed.current === dialog.current && close()}>
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
