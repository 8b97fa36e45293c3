"""What workers report of their sandboxes becomes rows of the record."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from telescope.record.convert import Batch
from telescope.rollout import sandbox_rows
from telescope.rollout.sandbox_rows import SandboxRecord, sandbox_news
from telescope.sandbox import ExecResult, SandboxBusyError, SandboxConfig, SandboxHandle, SandboxProvider
from telescope.sandbox import activity as activity_module
from telescope.sandbox.activity import CURRENT, SAMPLE, Activity


class Service(SandboxProvider):
    """A service that has room for `room` sandboxes."""

    name = "service"

    def __init__(self, room: int) -> None:
        self.room = room

    async def create(self, config: SandboxConfig) -> SandboxHandle:
        if not self.room:
            raise SandboxBusyError("no room")
        self.room -= 1
        return SandboxHandle(f"s{self.room}")

    async def execute(
        self, handle: SandboxHandle, command: str, timeout: float = 60, working_dir: str | None = None
    ) -> ExecResult:
        await asyncio.sleep(float(command))
        return ExecResult(0, "", "")

    async def upload_bytes(self, handle: SandboxHandle, remote_path: str, content: bytes) -> None:
        return None

    async def destroy(self, handle: SandboxHandle) -> None:
        return None


@pytest.fixture
def activity() -> Iterator[Activity]:
    activity = Activity()
    token = CURRENT.set(activity)
    yield activity
    CURRENT.reset(token)


Gauges = dict[tuple[str, ...], float]


class Rows:
    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.gauges: Gauges = {}
        """The newest of each name and labels."""

    def write(self, table: str, row: dict[str, Any] | Batch) -> None:
        if isinstance(row, Batch):
            self.spans += row.rows.to_pylist(maps_as_pydicts="strict")
        else:
            assert table == "gauges" and row["component"] == "sandbox"
            self.gauges[row["name"], *row["labels"].values()] = row["value"]


async def test_calls_are_spans_and_failures_are_counted_by_their_kind(activity):
    service, rows = Service(room=1), Rows()
    record = SandboxRecord(rows.write)
    SAMPLE.set("7-1")
    handle = await service.create(SandboxConfig())
    with pytest.raises(SandboxBusyError):
        await service.create(SandboxConfig())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(service.execute(handle, "60"), 0.01)
    await service.upload_bytes(handle, "/a", b"")
    service.destroy_sync(handle)  # in a thread of its own
    record.add(3, sandbox_news(activity, 3))
    record.write_gauges()
    found = [(span["name"], span["sample_id"], span["attributes"]) for span in rows.spans]
    used = {"provider": "service", "sandbox": "s0", "worker": "3"}
    assert found == [
        ("create", "7-1", used),
        ("create", "7-1", {"provider": "service", "error": "SandboxBusyError", "worker": "3"}),
        ("exec", "7-1", {**used, "error": "CancelledError"}), ("upload", "7-1", used), ("destroy", "7-1", used),
    ]  # fmt: skip
    # What the user of a sandbox gave up is no failure of it.
    assert rows.gauges == {
        ("sandboxes_alive", "service"): 0.0,
        ("sandbox_creates_total", "service"): 1.0,
        ("sandbox_execs_total", "service"): 0.0,
        ("sandbox_failures_total", "service", "create", "SandboxBusyError"): 1.0,
    }


async def test_gauges_are_sums_over_workers_without_those_that_were_lost(activity):
    rows = Rows()
    record, service = SandboxRecord(rows.write), Service(room=9)
    assert sandbox_news(activity, 0) is None
    for worker in (0, 1):
        await service.create(SandboxConfig())
        record.add(worker, sandbox_news(activity, worker))
    record.write_gauges()
    assert rows.gauges[("sandboxes_alive", "service")] == 3.0, "one in the first report, two in the second"
    record.lost(1)
    record.write_gauges()
    assert rows.gauges[("sandboxes_alive", "service")] == 1.0
    assert rows.gauges[("sandbox_creates_total", "service")] == 2.0


async def test_without_sandboxes_nothing_is_written_and_with_them_gauges_in_intervals(activity, monkeypatch):
    written: list[str] = []
    record = SandboxRecord(lambda table, row: written.append(table))
    monkeypatch.setattr(sandbox_rows, "GAUGE_SECONDS", 0.0)
    record.add(0, sandbox_news(activity, 0))
    record.write_gauges()
    assert written == []
    monkeypatch.setattr(sandbox_rows, "GAUGE_SECONDS", 60.0)
    await Service(room=1).create(SandboxConfig())
    for _ in range(9):
        record.add(0, sandbox_news(activity, 0))
    assert written == ["spans", "gauges", "gauges", "gauges"], "how many are alive, creations, commands"


async def test_calls_beyond_the_limit_of_spans_are_still_counted(activity, monkeypatch):
    monkeypatch.setattr(activity_module, "MAX_SPANS", 2)
    rows = Rows()
    record, service = SandboxRecord(rows.write), Service(room=5)
    for _ in range(5):
        await service.create(SandboxConfig())
    record.add(0, sandbox_news(activity, 0))
    record.write_gauges()
    assert len(rows.spans) == 2
    assert (rows.gauges["sandboxes_alive", "service"], rows.gauges["sandbox_creates_total", "service"]) == (5.0, 5.0)
