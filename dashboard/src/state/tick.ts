/** A number that grows while the page is seen: the version of what has no events of its own. */

import { useEffect, useState } from "react";

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
