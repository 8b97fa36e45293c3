"""Notices of environments, from their processes to the run and its record."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from telescope.config import load_config
from telescope.config.environments import environment_keys
from telescope.environments.worker_pool.messages import EnvironmentSpec
from telescope.environments.worker_pool.trial import notices_of, try_environments
from telescope.evals.base import eval_spec
from telescope.orchestrator.run_components import start_environments
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.status import RunStatus
from telescope.record.reader import Run

COUNTDOWN = "countdown: dataset is 'auto', and Jiayi-Pan/Countdown-Tasks-3to4 is not available ("
MATH = "hendrycks_math: dataset is 'auto', and EleutherAI/hendrycks_math is not available ("


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The processes of environments reach no hub, and nothing is cached."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))


def test_a_replacement_of_the_hub_dataset_is_reported_with_its_size_and_its_argument() -> None:
    infos = try_environments(
        [
            EnvironmentSpec("countdown", {"num_samples": 12}, key="training"),
            EnvironmentSpec("countdown", {"num_samples": 12}, key="the same once more"),
            EnvironmentSpec("hendrycks_math", {"levels": [1, 2, 3, 4, 5]}),
        ]
    )
    assert [info.num_samples for info in infos] == [12, 12, 42]
    puzzles, problems = notices_of(infos)
    assert puzzles.startswith(COUNTDOWN)
    assert "). 12 generated puzzles replace it. " in puzzles
    assert "Set dataset: generated in the kwargs" in puzzles
    assert problems.startswith(MATH)
    assert "). 42 shipped problems replace it. " in problems
    assert "Set dataset: own in the kwargs" in problems


def test_an_eval_has_the_notices_of_its_environment() -> None:
    (message,) = notices_of(try_environments([eval_spec("hendrycks_math", {"num_samples": 5})]))
    assert message.startswith(MATH)
    assert "5 shipped problems" in message


def test_a_requested_dataset_gives_no_notice() -> None:
    specs = [
        EnvironmentSpec("countdown", {"dataset": "generated", "num_samples": 12}),
        EnvironmentSpec("hendrycks_math", {"dataset": "own"}),
    ]
    assert notices_of(try_environments(specs)) == []


def test_a_run_reports_a_notice_once_and_records_it(tmp_path: Path, tokenizer_path: str) -> None:
    flags = {
        "model": tokenizer_path, "run_dir": tmp_path / "run", "environment_workers": 2, "use_wandb": False,
        "environments": "[{name: countdown, kwargs: {num_samples: 12}}]",
        "evals": "[{name: hendrycks_math, kwargs: {num_samples: 5}}]",
    }  # fmt: skip
    config = load_config(None, [f"--{name}={value}" for name, value in flags.items()], {}).config
    keys = environment_keys(config)
    notices = notices_of(try_environments(keys.specs))
    status = RunStatus("run", 1)
    status.messages.extend(notices[:1])  # as a run does with its notes; the other is new
    directory = RunDirectory.create(config, notices)

    async def start() -> None:
        async with AsyncExitStack() as stack:
            await start_environments(config, keys, directory, status, stack)

    with directory.open_record(console=False):
        asyncio.run(start())
    assert [notice.partition("(")[0] + "(" for notice in notices] == [COUNTDOWN, MATH]
    assert list(status.messages) == notices
    record = Run(tmp_path / "run")
    assert record.table("attempts").to_pylist()[0]["notes"] == notices
    warnings = [row for row in record.table("logs").to_pylist() if row["message"] in notices]
    assert [(row["message"], row["level"], row["component"]) for row in warnings] == [
        (notice, "WARNING", "driver") for notice in notices
    ]
