/** Lines under the header of a run: what its pages lack, or may show as it was. */

import { useEffect, useState } from "react";
import { runPath } from "../api";
import { megabytes } from "../format";
import { useResource } from "../state/resource";
import { visible } from "../text/hostile";
import type { RemoteCopy, RunInfo } from "../types";

/** Returns what to say about a copy; null when it is complete and new. */
export function remoteWords({ phase, source, done_bytes, total_bytes, message }: RemoteCopy): string | null {
  if (phase === "syncing") return `Copying from ${source}, ${megabytes(done_bytes, total_bytes)}`;
  if (phase === "listed") return `Copying from ${source}`;
  if (message === null) return null;
  return phase === "failed" ? message : `Copied from ${source} earlier. ${message}`;
}

/** The line of a run on W&B: how much of it is copied, or why the copy may be old. */
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

/** Returns what to say about a record: files that could not be read, and that another version wrote it. */
export function recordWords({ unreadable, attempts, version }: Pick<RunInfo, "unreadable" | "attempts" | "version">): string[] {
  const written = attempts.at(-1)?.versions.telescope;
  const files = unreadable.length === 1 ? "1 file of its record cannot be read, and its rows are missing" : `${unreadable.length} files of its record cannot be read, and their rows are missing`;
  return [
    ...(unreadable.length > 0 ? [`${files}: ${unreadable.map(visible).join(", ")}`] : []),
    ...(written && written !== version ? [`Telescope ${visible(written)} wrote this run; version ${version} shows it`] : []),
  ];
}

/** When the list of damaged files is fetched again: the server finds them while it reads for a page, on a slow disk for up to half a minute. */
const READ_AGAIN_MS = [500, 2_500, 10_000, 30_000];

/** The line of a run whose record is damaged, or of another version. */
export function RecordStrip({ run, page }: { run: string; page: string }) {
  const [read, setRead] = useState("");
  useEffect(() => {
    const timers = READ_AGAIN_MS.map((ms) => setTimeout(() => setRead(`${page} ${ms}`), ms));
    return () => timers.forEach(clearTimeout);
  }, [page]);
  const info = useResource<RunInfo>(runPath(run), {}, `after ${read}`).data;
  const words = info ? recordWords(info) : [];
  if (!info || words.length === 0) return null;
  return (
    <p className={`remote ${info.unreadable.length > 0 ? "bad" : ""}`} role="status">
      {words.join(". ")}.
    </p>
  );
}
