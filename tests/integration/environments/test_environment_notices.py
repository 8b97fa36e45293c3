"""Notices of environments, from their processes to the run and its record."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from telescope.cli.train import try_components
from telescope.config import load_config
from telescope.environments.types import EnvironmentSpec
from telescope.errors import UnreachableError, UserError
from telescope.evals.base import eval_spec
from telescope.evals.entries import environment_keys
from telescope.orchestrator.run_components import report_environments
from telescope.orchestrator.run_directory import RunDirectory
from telescope.orchestrator.status import RunStatus
from telescope.record.reader import Run
from telescope.rollout.trial import notices_of, try_environments

COUNTDOWN = "countdown: dataset is 'auto', and Jiayi-Pan/Countdown-Tasks-3to4 is not available ("
NO_ANSWER = "hendrycks_math: no completion can equal the answer of 1 of the 3 items that were checked, such as item 1, "


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The processes of environments reach no hub, and nothing is cached."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))


@pytest.fixture
def problems(tmp_path: Path) -> str:
    """A file with three problems. Nothing can equal the answer of one."""
    answers = {"1 + 1?": "2", "2?": "}", "3?": "#### 3"}
    rows = [{"problem": problem, "answer": answer} for problem, answer in answers.items()]
    (tmp_path / "problems.json").write_text(json.dumps(rows))
    return str(tmp_path / "problems.json")


def test_a_replacement_of_the_hub_dataset_is_reported_with_its_size_and_its_argument() -> None:
    keys = ("training", "the same once more")
    infos = try_environments([EnvironmentSpec("countdown", {"num_samples": 12}, key=key) for key in keys])
    assert [info.num_samples for info in infos] == [12, 12]
    (puzzles,) = notices_of(infos)
    assert puzzles.startswith(COUNTDOWN)
    assert "). 12 generated puzzles replace it. " in puzzles
    assert "Set dataset: generated in the kwargs" in puzzles


SLOW = """
import time
from telescope.environments.base import RewardResult, Sample, SingleTurnEnvironment


class Slow(SingleTurnEnvironment):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        time.sleep(1)

    def load_dataset(self):
        time.sleep(1)
        return [Sample("Why?")]

    def compute_reward(self, completion, sample, eos_token=""):
        return RewardResult(0.0)
"""


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """A folder with an environment of which each part takes a second."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "environment.py").write_text(SLOW)
    return tmp_path


def test_each_slow_part_of_a_load_is_named(slow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telescope.rollout.trial.SLOW_SECONDS", 0.5)
    said: list[str] = []
    try_environments([EnvironmentSpec("slow", {})], environments_path=[slow], say=said.append)
    assert said[-2:] == [
        "importing and making the environment 'slow' ...",
        "loading the dataset of the environment 'slow' ...",
    ]


def test_a_dataset_that_loads_too_long_is_an_error_with_the_fix(slow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telescope.rollout.trial.DATASET_SECONDS", 0.5)
    expected = (
        "the dataset of the environment 'slow' did not end within 0.5 seconds. Download or prepare it before the run"
    )
    with pytest.raises(UserError, match=expected):
        try_environments([EnvironmentSpec("slow", {})], environments_path=[slow])


@pytest.mark.parametrize("spec", [EnvironmentSpec("hendrycks_math", {}), eval_spec("math500", {})])
def test_a_dataset_without_the_hub_is_an_error_of_its_own_kind(spec: EnvironmentSpec) -> None:
    with pytest.raises(UnreachableError, match=f"{spec.name}: the dataset .* or set dataset: own"):
        try_environments([spec])


@pytest.mark.parametrize("make", [EnvironmentSpec, eval_spec])
def test_answers_that_nothing_can_equal_are_reported_with_an_example(make: Any, problems: str) -> None:
    (message,) = notices_of(try_environments([make("hendrycks_math", {"dataset_name": problems})]))
    assert message == f"{NO_ANSWER}'}}' (math-verify cannot read it). These items never get the reward."


@pytest.mark.parametrize("make", [EnvironmentSpec, eval_spec])
def test_a_dataset_of_which_most_answers_cannot_be_equaled_is_refused(make: Any, tmp_path: Path) -> None:
    solution = "She sold 48 / 2 = 24 clips in May, which makes 72 altogether"
    rows = [{"problem": f"{n}?", "answer": solution if n % 3 else "72"} for n in range(30)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    expected = (
        r"hendrycks_math: no completion can equal the answer of 20 of the 30 items .* item 1, 'She sold .* \(it is a "
        r"sentence, not a final answer\); item 2, .* Give final answers"
    )
    with pytest.raises(UserError, match=expected):
        try_environments([make("hendrycks_math", {"dataset_name": str(tmp_path / "rows.json")})])


def test_a_requested_dataset_gives_no_notice() -> None:
    specs = [
        EnvironmentSpec("countdown", {"dataset": "generated", "num_samples": 12}),
        EnvironmentSpec("hendrycks_math", {"dataset": "own"}),
    ]
    assert notices_of(try_environments(specs)) == []


def test_a_run_reports_a_notice_once_and_records_it(tmp_path: Path, tokenizer_path: str) -> None:
    flags = {
        "model": tokenizer_path, "run_dir": tmp_path / "run", "use_wandb": False,
        "environments": "[{name: countdown, kwargs: {num_samples: 12}}]",
        "evals": "[{name: countdown, kwargs: {num_samples: 5}}]",
    }  # fmt: skip
    config = load_config(None, [f"--{name}={value}" for name, value in flags.items()], {}).config
    keys = environment_keys(config)
    infos = try_environments(keys.specs)
    notices = notices_of(infos)
    status = RunStatus("run", 1)
    status.messages.extend(notices[:1])  # as a run does with its notes; the other is new
    directory = RunDirectory.create(config, notices)

    by_key = {spec.identity: info for spec, info in zip(keys.specs, infos, strict=True)}
    with directory.open_record(console=False):
        report_environments(config, keys, by_key, status)
    assert [re.findall("([0-9]+) generated", notice) for notice in notices] == [["12"], ["5"]]
    ends = "What ends an answer: only its length: set stop_token_ids or stop"
    assert list(status.messages) == [notices[0], ends, *notices[1:]]
    record = Run(tmp_path / "run")
    assert record.table("attempts").to_pylist()[0]["notes"] == notices
    warnings = [row for row in record.table("logs").to_pylist() if row["message"] in notices]
    assert [(row["message"], row["level"], row["component"]) for row in warnings] == [
        (notice, "WARNING", "driver") for notice in notices
    ]


def test_a_trial_for_another_machine_keeps_the_kind_of_its_error(tokenizer_path: str) -> None:
    flags = [f"--model={tokenizer_path}", "--environments=[{name: hendrycks_math}]", "--use_wandb=false"]
    with pytest.raises(UnreachableError, match="or set dataset: own"):
        try_components(load_config(None, flags, {}).config, here=False)
