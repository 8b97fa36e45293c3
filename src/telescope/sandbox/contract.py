"""Checks that every provider must pass. Tests and `telescope doctor --sandbox NAME` run them.

A check is a function over a `Trial` that raises `ContractError`. The first line of its docstring is the property that
it verifies.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import tracemalloc
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from telescope.sandbox.base import MAX_OUTPUT_BYTES, SandboxConfig, SandboxHandle, SandboxProvider
from telescope.sandbox.errors import SandboxCommandTimeoutError, SandboxError, SandboxNotRunningError

CHECK_SECONDS = 3600
"""Deadline of a check. A service may build an image first."""
CALL_SECONDS = 5
"""Time that a call may take in addition to its command, because of the network."""

MAX_CREATES_AT_ONCE = 32
CREATES_AT_ONCE = {"docker": 16, "podman": 16, "prime": 8, "daytona": 8, "e2b": 4}
"""How many sandboxes are created at once, where that is less than `MAX_CREATES_AT_ONCE`."""


class ContractError(Exception):
    """A provider breaks a promise of its interface."""


@dataclass
class Trial:
    """A provider under test, with one sandbox that the checks share."""

    provider: SandboxProvider
    config: SandboxConfig = field(default_factory=lambda: SandboxConfig(timeout_seconds=900))
    run: str = field(default_factory=lambda: f"contract-{uuid.uuid4().hex[:8]}")

    def __post_init__(self) -> None:
        variables = {"TELESCOPE_CONTRACT": "a 'quoted' $value"}
        self.config = replace(self.config, extra={**self.config.extra, "run": self.run}, environment_vars=variables)
        self.num_creates = CREATES_AT_ONCE.get(self.provider.name, MAX_CREATES_AT_ONCE)
        self._shared: SandboxHandle | None = None

    async def shared(self) -> SandboxHandle:
        """Returns the shared sandbox."""
        if self._shared is None:
            self._shared = await self.provider.create(self.config)
        return self._shared

    async def output(self, command: str, **options: Any) -> str:
        """Returns the output of a command in the shared sandbox."""
        result = await self.provider.execute(await self.shared(), command, **options)
        expect(result.exit_code == 0, f"{command!r} returned {result}")
        return result.stdout

    async def close(self) -> None:
        """Destroys the sandboxes that still run."""
        left = [handle for run in (self.run, f"{self.run}-label") for handle in await self.provider.find(run)]
        left += [self._shared] if self._shared else []  # last, because it knows more than its id
        await self.provider.bulk_destroy({handle.id: handle for handle in left}.values())
        await self.provider.close()


def expect(holds: object, found: str) -> None:
    """Raises `ContractError` if the condition is false."""
    if not holds:
        raise ContractError(found)


async def expect_none_left(trial: Trial, run: str) -> None:
    """Raises `ContractError` if sandboxes with a label remain, and destroys them."""
    for _ in range(60):  # services respond before they have destroyed the sandbox
        if not (left := await trial.provider.find(run)):
            return
        await asyncio.sleep(0.5)
    await trial.provider.bulk_destroy(left)
    raise ContractError(f"{len(left)} are left")


async def exit_codes(trial: Trial) -> None:
    """Exit codes come back, and a signal is 128 and its number."""
    handle = await trial.shared()
    commands = {"true": 0, "exit 1": 1, "exit 124": 124, "kill -9 $$": 137}
    for command, code in commands.items():
        result = await trial.provider.execute(handle, command)
        expect(result.exit_code == code, f"{command!r} returned {result.exit_code}")


async def streams(trial: Trial) -> None:
    """Standard output and standard error are apart, and Unicode survives."""
    result = await trial.provider.execute(await trial.shared(), "printf 'ä\\nb'; printf 'error\\n' >&2; exit 3")
    expect((result.exit_code, result.stdout, result.stderr) == (3, "ä\nb", "error\n"), str(result))


async def environment(trial: Trial) -> None:
    """Variables of the configuration are set."""
    found = await trial.output('printf %s "$TELESCOPE_CONTRACT"')
    expect(found == "a 'quoted' $value", found)


async def working_folder(trial: Trial) -> None:
    """A command runs in the folder that it names, and a folder that is missing is a failure."""
    found = await trial.output("mkdir -p '/tmp/a b' && cd '/tmp/a b' && pwd")
    expect(await trial.output("pwd", working_dir="/tmp/a b") == found, found)
    with contextlib.suppress(SandboxError):
        result = await trial.provider.execute(await trial.shared(), "pwd", working_dir="/tmp/missing")
        expect(result.exit_code != 0, f"a missing folder returned {result}")


async def long_command(trial: Trial) -> None:
    """A command of 200 kB runs."""
    found = await trial.output(f": '{'x' * 200_000}'; echo done")
    expect(found == "done\n", found[-200:])


async def files(trial: Trial) -> None:
    """Bytes come back from a file whose folders did not exist and whose name has spaces."""
    handle, path = await trial.shared(), "/tmp/new folder/deep/file 'name'.bin"
    content = bytes(range(256)) * 5000
    await trial.provider.upload_bytes(handle, path, content)
    expect(await trial.provider.read_bytes(handle, path) == content, "another content")
    await trial.provider.upload_bytes(handle, "relative/file", b"1")
    expect(await trial.output("cat relative/file") == "1", "a relative path is not below the working folder")


async def deadline(trial: Trial) -> None:
    """A command past its time limit is killed with its children within 2 seconds and raises a timeout."""
    handle, started = await trial.shared(), time.monotonic()
    late = "(while :; do date +%s >/tmp/alive; sleep 0.1; done) & trap '' TERM; while :; do sleep 0.1; done"
    try:
        result = await trial.provider.execute(handle, late, timeout=1)
    except SandboxCommandTimeoutError:
        seconds = time.monotonic() - started
        expect(seconds < 3 + CALL_SECONDS, f"it took {seconds:.1f} s")
    else:
        raise ContractError(f"it returned {result}")
    await trial.output("rm -f /tmp/alive; sleep 1; test ! -e /tmp/alive")


async def at_once(trial: Trial) -> None:
    """Two commands run at once in one sandbox."""
    await trial.shared()
    commands = [
        f"touch /tmp/at{own}; until [ -e /tmp/at{other} ]; do sleep 0.1; done; echo {own}"
        for own, other in ("12", "21")
    ]
    found = await asyncio.gather(*(trial.output(command, timeout=20) for command in commands))
    expect(found == ["1\n", "2\n"], str(found))


async def state(trial: Trial) -> None:
    """Files and background processes live on after a command, which does not wait for them."""
    started = time.monotonic()
    command = "rm -f /tmp/later; (while [ ! -e /tmp/stop ]; do sleep 0.1; done; echo yes >/tmp/later) & echo started"
    expect(await trial.output(f"rm -f /tmp/stop; {command}") == "started\n", "no output")
    expect(time.monotonic() - started < CALL_SECONDS, "it waited for a background process")
    found = await trial.output("touch /tmp/stop; for i in 1 2 3 4 5 6 7 8 9; do sleep 0.2; done; cat /tmp/later")
    expect(found == "yes\n", found)


async def output_flood(trial: Trial) -> None:
    """Output of 200 MB is cut in the middle, and takes little memory of this machine."""
    handle = await trial.shared()
    tracemalloc.start()
    try:
        result = await trial.provider.execute(handle, "echo first; head -c 200000000 /dev/zero | tr '\\0' x; echo last")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    expect(len(result.stdout) < MAX_OUTPUT_BYTES + 1000, f"{len(result.stdout)} characters")
    expect(result.stdout.startswith("first\n") and result.stdout.endswith("x" * 9 + "last\n"), "not both ends")
    expect("left out" in result.stdout, "nothing tells that the middle is missing")
    expect(peak < 16 * MAX_OUTPUT_BYTES, f"it took {peak >> 20} MiB")


async def no_network(trial: Trial) -> None:
    """There is no network unless it is asked for."""
    connect = "bash -c 'exec 3<>/dev/tcp/1.1.1.1/443'"
    try:
        result = await trial.provider.execute(await trial.shared(), f"command -v bash && {connect}", timeout=5)
        expect(result.exit_code != 0, "1.1.1.1:443 was reached")
        expect(result.stdout, "the image has no bash, by which the network is tried")
    except SandboxCommandTimeoutError:
        return


async def destroyed(trial: Trial) -> None:
    """A sandbox can be destroyed twice, and runs nothing afterwards."""
    handle = await trial.provider.create(trial.config)
    for _ in range(2):
        await trial.provider.destroy(handle)
    try:
        result = await trial.provider.execute(handle, "true")
    except SandboxNotRunningError:
        expect(not await trial.provider.is_alive(handle), "it is alive")
    else:
        raise ContractError(f"it returned {result}")


async def creates_at_once(trial: Trial) -> None:
    """Many sandboxes are created at once, within the rate of the service, and destroyed at once."""

    async def create(number: int) -> SandboxHandle:
        await asyncio.sleep(number / trial.provider.creates_per_second)
        return await trial.provider.create(trial.config)

    made = await asyncio.gather(*map(create, range(trial.num_creates)), return_exceptions=True)
    handles = [handle for handle in made if isinstance(handle, SandboxHandle)]
    await trial.provider.bulk_destroy(handles)
    failures = [error for error in made if isinstance(error, BaseException)]
    expect(not failures, f"{len(failures)} of {len(made)} failed, first: {failures and failures[0]!r}")
    expect(len({handle.id for handle in handles}) == len(handles), "two have the same id")


async def cancelled_create(trial: Trial) -> None:
    """A creation that is cancelled leaves nothing."""
    for seconds in (0.0, 0.02, 0.2):
        creating = asyncio.ensure_future(trial.provider.create(replace(trial.config, extra={"run": f"{trial.run}-x"})))
        await asyncio.sleep(seconds)
        creating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await trial.provider.destroy(await creating)
    await expect_none_left(trial, f"{trial.run}-x")


async def label(trial: Trial) -> None:
    """Sandboxes are found by the label of their run, without those of other runs."""
    config = replace(trial.config, extra={**trial.config.extra, "run": f"{trial.run}-label"})
    made = {(await trial.provider.create(config)).id for _ in range(2)}
    await trial.shared()
    found = await trial.provider.find(f"{trial.run}-label")
    await trial.provider.bulk_destroy(SandboxHandle(name) for name in made)
    expect({handle.id for handle in found} == made, f"found {[handle.id for handle in found]} of {made}")
    await expect_none_left(trial, f"{trial.run}-label")


Check = Callable[[Trial], Awaitable[None]]
CHECKS: tuple[Check, ...] = (
    exit_codes, streams, environment, working_folder, long_command, files, deadline, at_once, state, output_flood,
    no_network, destroyed, creates_at_once, cancelled_create, label,
)  # fmt: skip


def sentence(check: Check) -> str:
    """Returns the property that a check verifies."""
    return (check.__doc__ or "").splitlines()[0].rstrip(".")


async def run_contract(trial: Trial) -> AsyncIterator[tuple[Check, float, str]]:
    """Runs all checks. Yields each check with its duration in seconds and its error, "" if it passed."""
    try:
        for check in CHECKS:
            started, problem = time.monotonic(), ""
            try:
                await asyncio.wait_for(check(trial), CHECK_SECONDS)
            except (ContractError, SandboxError, TimeoutError) as error:
                problem = str(error) or type(error).__name__
            yield check, time.monotonic() - started, problem
    finally:
        await trial.close()
