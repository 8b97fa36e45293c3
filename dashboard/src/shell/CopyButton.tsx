/** Copies a text, and says so for a moment. */

import { useEffect, useState } from "react";

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
