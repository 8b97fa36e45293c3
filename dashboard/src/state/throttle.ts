/** A value that changes at most every so often: what is read anew with it costs the server less. */

import { useEffect, useRef, useState } from "react";

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
