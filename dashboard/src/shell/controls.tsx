/** Controls of all pages: buttons of which one is pressed, a choice from a list, a form of one field, a button that copies. */

import { type InputHTMLAttributes, type ReactNode, useEffect, useState } from "react";
import { visible } from "../text/hostile";
import type { RunRow } from "../types";

interface SegmentsProps<T> {
  label: string;
  value: T;
  options: readonly (readonly [value: T, title: ReactNode, hint?: string])[];
  choose: (value: T) => void;
  /** `seg` is a frame of buttons, `tabs` words in a line. */
  className?: string;
  /** Buttons beside those of the options. */
  children?: ReactNode;
}

/** Buttons of which the chosen one is pressed. */
export function Segments<T>({ label, value, options, choose, className = "seg", children }: SegmentsProps<T>) {
  return (
    <span className={className} role="group" aria-label={label}>
      {options.map(([one, title, hint]) => (
        <button key={String(one)} type="button" aria-pressed={one === value} title={hint} onClick={() => choose(one)}>
          {title}
        </button>
      ))}
      {children}
    </span>
  );
}

interface SelectProps {
  label: string;
  value: string | number | undefined;
  options: readonly (readonly [value: string | number, title: string])[];
  choose: (value: string) => void;
  className?: string;
}

/** A run as an option, with its id where that is not its name. */
export const runOption = ({ id, name }: RunRow) => [id, id === name ? name : `${name} (${id})`] as const;

/** The browser's own list of options. */
export function Select({ label, value, options, choose, className = "field" }: SelectProps) {
  return (
    <select className={className} aria-label={label} value={value} onChange={(event) => choose(event.target.value)}>
      {options.map(([one, title]) => (
        <option key={one} value={one}>
          {visible(title)}
        </option>
      ))}
    </select>
  );
}

interface FieldFormProps extends Omit<InputHTMLAttributes<HTMLInputElement>, "onSubmit" | "value"> {
  label: string;
  value: string;
  change: (value: string) => void;
  submit: (value: string) => void;
  /** The word on the button. */
  button: string;
}

/** A field for a name, and the button that accepts it, with others behind it. */
export function FieldForm({ label, value, change, submit, button, disabled = !value.trim(), children, ...field }: FieldFormProps) {
  return (
    <form className="naming" onSubmit={(event) => (event.preventDefault(), submit(value))}>
      <input className="field" aria-label={label} value={value} onChange={(event) => change(event.target.value)} {...field} />
      <button className="btn" disabled={disabled}>
        {button}
      </button>
      {children}
    </form>
  );
}

const COPIED_MS = 1500;

/** Browsers have a clipboard for pages of this machine and of https alone; a selected text can be copied everywhere. */
async function copy(text: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const focused = document.activeElement as HTMLElement | null;
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    focused?.focus();
  }
}

/** Copies a text, and says so for a moment. */
export function CopyButton({ text, title, label, className }: { text: () => string; title: string; label?: string; className: string }) {
  const [copied, setCopied] = useState(0);
  useEffect(() => {
    if (copied === 0) return;
    const timer = setTimeout(() => setCopied(0), COPIED_MS);
    return () => clearTimeout(timer);
  }, [copied]);
  return (
    <button className={className} onClick={() => void copy(text()).then(() => setCopied(copied + 1))} aria-live="polite" aria-label={copied ? "Copied" : label}>
      {copied ? "Copied" : title}
    </button>
  );
}
