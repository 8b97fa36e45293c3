/** A line under the header of a run on W&B: how much of it is copied, or why the copy may be old. */

import { megabytes } from "../format";
import type { RemoteCopy } from "../types";

/** Returns what to say about a copy; null when it is complete and new. */
export function remoteWords({ phase, source, done_bytes, total_bytes, message }: RemoteCopy): string | null {
  if (phase === "syncing") return `Copying from ${source}, ${megabytes(done_bytes, total_bytes)}`;
  if (phase === "listed") return `Copying from ${source}`;
  if (message === null) return null;
  return phase === "failed" ? message : `Copied from ${source} earlier. ${message}`;
}

export function RemoteStrip({ remote }: { remote: RemoteCopy }) {
  const words = remoteWords(remote);
  if (!words) return null;
  const share = remote.phase === "syncing" && remote.total_bytes > 0 ? remote.done_bytes / remote.total_bytes : 0;
  return (
    <p className={`remote ${remote.phase === "failed" ? "bad" : ""}`} role="status" title={words}>
      {words}
      <i style={{ width: `${100 * share}%` }} />
    </p>
  );
}
