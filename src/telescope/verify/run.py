"""A verification from the resolved config to its report: starts the parts of a run, proves one claim after the other.

Owns the order of the proofs and the throw-away run directory. The parts are those of a training run (`orchestrator.
parts`): the same processes, placement, dtypes and transport. Nothing that is trained here is kept; the directory with
the logs is removed unless something failed.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from telescope.cluster.reaper import Reaper
from telescope.config import TelescopeConfig
from telescope.orchestrator.interrupt import Interrupt
from telescope.orchestrator.run import View
from telescope.orchestrator.run_components import RunComponents, start_components
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.supervision import Supervisor
from telescope.verify.checks import (
    check_corrupted_tensor,
    check_first_step,
    check_gradient,
    check_packed_attention,
    check_parity,
    check_top_p,
    check_weights,
    packed,
)
from telescope.verify.report import Check, Report
from telescope.verify.samples import sample_groups


def run_verification(
    config: TelescopeConfig, view: View | None = None, on_check: Callable[[Check], None] = lambda check: None
) -> tuple[Report, Path | None]:
    """Start, prove and take everything down. Returns the report, and the folder with logs when something failed.

    Raises UserError for input that cannot be run, Interrupted after Ctrl-C, the first error of any part otherwise.
    """
    return asyncio.run(_verify(config, view, on_check))


async def _verify(
    config: TelescopeConfig, view: View | None, on_check: Callable[[Check], None]
) -> tuple[Report, Path | None]:
    folder = Path(tempfile.mkdtemp(prefix="telescope-verify-"))
    report = Report(config_hash=config.hash)
    config = config.replace(run_dir=str(folder), use_wandb=False, evals=[])
    status = RunStatus("verify", 0)
    interrupt = Interrupt(status)
    started_at = time.monotonic()
    keep = True
    try:
        async with AsyncExitStack() as stack:
            stack.enter_context(Reaper())
            directory = RunDirectory.create(config, [])
            stack.enter_context(directory.open_record(console=view is None))
            if view is not None:
                stack.callback(view.stop)
                view.start(status)
            loop = asyncio.get_running_loop()
            interrupt.install(loop)
            async with AsyncExitStack() as parts_stack:
                starting = start_components(
                    config, directory, status, parts_stack, on_ray_started=lambda: interrupt.install(loop)
                )  # fmt: skip
                parts = await interrupt.run_until_first(starting)
                supervisor = Supervisor()
                supervisor.spawn(parts.servers.watch(), "server watch")

                def keep_check(check: Check) -> None:
                    report.checks.append(check)
                    on_check(check)

                proofs = run_checks(parts, status, keep_check)
                await interrupt.run_until_first(supervisor.run_until(proofs))
                status.phase = "shutting down"
        keep = not report.ok
    finally:
        report.seconds = time.monotonic() - started_at
        if interrupt.requested:
            keep = False
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return report, folder if keep else None


async def run_checks(parts: RunComponents, status: RunStatus, on_check: Callable[[Check], None]) -> None:
    """All proofs on started parts whose trainer is at its first weights. `on_check` gets each as soon as it is known.

    Afterwards the trainer is one step further and the engines hold its weights.
    """

    async def prove(phase: str, proof: Awaitable[Check]) -> None:
        status.phase = phase
        started_at = time.monotonic()
        check = await proof
        on_check(replace(check, seconds=time.monotonic() - started_at))
        status.progressed()

    await prove("sending the first weights", check_weights(parts, "at the start"))
    status.phase = "sampling"
    samples = await sample_groups(parts, top_p=None, on_sample=status.progressed)
    inputs = packed(parts, samples)
    await prove("comparing logprobs of engine and trainer", check_parity(parts, samples, inputs))
    if parts.config.top_p is not None and parts.config.top_p < 1:
        status.phase = "sampling with top_p"
        cut = await sample_groups(parts, top_p=parts.config.top_p, on_sample=status.progressed)
        await prove("comparing logprobs under top_p", check_top_p(parts, cut, packed(parts, cut)))
    await prove("computing samples one by one", check_packed_attention(parts, samples, inputs))
    await prove("computing one gradient in two packings", check_gradient(parts, samples))
    await prove("training one step", check_first_step(parts, inputs))
    await prove("sending the new weights", check_weights(parts, "after a training step"))
    await prove("spoiling a tensor on purpose", check_corrupted_tensor(parts))
