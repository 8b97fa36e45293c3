/** Values that follow the clock: for what has no events of its own, and for what would be read too often. */

import { useEffect, useRef, useState } from "react";

/** Returns a number that grows every `ms` and when the page is seen again; it stands still when not `active`. */
export function useTick(ms: number, active = true): number {
  const [tick, setTick] = useState(0);
  useEffect(() => {
    if (!active) return;
    const look = () => document.visibilityState === "visible" && setTick((old) => old + 1);
    const timer = setInterval(look, ms);
    document.addEventListener("visibilitychange", look);
    return () => {
      clearInterval(timer);
      document.removeEventListener("visibilitychange", look);
    };
  }, [ms, active]);
  return tick;
}

const OPENED_MS = 30_000;

/** Returns a version for what no event tells about: a component that is opened reads it again, twice a minute at most. */
export const useOpened = (): number => useState(() => Math.floor(Date.now() / OPENED_MS))[0];

/** Returns the newest value, at most once per `ms`. */
export function useThrottled<T>(value: T, ms: number): T {
  const [shown, setShown] = useState(value);
  const changed = useRef(0);
  useEffect(() => {
    if (value === shown) return;
    const wait = Math.max(0, changed.current + ms - Date.now());
    const timer = setTimeout(() => {
      changed.current = Date.now();
      setShown(value);
    }, wait);
    return () => clearTimeout(timer);
  }, [value, shown, ms]);
  return shown;
}
