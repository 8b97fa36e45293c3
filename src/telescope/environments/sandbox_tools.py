"""Environments that use sandboxes: a pool in every process, and the tools `shell` and `sandbox_python`.

`SandboxEnvironment` is a mixin that owns a pool; `SandboxTools` gives a `ToolEnvironment` a sandbox for each rollout.

Invariant: a sandbox with tools serves one rollout and is destroyed with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from telescope.environments.arguments import refuse_unknown
from telescope.environments.base import Environment, RolloutState, Sample
from telescope.environments.tool_calls import written_call
from telescope.environments.tool_env import SANDBOX_KEY, ToolResult
from telescope.errors import UserError
from telescope.sandbox import SandboxCommandTimeoutError, SandboxConfig, SandboxHandle, get_provider
from telescope.sandbox.base import ENVIRONMENT_NAMES, PROVIDERS, provider_class
from telescope.sandbox.pool import GenericSandboxPool

_LOCK_KEY = "_sandbox_lock"
"""Key of `state.custom` with the lock that runs the calls of one answer in order."""

SCRIPT_PATH = "/tmp/.telescope_script.py"
WAIT_SHARE = 0.9
"""Share of a call's time limit in which a sandbox must be free. Else the call's own error would not name the pool."""
MAX_STREAM_CHARACTERS = 6_000
"""Characters of each stream that the model reads; the middle of a longer one is left out."""


CHEATS = {
    "tests deleted": "rm -rf /tests /logs /tmp/*/job.json /tmp/*/runner.py *test*",
    "conftest.py planted": "for d in . / ~ /tests /tmp/*; do printf 'import os\nos._exit(0)\n' | "
    "tee $d/conftest.py $d/sitecustomize.py $d/usercustomize.py; done",
    "stdout spoofed": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; for f in *.py *.sh; do "
    "echo 'exit(print(\"OK, 1 passed\"))' > $f; done; echo OK; echo 1 passed; exit 0",
    "grader timed out": "for f in *; do rm -rf $f; mkfifo $f; done",
}
"""Commands of a shell that must not earn a reward (`Environment.cheats`)."""


class SandboxEnvironment(Environment):
    """A mixin with a pool of sandboxes. Put it before the environment's base class.

    `provider` is a name of `telescope.sandbox` (null: `local`) or a class, with its `provider_kwargs`. A worker keeps
    `pool_size` sandboxes, ready or in use, and creates at most `max_concurrent_creates` at once. Each lives at most
    `timeout_minutes`, with `docker_image` (where the provider has images), `cpu` cores, `memory_mb`, `disk_size_gb`,
    `gpu_count`, `environment_vars` and `extra`. `team_id` is the account that pays at Prime.
    """

    resources_per: ClassVar[Literal["host", "process"]] = "process"
    sandboxes: GenericSandboxPool
    """The pool, from `prepare_resources` on."""

    def __init__(
        self,
        provider: str | None = "local",
        provider_kwargs: dict[str, Any] | None = None,
        pool_size: int = 10,
        max_concurrent_creates: int = 100,
        timeout_minutes: float = 60,
        environment_vars: dict[str, str] | None = None,
        docker_image: str | None = None,
        cpu: float = 1.0,
        memory_mb: int = 2048,
        disk_size_gb: float = 3,
        gpu_count: int = 0,
        team_id: str | None = None,
        extra: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        for theirs in kwargs.keys() & ENVIRONMENT_NAMES.keys():
            raise UserError(
                f"{type(self).__name__} has {ENVIRONMENT_NAMES[theirs]!r}; {theirs!r} is of a SandboxConfig"
            )
        super().__init__(**kwargs)
        made = provider_class(provider)  # finds a misspelled name before anything starts
        if (provider or "local") in PROVIDERS:  # a class of the user's may have any options
            known = {"network", *made.extra_options}
            refuse_unknown(extra or {}, known, f"{type(self).__name__}: extra of {made.name!r}")
        self.provider, self.provider_kwargs = provider, provider_kwargs or {}
        self.pool_size, self.max_concurrent_creates = pool_size, max_concurrent_creates
        self.sandbox_config = SandboxConfig(
            image=docker_image or "",
            cpu=cpu,
            memory_mb=memory_mb,
            disk_size_gb=disk_size_gb,
            gpu_count=gpu_count,
            timeout_seconds=60 * timeout_minutes,
            environment_vars=environment_vars or {},
            extra=({"team_id": team_id} if team_id else {}) | (extra or {}),
        )

    def answer_that_runs(self, command: str) -> str:
        """Returns an answer that tries to run a shell command in the sandbox. Empty if answers run nothing."""
        return ""

    def cheats(self, sample: Sample) -> dict[str, str]:
        running = {name: self.answer_that_runs(command) for name, command in CHEATS.items()}
        return super().cheats(sample) | {name: answer for name, answer in running.items() if answer}

    async def check_resources(self) -> None:
        """Creates the provider. Raises `UserError` if a program, package or key is missing."""
        await get_provider(self.provider, **self.provider_kwargs).close()
        await super().check_resources()

    async def prepare_resources(self) -> None:
        await super().prepare_resources()
        self.sandboxes = await pool_of(self)

    async def close_resources(self) -> None:
        await close_pools(self)
        await super().close_resources()


async def pool_of(environment: Environment, image: str | None = None) -> GenericSandboxPool:
    """Returns the environment's pool of sandboxes with an image. Starts it on first use.

    An environment that is not a `SandboxEnvironment` has local sandboxes.
    """
    provider: str | None = None
    options: dict[str, Any] = {}
    sizes: tuple[int, ...] = ()
    config = SandboxConfig()
    if isinstance(environment, SandboxEnvironment):
        provider, options, config = environment.provider, environment.provider_kwargs, environment.sandbox_config
        sizes = environment.pool_size, environment.max_concurrent_creates
    config = replace(config, image=config.image if image is None else image)
    pools: dict[str, asyncio.Future[GenericSandboxPool]] = vars(environment).setdefault("_pools", {})

    async def start(config: SandboxConfig) -> GenericSandboxPool:
        made = get_provider(provider, **options)
        if environment.endpoint_socket and made.name == "local":
            config = replace(config, extra={"endpoint": environment.endpoint_socket, **config.extra})
        pool = GenericSandboxPool(made, config, *sizes)
        pool.wait_seconds = WAIT_SHARE * environment.call_timeout_seconds
        await pool.start()
        return pool

    known = pools.get(config.image)
    if known is None or (known.done() and known.exception() is not None):
        pools[config.image] = asyncio.ensure_future(start(config))
    return await asyncio.shield(pools[config.image])


async def close_pools(environment: Environment) -> None:
    """Destroys the sandboxes of the pools that `pool_of` started."""
    pools = vars(environment).pop("_pools", {})
    for pool in await asyncio.gather(*pools.values(), return_exceptions=True):
        if isinstance(pool, GenericSandboxPool):
            await pool.shutdown()
            await pool.provider.close()


class SandboxTools(SandboxEnvironment):
    """A mixin for a `ToolEnvironment`, whose `tools` may then contain `shell` and `sandbox_python`.

    A rollout gets its sandbox with its first call and loses it at its end. A command that takes more than
    `command_timeout_seconds` is killed, and the model is told so. A sandbox that fails masks the sample. Override
    `set_up_sandbox` to fill a new sandbox, and `working_dir_of` to choose the folder where commands start.
    """

    def __init__(
        self,
        tools: list[str | Callable[..., Any]] | None = None,
        command_timeout_seconds: Annotated[float, Field(gt=0)] = 30.0,
        **kwargs: Any,
    ) -> None:
        self.command_timeout_seconds = command_timeout_seconds
        # `shell` applies the limit itself; this one also covers the wait for earlier calls of the same answer.
        self.tool_timeout_seconds = 20 * command_timeout_seconds
        shipped: dict[Any, Callable[..., Any]] = {"shell": self.shell, "sandbox_python": self.sandbox_python}
        if unknown := [tool for tool in tools or () if isinstance(tool, str) and tool not in shipped]:
            raise UserError(f"{type(self).__name__}: there is no tool {unknown[0]!r}; use {' or '.join(shipped)}.")
        if tools is not None:
            kwargs["tools"] = [shipped[tool] if isinstance(tool, str) else tool for tool in tools]
        super().__init__(**kwargs)

    def answer_that_runs(self, command: str) -> str:
        return written_call("shell", command=command) if self.shell in getattr(self, "tools", ()) else ""

    async def set_up_sandbox(self, handle: SandboxHandle, state: RolloutState) -> None:
        """Prepares a new sandbox for the rollout."""

    def working_dir_of(self, state: RolloutState) -> str | None:
        """Returns the folder in which commands start; None means the provider's."""
        return None

    async def sandbox_of(self, state: RolloutState) -> SandboxHandle:
        """Returns a rollout's sandbox, which is acquired at the first call."""
        if SANDBOX_KEY not in state.custom:
            handle = await self.sandboxes.acquire()
            try:
                await self.set_up_sandbox(handle, state)
            except BaseException:
                await self.sandboxes.remove(handle)
                raise
            state.custom[SANDBOX_KEY] = handle
        return state.custom[SANDBOX_KEY]

    async def shell(self, command: str, state: RolloutState) -> ToolResult:
        """Run a command in a shell. Files that it writes are there in later calls.

        Args:
            command: what the shell runs, such as ls -la
        """
        return await self._run_in_sandbox("shell", command, state)

    async def sandbox_python(self, code: str, state: RolloutState) -> ToolResult:
        """Run a Python program. Print what you want to see; variables are gone afterwards, files are not.

        Args:
            code: the program
        """
        return await self._run_in_sandbox("sandbox_python", f"python3 {SCRIPT_PATH}", state, script=code)

    async def _run_in_sandbox(self, tool: str, command: str, state: RolloutState, script: str = "") -> ToolResult:
        async with state.custom.setdefault(_LOCK_KEY, asyncio.Lock()):
            handle, provider = await self.sandbox_of(state), self.sandboxes.provider
            if script:
                await provider.upload_bytes(handle, SCRIPT_PATH, script.encode("utf-8", "replace"))
            limit = self.command_timeout_seconds
            try:
                result = await provider.execute(handle, command, timeout=limit, working_dir=self.working_dir_of(state))
            except SandboxCommandTimeoutError:
                return ToolResult(tool, f"it was killed after {limit:g} seconds.", success=False, error="timeout")
        streams = {"stdout": result.stdout, "stderr": result.stderr}
        shown = [f"{name}:\n{_without_middle(text)}" for name, text in streams.items() if text]
        return ToolResult(tool, "\n".join([f"exit code: {result.exit_code}", *shown]), value=result)

    async def end_rollout(self, state: RolloutState) -> None:
        handle = state.custom.pop(SANDBOX_KEY, None)
        if handle is not None:
            await self.sandboxes.remove(handle)


def _without_middle(text: str) -> str:
    half = MAX_STREAM_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[-half:]}" if left_out > 0 else text
