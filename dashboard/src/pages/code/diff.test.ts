import { expect, test } from "vitest";
import { fileDiff, parseGitDiff } from "./diff";

const TEXT = `diff --git a/pkg/a.py b/pkg/a.py
index 1..2 100644
--- a/pkg/a.py
+++ b/pkg/a.py
@@ -4,3 +4,4 @@ def f():
 same
-old
+new
+more
\\ No newline at end of file
diff --git a/gone.txt b/gone.txt
deleted file mode 100644
--- a/gone.txt
+++ /dev/null
@@ -1 +0,0 @@
--- a line that began with dashes
diff --git a/logo.png b/logo.png
Binary files a/logo.png and b/logo.png differ
`;

test("lines have their numbers before and after", () => {
  expect(parseGitDiff(TEXT)[0]!.rows).toEqual([
    { kind: "hunk", old: null, new: null, text: "@@ -4,3 +4,4 @@ def f():" },
    { kind: "same", old: 4, new: 4, text: "same" },
    { kind: "removed", old: 5, new: null, text: "old" },
    { kind: "added", old: null, new: 5, text: "new" },
    { kind: "added", old: null, new: 6, text: "more" },
    { kind: "note", old: null, new: null, text: "No newline at end of file" },
  ]);
});

test("files of git have their names and counts", () => {
  expect(parseGitDiff(TEXT).map(({ path, added, removed }) => [path, added, removed])).toEqual([
    ["pkg/a.py", 2, 1],
    ["gone.txt", 0, 1],
    ["logo.png", 0, 0],
  ]);
  expect(parseGitDiff(TEXT)[2]!.rows[0]).toMatchObject({ kind: "note" });
  expect(parseGitDiff("diff --git a/a b.py b/a b.py\n--- a/a b.py\t\n+++ b/a b.py\t\n@@ -1 +1 @@\n-1\n+2\n")[0]!.path).toBe("a b.py");
  expect(parseGitDiff("")).toEqual([]);
});

test("a removed line of dashes is no header", () => {
  expect(fileDiff("a", "@@ -1 +0,0 @@\n--- x")).toMatchObject({ removed: 1, added: 0 });
});
