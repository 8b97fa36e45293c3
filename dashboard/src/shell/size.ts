import { useEffect, useRef, useState } from "react";

/** Returns the inner size of an element, 0 until it is known, and the ref to attach to it. */
export function useSize<E extends HTMLElement = HTMLDivElement>() {
  const host = useRef<E>(null);
  const [size, setSize] = useState({ width: 0, height: 0 });
  useEffect(() => {
    const observer = new ResizeObserver(() => setSize({ width: host.current!.clientWidth, height: host.current!.clientHeight }));
    observer.observe(host.current!);
    return () => observer.disconnect();
  }, []);
  return { host, ...size };
}
