/** Dark, light or as the system says; from the address, else as chosen last. */

import { useSyncExternalStore } from "react";
import { setParams, usePlace } from "./url";

export const THEMES = ["system", "light", "dark"] as const;
export type Theme = (typeof THEMES)[number];
const KEY = "telescope.theme";

const system = typeof matchMedia === "undefined" ? null : matchMedia("(prefers-color-scheme: dark)");

function useSystemDark(): boolean {
  return useSyncExternalStore(
    (listener) => {
      system?.addEventListener("change", listener);
      return () => system?.removeEventListener("change", listener);
    },
    () => system?.matches ?? false,
  );
}

const known = (text: string | null | undefined): Theme | null => THEMES.find((theme) => theme === text) ?? null;

/** Returns what the storage holds; null where a browser refuses it, as in a frame of another site. */
function stored<T>(use: () => T): T | null {
  try {
    return use();
  } catch {
    return null;
  }
}

/** Returns the chosen theme and whether the page is dark, and sets the document to it. */
export function useTheme(): { theme: Theme; dark: boolean } {
  const theme = known(usePlace().params.theme) ?? known(stored(() => localStorage.getItem(KEY))) ?? "system";
  const systemDark = useSystemDark();
  const dark = theme === "dark" || (theme === "system" && systemDark);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  return { theme, dark };
}

export function setTheme(theme: Theme): void {
  stored(() => localStorage.setItem(KEY, theme));
  setParams({ theme });
}

/** Font of text on canvases, as the token `--sans`. */
export const FONT = '12px -apple-system, "Segoe UI", Inter, Roboto, system-ui, "Noto Sans", sans-serif';

const colors = new Map<string, string>();

/** Returns a color token's value in the present theme, for canvases: `color("--c1")`. */
export function color(token: string): string {
  const key = `${document.documentElement.dataset.theme}${token}`;
  let value = colors.get(key);
  if (value === undefined) {
    value = getComputedStyle(document.documentElement).getPropertyValue(token).trim();
    colors.set(key, value);
  }
  return value;
}
