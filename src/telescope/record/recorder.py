"""Writes a run's record in its own thread.

    any thread --write--> PendingRows --every flush_seconds--> files of tables   (one thread, their only writer)
                          (bounded)                            in_flight.json, heartbeat.json

Owns the thread, the pending rows, the moment when files end, and the behavior when the disk fails. Does not own the
format of the files (`table_files`, `table_writer`) or the meaning of rows (`tables`).

Invariants:
- `write` neither blocks nor fails because of the disk: a run never waits for its record.
- Memory is bounded. Past the bound, rows are dropped and counted: telemetry first, then turns, then samples and groups;
  runs, attempts and steps never (`tables.Keep`).
- Flushed rows survive a kill of the process; at most the rows of the last `flush_seconds` are lost.
- A failing disk is reported once, and once more when it works again; rows wait in memory meanwhile.
- One process writes a run directory. A second one is refused.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from telescope.errors import UserError
from telescope.record.convert import Batch
from telescope.record.files import ProcessIdentity, RunFiles, WriterLock, overwrite_json, read_heartbeat, replace_json
from telescope.record.pending import PendingRows, Row
from telescope.record.run_info import HEARTBEAT_SECONDS
from telescope.record.table_writer import TableWriter
from telescope.record.tables import COLUMN_NAMES, ROLLOUT_TABLES, TABLES, Keep

logger = logging.getLogger(__name__)

REPORTED = {"is_reported": True}
"""The `extra` of a log line whose alert is reported separately, here by `RunDirectory.record_news`. Other warnings are
alerts by themselves."""

CHUNK_ROWS = 8_192
CHUNK_BYTES = 16 * 2**20
"""Most rows and bytes that are converted at once. Bounds the memory of a conversion and the work of a retry."""

BLOCK_BYTES = 32 * 2**20
"""Bytes of uncompressed rows that always become a block. Bounds the memory of writing a block and of reading tails."""

MAX_TAILS = 64
"""Number of tails that always become a block."""

MAX_ROLLOUT_BLOCKS = 16
"""A block of rollouts has at least 1 / `MAX_ROLLOUT_BLOCKS` of all samples so far, so that a long run has few files."""

CLOSING_SECONDS = 1.0
"""Seconds that `close` reserves for releasing the directory."""

MAX_RETRY_SECONDS = 30.0
"""Longest time between two attempts to write while the disk fails. The shortest is one flush interval."""


class Recorder:
    """Writes a run's tables. Close it, or use it as a context manager.

    `tail_seconds`, `block_seconds` and `block_rollouts` limit the files of tables, see `docs/record.md`.
    Raises `UserError` if another process writes this run directory. Disk errors never raise.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        attempt: int = 1,
        flush_seconds: float = 2.0,
        tail_seconds: float = 60.0,
        block_seconds: float = 1800.0,
        block_rollouts: int = 500,
        max_pending_rows: int = 50_000,
        max_pending_bytes: int = 256 * 2**20,
    ) -> None:
        self.files = RunFiles(run_dir)
        self.attempt = attempt
        self._flush_seconds = flush_seconds
        self.tail_seconds, self.block_seconds, self.block_rollouts = tail_seconds, block_seconds, block_rollouts
        self._pending = PendingRows(max_pending_rows, max_pending_bytes)
        self._wake_rows = max(1, max_pending_rows // 4)
        self._wake_bytes = max(1, max_pending_bytes // 4)
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._flushed = threading.Condition(self._lock)
        self._num_flushes_requested = 0
        self._num_flushes_done = 0
        self._closing = False
        self._closing_deadline = float("inf")
        self._small_files: dict[Path, Any] = {}
        self.now: Callable[[], Mapping[str, Any]] | None = None
        """Its result is written to `now.json` at every flush. Called in the recorder's thread."""
        self.error: str | None = None
        """Why nothing can be written now, or None."""
        self._reported_drops = 0
        self._writers: dict[str, TableWriter] = {}
        self._heartbeat_due = 0.0
        self.earlier_heartbeat: float | None = (read_heartbeat(self.files.run_dir) or {}).get("time")
        """Unix time at which an earlier process last wrote this run, or None."""
        self._logged_once: set[str] = set()
        self._keys_written: set[int] = set()
        """Hashes of the keys on disk of tables that are written `once`."""
        self._identity = ProcessIdentity.current()
        self._writer_lock = WriterLock(self.files)
        try:
            self._writer_lock.acquire()
        except OSError as error:
            self._note_failure(error)
        self._thread = threading.Thread(target=self._run, name="telescope-recorder", daemon=True)
        self._thread.start()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def write(self, table: str, row: Mapping[str, Any] | Batch) -> None:
        """Adds one row, or a batch with the columns of the table. Thread-safe; returns at once.

        Copies the row and its dictionaries, but not its lists. Fills in `attempt`. Missing columns are null. For tables
        that are written `once`, later rows with the same key are ignored. Raises `ValueError` for an unknown table or
        column. After `close`, telemetry is ignored and any other row counts as dropped.
        """
        columns = COLUMN_NAMES.get(table)
        if columns is None:
            raise ValueError(f"no table {table!r} in the record; there are {', '.join(TABLES)}")
        copy: Row
        if isinstance(row, Batch):
            copy = row._replace(attempt=self.attempt)
        else:
            copy = {key: dict(value) if type(value) is dict else value for key, value in row.items()}
            if not copy.keys() <= columns:
                unknown = ", ".join(sorted(copy.keys() - columns))
                raise ValueError(f"table {table!r} has no column {unknown}; see record/tables.toml")
            if "attempt" in columns:
                copy.setdefault("attempt", self.attempt)
            if TABLES[table].once and _hash_of_key(table, copy) in self._keys_written:
                return
        with self._lock:
            if self._closing:
                self._pending.dropped[table] += TABLES[table].keep > Keep.TELEMETRY
                return
            self._pending.add(table, copy)
            urgent = self._pending.num_rows >= self._wake_rows or self._pending.num_bytes >= self._wake_bytes
            if urgent and self.error is None:
                self._wake.set()

    def set_in_flight(self, rows: list[dict[str, Any]]) -> None:
        """Replaces the list of samples in flight, rows of `samples`. Returns at once."""
        self.replace_json(self.files.in_flight, {"attempt": self.attempt, "time": time.time(), "rows": rows})

    def replace_json(self, path: Path, value: Any) -> None:
        """Replaces a small JSON file at the next flush. Returns at once.

        Earlier rows are written first. The caller must not change `value` afterwards. Only the last value for a path is
        written.
        """
        with self._lock:
            self._small_files[path] = value

    def flush(self, timeout: float = 30.0) -> bool:
        """Waits until every row written before this call is on disk. Returns False after `timeout` seconds."""
        with self._flushed:
            self._num_flushes_requested += 1
            ticket = self._num_flushes_requested
            self._wake.set()
            return self._flushed.wait_for(lambda: self._num_flushes_done >= ticket, timeout)

    @property
    def dropped(self) -> dict[str, int]:
        """The number of rows dropped so far, by table."""
        with self._lock:
            return {name: count for name, count in self._pending.dropped.items() if count}

    def close(self, timeout: float = 30.0) -> bool:
        """Writes pending rows, turns tails into blocks, and ends the thread. Returns whether every row is on disk.

        Waits at most `timeout` seconds. After that, a hanging disk blocks only the daemon thread. May be called again.
        """
        with self._lock:
            self._closing = True
            self._closing_deadline = min(self._closing_deadline, time.monotonic() + timeout)
            self._wake.set()
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.error(
                "The record of %s is incomplete: its disk does not respond after %g s", self.files.run_dir, timeout
            )
            return False
        return self._pending.num_rows == 0 and not self.dropped

    # The methods below run in the recorder's thread.

    def _run(self) -> None:
        retry_seconds = 0.0  # The first cycle starts at once, to create the folder and the heartbeat.
        while True:
            self._wake.wait(retry_seconds)
            self._wake.clear()
            with self._lock:
                closing, ticket, cut = self._closing, self._num_flushes_requested, self._pending.cut()
            if self._cycle(cut):
                retry_seconds = self._flush_seconds
                with self._flushed:
                    self._num_flushes_done = ticket
                    self._flushed.notify_all()
            else:
                retry_seconds = min(max(2 * retry_seconds, self._flush_seconds), MAX_RETRY_SECONDS)
            if closing:
                self._finish(cut)
                return

    def _cycle(self, cut: dict[str, int]) -> bool:
        """Flushes the rows before `cut` and ends files. Returns False if the disk failed, and keeps the rows."""
        try:
            self._writer_lock.acquire()
            if time.monotonic() >= self._heartbeat_due:
                value = {"time": time.time(), "attempt": self.attempt, "process": asdict(self._identity)}
                replace_json(self.files.heartbeat, value)
                self._heartbeat_due = time.monotonic() + HEARTBEAT_SECONDS
            for name in TABLES:
                self._flush_table(name, cut.get(name, 0))
            self._read_now()
            self._write_small_files()
        except (OSError, UserError) as error:
            self._note_failure(error)
            return False
        with self._lock:
            recovered, self.error = self.error is not None, None
        if recovered:
            logger.warning("The record of this run is written again.", extra=REPORTED)
        self._report_drops()
        self._end_files()
        return True

    def _flush_table(self, name: str, cut: int) -> None:
        while True:
            with self._lock:
                rows = self._pending.first(name, cut, CHUNK_ROWS, CHUNK_BYTES)
            if not rows:
                return
            new: dict[int, Row] = {}
            for row in rows if TABLES[name].once else ():
                if (key := _hash_of_key(name, row)) not in self._keys_written:
                    new.setdefault(key, row)
            try:
                if unwritten := list(new.values()) if TABLES[name].once else rows:
                    self._writer(name).append(unwritten)
                self._keys_written.update(new)  # only now, because a dropped row may be written again
            except OSError:
                raise
            except Exception:
                # The cause is these rows or a bug, not the disk. Keeping the rows would block the record forever.
                logger.exception("record: %d rows of table %s could not be written and are dropped", len(rows), name)
                with self._lock:
                    self._pending.drop(name, rows)
                continue
            with self._lock:
                self._pending.written(name, rows)

    def _end_files(self) -> None:
        """Ends tails and writes blocks that are due."""
        samples = self._writers.get("samples")
        least = max(self.block_rollouts, samples.num_rows // MAX_ROLLOUT_BLOCKS) if samples else 0
        enough_rollouts = samples is not None and samples.num_tail_rows >= least
        for name, writer in self._writers.items():
            try:
                if self._is_block_due(name, writer, enough_rollouts):
                    writer.close_block()
                else:
                    writer.end_tail(self.tail_seconds)
            except Exception as error:
                # For example, space is low. The rows are already in tails, and the next cycle tries again.
                self._log_once(f"block {name}", "record: a file of table %s cannot be ended: %s", name, error)

    def _is_block_due(self, name: str, writer: TableWriter, enough_rollouts: bool) -> bool:
        if not writer.num_tails:
            return False
        if writer.num_tail_bytes >= BLOCK_BYTES or writer.num_tails >= MAX_TAILS:
            return True
        if name in ROLLOUT_TABLES:
            return enough_rollouts
        return time.monotonic() - writer.tails_began >= self.block_seconds

    def _finish(self, cut: dict[str, int]) -> None:
        """Writes for the last time, with retries while time is left, then turns tails into blocks."""
        # No retry for a removed directory: it does not come back.
        while (
            self.error is not None
            and not self._writer_lock.is_removed
            and time.monotonic() + 1.0 < self._closing_deadline
        ):
            time.sleep(min(1.0, self._flush_seconds))
            self._cycle(cut)
        if self.error is not None:
            logger.error(
                "The record of %s is incomplete: %d rows could not be written (%s)",
                self.files.run_dir,
                self._pending.num_rows,
                self.error,
            )
            ended = self._small_files.get(self.files.run_json)
            if ended is not None and self._writer_lock.is_held:
                try:  # over the old run.json, so that the run is not listed as dead
                    overwrite_json(self.files.run_json, ended)
                except OSError as error:
                    logger.error("The end of the run cannot be written to %s: %s", self.files.run_json, error)
        else:
            self._close_blocks()
        self._report_drops()
        self._writer_lock.release()

    def _close_blocks(self) -> None:
        try:
            self.files.in_flight.unlink(missing_ok=True)
            self.files.now.unlink(missing_ok=True)
            for name in TABLES:
                if time.monotonic() > self._closing_deadline - CLOSING_SECONDS:
                    return
                if self.files.table(name).is_dir():
                    self._writer(name).close_block()
        except Exception as error:
            logger.warning("record: the tails of %s remain: %s", self.files.run_dir, error)

    def _writer(self, name: str) -> TableWriter:
        if name not in self._writers:
            self._writers[name] = TableWriter(TABLES[name], self.files.table(name))
        return self._writers[name]

    def _write_small_files(self) -> None:
        with self._lock:
            pending, self._small_files = self._small_files, {}
        while pending:
            path, value = next(iter(pending.items()))
            try:
                replace_json(path, value)
            except OSError:
                with self._lock:
                    self._small_files = pending | self._small_files
                raise
            except (TypeError, ValueError, RuntimeError) as error:
                self._log_once(str(path), "record: %s cannot be written as JSON: %s", path, error)
            del pending[path]

    def _read_now(self) -> None:
        if self.now is not None:
            try:
                self.replace_json(self.files.now, {"attempt": self.attempt, "time": time.time(), **self.now()})
            except Exception as error:  # the rows are worth more than this file
                self._log_once("now", "record: %s is not written: %r", self.files.now, error)

    def _note_failure(self, error: Exception) -> None:
        with self._lock:
            first = self.error is None
            self.error = str(error)
        if first:
            logger.error(
                "THE RECORD OF THIS RUN CANNOT BE WRITTEN: %s. The run continues and keeps its rows in memory (at most "
                "%d rows or %d MiB, then the least important rows are dropped). Free space in %s, make it writable, or "
                "restore it.",
                error,
                self._pending.max_rows,
                self._pending.max_bytes // 2**20,
                self.files.run_dir,
                extra=REPORTED,
            )

    def _report_drops(self) -> None:
        dropped = self.dropped
        total = sum(dropped.values())
        # Reports when the number has doubled and at the end, not at every flush.
        if total >= 2 * self._reported_drops + 1 or (self._closing and total > self._reported_drops):
            self._reported_drops = total
            counts = ", ".join(f"{count} of {name}" for name, count in sorted(dropped.items()))
            logger.warning("Rows dropped from the record of this run so far: %s", counts)

    def _log_once(self, what: str, message: str, *values: object) -> None:
        if what not in self._logged_once:
            self._logged_once.add(what)
            logger.warning(message, *values)


def _hash_of_key(table: str, row: Any) -> int:
    return hash((table, *(row.get(name) for name in TABLES[table].key)))
