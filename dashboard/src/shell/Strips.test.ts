import { expect, test } from "vitest";
import type { Attempt, RemoteCopy } from "../types";
import { recordWords, remoteWords } from "./Strips";

const copy: RemoteCopy = { phase: "synced", source: "W&B me/p", done_bytes: 0, total_bytes: 0, message: null };

test("a copy that is complete and new says nothing", () => {
  expect(remoteWords(copy)).toBeNull();
});

test("a copy that comes says how much of it is here", () => {
  expect(remoteWords({ ...copy, phase: "listed" })).toBe("Copying from W&B me/p");
  expect(remoteWords({ ...copy, phase: "syncing", done_bytes: 12e6, total_bytes: 40e6 })).toBe("Copying from W&B me/p, 12 of 40 MB");
  expect(remoteWords({ ...copy, phase: "syncing", done_bytes: 250_000, total_bytes: 2e6 })).toContain("0.3 of 2.0 MB");
});

test("a copy that cannot be made or renewed says why", () => {
  expect(remoteWords({ ...copy, phase: "failed", message: "This run has no record on W&B." })).toBe("This run has no record on W&B.");
  expect(remoteWords({ ...copy, message: "W&B cannot be reached." })).toBe("Copied from W&B me/p earlier. W&B cannot be reached.");
});

test("damaged files are named, and so is another version", () => {
  const attempts = [{ versions: { telescope: "0.0.9" } }] as unknown as Attempt[];
  expect(recordWords({ unreadable: [], attempts, version: "0.0.9" })).toEqual([]);
  expect(recordWords({ unreadable: ["tables/steps/a.parquet"], attempts, version: "0.1.0" })).toEqual([
    "1 file of its record cannot be read, and its rows are missing: tables/steps/a.parquet",
    "Telescope 0.0.9 wrote this run; version 0.1.0 shows it",
  ]);
});
