"""Runs a verification: starts components, executes checks, returns a report.

Owns the order of the checks and the temporary run directory. The components are those of a training run
(`orchestrator.run_components`): the same processes, placement, dtypes and transport. The trained weights are discarded;
the directory with the logs is removed unless a check fails.
"""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from telescope.cluster.reaper import ALSO_REMOVED
from telescope.config import TelescopeConfig
from telescope.errors import UserError
from telescope.orchestrator.run_components import RunComponents
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.session import Session, View
from telescope.orchestrator.status import Interrupted, RunStatus
from telescope.verify import checks
from telescope.verify.checks import Check, Report


def run_verification(
    config: TelescopeConfig, view: View | None = None, on_check: Callable[[Check], None] = lambda check: None
) -> tuple[Report, Path | None]:
    """Starts the components, runs the checks and stops. Returns the report, and the log folder if one failed.

    Raises UserError for input that cannot be run, Interrupted after Ctrl-C, else the first error of any component.
    """
    return asyncio.run(_verify(config, view, on_check))


async def _verify(
    config: TelescopeConfig, view: View | None, on_check: Callable[[Check], None]
) -> tuple[Report, Path | None]:
    folder = Path(tempfile.mkdtemp(prefix="telescope-verify-"))
    report = Report(config_hash=config.hash)
    # Dropout of adapters would make the trainer differ from the engine.
    config = config.replace(run_dir=str(folder), lora_dropout=0.0)
    session = Session(RunStatus("verify", 0), view)
    directory = RunDirectory.create(config, [])
    started_at = time.monotonic()
    keep = True

    async def check_all() -> None:
        components = await session.start(config, directory)

        def keep_check(check: Check) -> None:
            report.checks.append(check)
            on_check(check)

        await run_checks(components, session.status, keep_check)

    try:
        with session.open(directory.open_record(console=view is None)):
            # Unless its logs explain a failure, the reaper removes the folder, even after a kill.
            link = session.temporary / f"{ALSO_REMOVED}run"
            link.symlink_to(folder)
            try:
                await session.run(session.interrupt.run_until_first(check_all()))
                keep = not report.ok
            except (UserError, Interrupted):
                keep = False
                raise
            finally:
                if keep and not session.interrupt.requested:
                    link.unlink()
    finally:
        report.seconds = time.monotonic() - started_at
    return report, folder if keep else None


async def run_checks(components: RunComponents, status: RunStatus, on_check: Callable[[Check], None]) -> None:
    """Runs all checks on started components and passes each result to `on_check`.

    The trainer must be at its first weights. Afterwards it is one step further, and the engines have its weights.
    """

    async def run(phase: str, measure: Awaitable[Check]) -> None:
        status.phase = phase
        started_at = time.monotonic()
        check = await measure
        on_check(replace(check, seconds=time.monotonic() - started_at))
        status.progressed()

    await run("sending the first weights", checks.check_weights(components, "at the start"))
    status.phase = "sampling"
    samples = await checks.sample_groups(components, top_p=None, on_sample=status.progressed)
    inputs = checks.packed(components, samples)
    await run("comparing logprobs of engine and trainer", checks.check_parity(components, samples, inputs))
    if components.config.top_p is not None and components.config.top_p < 1:
        status.phase = "sampling with top_p"
        cut = await checks.sample_groups(components, top_p=components.config.top_p, on_sample=status.progressed)
        await run("comparing logprobs under top_p", checks.check_top_p(components, cut, checks.packed(components, cut)))
    await run("computing samples one by one", checks.check_packed_attention(components, samples, inputs))
    await run("computing one gradient in two packings", checks.check_gradient(components, samples))
    await run("training one step", checks.check_first_step(components, inputs))
    await run("sending the new weights", checks.check_weights(components, "after a training step"))
    if components.config.lora_sync == "merged":  # for an adapter in an engine only the logprobs are compared
        await run("corrupting a tensor on purpose", checks.check_corrupted_tensor(components))
