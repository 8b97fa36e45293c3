"""A pool keeps sandboxes ready, replaces lost ones, and leaves none behind."""

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope import sandbox
from telescope.environments import _sandbox
from telescope.environments.i3_code.environment import I3CodeEnvironment
from telescope.errors import UserError
from telescope.sandbox import (
    ExecResult,
    GenericSandboxPool,
    SandboxBusyError,
    SandboxConfig,
    SandboxError,
    SandboxHandle,
    SandboxImagePullError,
    SandboxProvider,
)
from telescope.sandbox import pool as pool_module
from telescope.sandbox.ledger import DIRECTORY_VARIABLE, SandboxLedger, reap


class Service(SandboxProvider):
    """A service of sandboxes in memory. `failures` are raised by the next creates."""

    name = "service"
    alive: set[str] = set()  # noqa: RUF012 (a service outlives the processes that use it)
    labels: dict[str, str] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.num_created = self.num_creating = self.most_creating = 0
        self.seconds = 0.0
        self.undestroyable: set[str] = set()

    async def create(self, config: SandboxConfig) -> SandboxHandle:
        self.num_creating += 1
        self.most_creating = max(self.most_creating, self.num_creating)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.num_creating -= 1
        if self.failures:
            raise self.failures.pop(0)
        self.num_created += 1
        handle = SandboxHandle(f"s{self.num_created}")
        self.alive.add(handle.id)
        self.labels[handle.id] = config.extra["run"]
        return handle

    async def execute(
        self, handle: SandboxHandle, command: str, timeout: float = 60, working_dir: str | None = None
    ) -> ExecResult:
        return ExecResult(0 if handle.id in self.alive else 1, "", "")

    async def upload_bytes(self, handle: SandboxHandle, remote_path: str, content: bytes) -> None:
        raise AssertionError

    async def destroy(self, handle: SandboxHandle) -> None:
        if handle.id in self.undestroyable:
            raise SandboxError("the service does not answer")
        self.alive.discard(handle.id)

    async def find(self, run: str) -> list[SandboxHandle]:
        return [SandboxHandle(name) for name in self.alive if self.labels[name] == run]


@pytest.fixture(autouse=True)
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Service:
    monkeypatch.setattr(pool_module, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "run"))
    Service.alive.clear()
    return Service()


def rows(tmp_path: Path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "run" / "sandboxes.jsonl").read_text().splitlines()]


async def started(service: Service, size: int = 2, **options) -> GenericSandboxPool:
    pool = GenericSandboxPool(service, SandboxConfig(), size, **options)
    await pool.start()
    return pool


async def test_at_most_pool_size_sandboxes_exist_however_many_ask(service):
    pool = await started(service, 3, reuse=False)
    most = 0

    async def use() -> None:
        nonlocal most
        handle = await pool.acquire()
        assert handle.id in service.alive and handle in pool.in_use_sandboxes
        most = max(most, len(pool.in_use_sandboxes))
        await asyncio.sleep(0.005)
        await pool.release(handle)

    await asyncio.gather(*(use() for _ in range(30)))
    assert most == 3
    await pool.shutdown()
    assert not service.alive


async def test_a_released_sandbox_is_used_again_only_with_reuse(service):
    for reuse, expected in ((True, 1), (False, 2)):
        pool = await started(service, 1, reuse=reuse)
        before = service.num_created
        first = await pool.acquire()
        await pool.release(first)
        await pool.release(first)  # twice is once
        assert ((await pool.acquire()) is first) is reuse
        assert service.num_created - before == expected - 1
        await pool.shutdown()


async def test_every_sandbox_is_noted_before_its_use_and_after_its_end(service, tmp_path):
    pool = await started(service, 2)
    handle = await pool.acquire()
    assert {row["id"] for row in rows(tmp_path)} >= {handle.id}
    await pool.shutdown()
    noted = rows(tmp_path)
    assert {row["id"] for row in noted if row.get("destroyed")} == {row["id"] for row in noted}


async def test_a_refused_create_is_tried_again_and_others_are_not(service):
    service.failures = [SandboxBusyError("slow down"), SandboxBusyError("slow down")]
    pool = await started(service, 1)
    await pool.shutdown()
    service.failures = [SandboxImagePullError("no such image"), SandboxImagePullError("no such image")]
    with pytest.raises(SandboxImagePullError, match="no such image"):
        await started(service, 1)
    assert not service.alive


async def test_an_error_that_every_creation_has_is_raised_once_beside_no_warning(service, caplog):
    service.failures = [SandboxImagePullError("no such image") for _ in range(4)]
    with pytest.raises(SandboxImagePullError, match="no such image"):
        await started(service, 4)
    assert not caplog.records


async def test_a_lost_sandbox_is_replaced_before_anybody_gets_it(service, monkeypatch):
    monkeypatch.setattr(pool_module, "CHECK_SECONDS", 0.0)
    pool = await started(service, 1)
    (lost,) = pool.all_sandboxes
    service.alive.discard(lost.id)
    handle = await pool.acquire()
    assert handle is not lost and handle.id in service.alive
    await pool.shutdown()


async def test_a_sandbox_that_ended_in_use_is_not_handed_out_again(service):
    pool = await started(service, 1, reuse=True)
    lost = await pool.acquire()
    service.alive.discard(lost.id)
    await pool.release(lost)
    handle = await pool.acquire()
    assert handle is not lost and handle.id in service.alive
    await pool.shutdown()


async def test_a_sandbox_near_its_end_is_replaced(service):
    pool = await started(service, 1)
    (old,) = pool.all_sandboxes
    pool.all_sandboxes[old] -= pool.config.timeout_seconds * 0.8
    assert await pool.acquire() is not old
    await pool.shutdown()


async def test_waiting_in_vain_is_an_error_with_the_field(service):
    pool = await started(service, 1)
    await pool.acquire()
    with pytest.raises(SandboxError, match=r"1 of 1 are in use\. Raise pool_size"):
        await pool.acquire(timeout=0.01)
    await pool.shutdown()
    with pytest.raises(SandboxError, match="has not started, or has ended"):
        await pool.acquire()
    service.seconds = 0.05  # for each of two, one after the other
    pool = GenericSandboxPool(service, SandboxConfig(), 2, max_concurrent_creates=1)
    await pool.start()
    await pool.acquire()
    with pytest.raises(SandboxError, match=r"1 of 2 are in use\. The others are not created yet"):
        await pool.acquire(timeout=0.001)
    await pool.shutdown()


async def test_creates_are_bounded_in_number_and_rate(service, monkeypatch):
    service.seconds = 0.01
    pool = await started(service, 12, max_concurrent_creates=3)
    await asyncio.gather(*(pool.acquire() for _ in range(12)))
    assert service.most_creating == 3
    await pool.shutdown()
    slept: list[float] = []
    sleep = asyncio.sleep

    async def no_sleep(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(Service, "creates_per_second", 0.5)
    monkeypatch.setattr(pool_module.asyncio, "sleep", no_sleep)
    pool = await started(service, 4)
    await asyncio.gather(*(pool.acquire() for _ in range(4)))
    assert [round(seconds) for seconds in sorted(slept)[-3:]] == [2, 4, 6]
    await pool.shutdown()


async def test_a_cancelled_wait_takes_no_sandbox(service):
    pool = await started(service, 1)
    handle = await pool.acquire()
    waiting = asyncio.ensure_future(pool.acquire())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await pool.release(handle)
    assert await pool.acquire(timeout=1) is handle
    await pool.shutdown()


async def test_reap_destroys_by_id_and_by_label(service, tmp_path, monkeypatch):
    pool = await started(service, 2, reuse=False)
    await pool.acquire()
    await pool.acquire()
    service.alive.add("created while its process was killed")
    service.labels["created while its process was killed"] = pool.ledger.run
    service.alive.add("of another run")
    service.labels["of another run"] = "other"
    monkeypatch.setattr("telescope.sandbox.ledger.get_provider", lambda _: service)
    destroyed = await reap(tmp_path / "run")
    assert len(destroyed) == 3 and service.alive == {"of another run"}
    file = tmp_path / "run" / "sandboxes.jsonl"
    file.write_text(file.read_text() + '{"id": "half a li')  # of a process that was killed
    assert await reap(tmp_path / "run") == []


async def test_a_sandbox_that_cannot_be_destroyed_stays_in_the_ledger(service, tmp_path):
    pool = await started(service, 1)
    handle = await pool.acquire()
    service.undestroyable.add(handle.id)
    await pool.shutdown()
    assert not any(row.get("destroyed") for row in rows(tmp_path))


async def test_one_that_cannot_be_reaped_keeps_no_other(service, tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    pool = GenericSandboxPool(service, SandboxConfig(), 2)
    await pool.start()
    handles = [await pool.acquire(), await pool.acquire()]

    async def destroy(self: Service, handle: SandboxHandle) -> None:
        if handle.id == handles[0].id:
            raise RuntimeError("an error of a provider's own")
        self.alive.discard(handle.id)

    async def find(self: Service, run: str) -> list[SandboxHandle]:
        raise SandboxError("labels do not answer")

    monkeypatch.setattr(Service, "destroy", destroy)
    monkeypatch.setattr(Service, "find", find)
    assert await reap(tmp_path) == [f"service {handles[1].id}"]


async def test_all_that_wait_hear_of_a_service_that_fails(service):
    pool = GenericSandboxPool(service, SandboxConfig(), 1)
    await pool.start()
    handle = await pool.acquire()
    waiting = [asyncio.ensure_future(pool.acquire()) for _ in range(3)]
    await asyncio.sleep(0.01)
    service.failures = [SandboxImagePullError("no image")] * 3
    await pool.remove(handle)
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
    assert [type(result) for result in results] == [SandboxImagePullError] * 3
    await pool.shutdown()


async def test_one_that_waits_hears_of_the_end(service):
    pool = GenericSandboxPool(service, SandboxConfig(), 1)
    await pool.start()
    await pool.acquire()
    waiting = asyncio.ensure_future(pool.acquire())
    await asyncio.sleep(0.01)
    await pool.shutdown()
    with pytest.raises(SandboxError, match="has ended"):
        await asyncio.wait_for(waiting, 5)


async def test_one_that_waits_for_a_check_hears_of_the_end(service, monkeypatch):
    monkeypatch.setattr(pool_module, "CHECK_SECONDS", 0.0)
    pool = await started(service, 1)
    ended = asyncio.Event()

    async def is_alive(_: SandboxHandle) -> bool:
        return await ended.wait() and False

    monkeypatch.setattr(service, "is_alive", is_alive)
    waiting = asyncio.ensure_future(pool.acquire())
    await asyncio.sleep(0)
    await pool.shutdown()
    ended.set()
    with pytest.raises(SandboxError, match="has ended"):
        await asyncio.wait_for(waiting, 5)


async def test_a_full_disk_neither_leaks_nor_refuses_a_sandbox(service, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "file"))
    pool = await started(service, 2)
    await pool.acquire()
    await pool.shutdown()
    assert not service.alive
    assert len([record for record in caplog.records if "not listed" in record.message]) == 1


@pytest.mark.parametrize("values", [
    {"cpu": float("inf")}, {"memory_mb": 0}, {"timeout_seconds": float("nan")}, {"environment_vars": {"A=B": "x"}},
    {"environment_vars": {"A": "x\0y"}}, {"environment_vars": {"": "x"}}, {"docker_image": "debian"},
    {"memory_mb": "2048"}, {"cpu": None}, {"gpu_count": "1"},
])  # fmt: skip
def test_what_no_sandbox_can_have_is_refused(values):
    with pytest.raises(UserError, match=next(iter(values))):
        SandboxConfig(**values)


def test_classes_of_providers_have_both_import_paths():
    assert sandbox.E2BSandboxProvider is _sandbox.E2BSandboxProvider
    assert not hasattr(_sandbox, "NoSandboxProvider")


def test_an_environment_names_its_argument_for_a_field_of_the_configuration():
    with pytest.raises(UserError, match="'timeout_minutes'"):
        I3CodeEnvironment(dataset="own", timeout_seconds=60)


@pytest.mark.parametrize(
    ("provider", "option", "hint"),
    [("docker", "netwrok", "Did you mean 'network'[?]"), ("local", "snapshot", "It takes:")],
)
def test_an_option_that_a_provider_does_not_have_is_refused(provider, option, hint):
    with pytest.raises(UserError, match=f"extra of {provider!r} has no keyword argument {option!r}.*{hint}"):
        I3CodeEnvironment(dataset="own", provider=provider, extra={option: True})


@pytest.mark.parametrize("field", ["pool_size", "max_concurrent_creates"])
def test_a_size_of_zero_is_refused(service, field):
    with pytest.raises(UserError, match=f"{field}=0"):
        GenericSandboxPool(service, SandboxConfig(), **{field: 0})


@given(st.lists(st.sampled_from(["acquire", "release", "remove", "lose", "cancel"]), max_size=30), st.booleans())
@settings(max_examples=50, deadline=None)
def test_whatever_happens_nothing_is_left_and_nothing_is_shared(actions, reuse):
    async def scenario() -> None:
        service = Service()
        pool = await started(service, 3, reuse=reuse)
        held: list[SandboxHandle] = []
        for action in actions:
            if action in ("acquire", "cancel"):
                taking = asyncio.ensure_future(pool.acquire(timeout=0.005))
                if action == "cancel":
                    await asyncio.sleep(0)
                    taking.cancel()
                taken = (await asyncio.gather(taking, return_exceptions=True))[0]
                if isinstance(taken, SandboxHandle):
                    assert taken not in held
                    held.append(taken)
            elif held and action == "lose":
                service.alive.discard(held[-1].id)
            elif held:
                await (pool.release if action == "release" else pool.remove)(held.pop())
            assert len(pool.all_sandboxes) <= 3
        await pool.shutdown()
        assert not service.alive

    Service.alive.clear()
    asyncio.run(scenario())


def test_without_a_run_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv(DIRECTORY_VARIABLE)
    ledger = SandboxLedger.of_process()
    ledger.closed(SandboxHandle("s1"))
    assert ledger.run == "" and list(ledger.rows()) == []


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "described"),
    [(3, "", "", "`agent --all` ended with exit code 3"),
     (255, "", "no key", "`agent --all` ended with exit code 255: no key"),
     (137, "", "", "`agent --all` was killed by SIGKILL"),
     (1, "the reason", "\x1b[31ma warning\x1b[0m", "`agent --all` ended with exit code 1: the reason\na warning")],
)  # fmt: skip
def test_a_command_that_failed_is_described_by_its_end_and_all_that_it_printed(code, stdout, stderr, described):
    assert pool_module._describe_failure("agent --all", sandbox.ExecResult(code, stdout, stderr)) == described
