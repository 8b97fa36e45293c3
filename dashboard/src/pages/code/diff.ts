/** Unified diffs as rows: of git for several files, or the hunks of one. */

export interface DiffRow {
  kind: "hunk" | "added" | "removed" | "same" | "note";
  /** Line numbers before and after; null where there is none. */
  old: number | null;
  new: number | null;
  text: string;
}

interface FileDiff {
  path: string;
  added: number;
  removed: number;
  rows: DiffRow[];
}

const HUNK = /^@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@(.*)$/;

/** Returns the rows of hunks. */
export function hunkRows(text: string): DiffRow[] {
  const rows: DiffRow[] = [];
  let [before, after] = [0, 0];
  for (const line of text.split("\n")) {
    const hunk = HUNK.exec(line);
    if (hunk) {
      [before, after] = [Number(hunk[1]), Number(hunk[2])];
      rows.push({ kind: "hunk", old: null, new: null, text: line });
    } else if (line.startsWith("+")) rows.push({ kind: "added", old: null, new: after++, text: line.slice(1) });
    else if (line.startsWith("-")) rows.push({ kind: "removed", old: before++, new: null, text: line.slice(1) });
    else if (line.startsWith(" ")) rows.push({ kind: "same", old: before++, new: after++, text: line.slice(1) });
    else if (line) rows.push({ kind: "note", old: null, new: null, text: line.replace(/^\\ /, "") });
  }
  return rows;
}

/** Returns a diff with its counts. */
export function fileDiff(path: string, hunks: string): FileDiff {
  const rows = hunkRows(hunks);
  const number = (kind: DiffRow["kind"]) => rows.filter((row) => row.kind === kind).length;
  return { path, added: number("added"), removed: number("removed"), rows };
}

/** Returns the files of `git diff`. Its headers stay only where a file has no hunks: renamed, binary, another mode. */
export function parseGitDiff(text: string): FileDiff[] {
  return text
    .split(/^diff --git /m)
    .slice(1)
    .map((part) => {
      const [head = "", ...rest] = part.split("\n");
      const named = rest.find((line) => line.startsWith("+++ ") && line !== "+++ /dev/null") ?? rest.find((line) => line.startsWith("--- "));
      // Git ends the name with a tab if it has a blank.
      const path = named ? named.slice(4).replace(/^[ab]\//, "").replace(/\t$/, "") : (/ b\/(.*)$/.exec(head)?.[1] ?? head);
      const first = rest.findIndex((line) => line.startsWith("@@"));
      return fileDiff(path, (first >= 0 ? rest.slice(first) : rest).join("\n"));
    });
}
