"""Results of checks for given numbers and probe reports, and the command's output."""

import asyncio
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.model_folder import write_model_folder

from telescope.errors import ConfigError, InfrastructureError, RunError, UserError
from telescope.trainer.packing import untrained_sample
from telescope.verify.checks import (
    Check,
    Report,
    check_corrupted_tensor,
    check_weights,
    compare_logprobs,
    packed,
    tensor_to_corrupt,
)
from telescope.weights.plan import TensorMeta
from telescope.weights.probe import ProbeReport

METAS = [
    TensorMeta("embed", (8, 2)),
    TensorMeta("layer.q", (2, 2)),
    TensorMeta("norm", (2,)),
    TensorMeta("head", (8, 2)),
]


def logprobs(difference: float, *, outlier: float = 0.0, num_tokens: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    one_N = np.full(num_tokens, -1.0)
    other_N = one_N + difference
    other_N[0] += outlier
    return one_N, other_N


@pytest.mark.parametrize(("lengths", "longest"), [((9, 9, 8), 10), ((6, 2, 2, 2), 8)])
def test_the_other_packing_has_no_longer_rows_than_the_run(lengths: tuple[int, ...], longest: int) -> None:
    components: Any = SimpleNamespace(
        config=SimpleNamespace(seq_len=10, pad_to_multiple_of=1), trainer=SimpleNamespace(data_size=1, packs=True)
    )
    samples = [untrained_sample(str(i), np.arange(length)) for i, length in enumerate(lengths)]
    ((batch,),) = (step.minibatches for step in packed(components, samples, otherwise=True))
    assert max(len(row.token_ids_T) for row in batch.micro_batches) <= longest


@pytest.mark.parametrize(("difference", "outlier", "dtypes", "temperature", "ok"), [
    (1e-5, 0.0, ["float32"], 1.0, True),
    (1e-2, 0.0, ["float32"], 1.0, False),
    (1e-2, 0.0, ["bfloat16"], 1.0, True),
    (0.2, 0.0, ["bfloat16"], 1.0, False),
    (math.nan, 0.0, ["bfloat16"], 1.0, False),
    (0.0, 0.1, ["float32"], 1.0, False),  # one token far off
    (6e-3, 0.0, ["float32", "float32"], 1.0, False),
    (6e-3, 0.0, ["float32", "float32"], 0.5, True),  # a low temperature widens the bound
    (6e-3, 0.0, ["float32", "float32"], 2.0, False),
    (6e-3, 0.0, ["float32", "float16"], 1.0, True),  # the less exact side does
])  # fmt: skip
def test_logprobs_that_agree_hold_and_others_fail(
    difference: float, outlier: float, dtypes: list[str], temperature: float, ok: bool
) -> None:
    assert compare_logprobs("parity", *logprobs(difference, outlier=outlier), dtypes, temperature).ok is ok


def test_one_token_far_off_is_reported_in_bfloat16_and_nothing_to_compare_is_a_failure() -> None:
    check = compare_logprobs("parity", *logprobs(0.0, outlier=5.0), ("float32", "bfloat16"), 1.0)
    assert (check.ok, check.values["max"]) == (True, pytest.approx(5.0))
    assert not compare_logprobs("parity", np.array([]), np.array([]), ("float32",), 1.0).ok


def test_a_report_passes_if_it_has_checks_and_all_pass() -> None:
    holds, fails = Check("a", "0", "1", ok=True), Check("b", "2", "1", ok=False)
    assert not Report().ok
    assert Report([holds]).ok
    assert not Report([holds, fails]).ok
    assert json.loads(json.dumps(Report([fails]).to_json()))["checks"][0]["name"] == "b"


class FakeWeights:
    """Servers with given reports; a probe after a corrupted sync finds the tensors `detects`."""

    def __init__(self, detects: list[str], *, num_servers: int = 1, restores: bool = True) -> None:
        self.detects, self.num_servers, self.restores = detects, num_servers, restores
        self.syncs: list[str | None] = []

    async def verify(self, *, corrupt: str | None = None) -> dict[int, ProbeReport]:
        self.syncs.append(corrupt)
        wrong = self.detects if corrupt or (len(self.syncs) > 1 and not self.restores) else []
        report = ProbeReport(num_tensors=4, mismatched=dict.fromkeys(wrong, "fingerprint"))
        return dict.fromkeys(range(self.num_servers), report)


def components_with(weights: FakeWeights, num_servers: int = 1) -> Any:
    async def weight_metadata() -> list[TensorMeta]:
        return METAS

    trainer = SimpleNamespace(queue=asyncio.Lock(), weight_metadata=weight_metadata)
    config = SimpleNamespace(num_inference_servers=num_servers)
    return SimpleNamespace(trainer=trainer, weights=weights, config=config)


async def test_a_probe_that_names_the_corrupted_tensor_holds_and_the_weights_are_sent_again() -> None:
    weights = FakeWeights(["layer.q"])
    assert tensor_to_corrupt(METAS) == "layer.q"
    assert (await check_corrupted_tensor(components_with(weights))).ok
    assert weights.syncs == ["layer.q", None]


@pytest.mark.parametrize(("detects", "restores", "words"), [
    ([], True, "named"),
    (["head"], True, "named"),
    (["layer.q", "head"], True, "named"),
    (["layer.q"], False, "not restored"),
])  # fmt: skip
async def test_a_probe_that_names_something_else_or_weights_that_are_not_restored_fail(
    detects: list[str], restores: bool, words: str
) -> None:
    check = await check_corrupted_tensor(components_with(FakeWeights(detects, restores=restores)))
    assert not check.ok and words in check.measured


async def test_a_server_that_could_not_be_probed_fails_the_check() -> None:
    assert (await check_weights(components_with(FakeWeights([], num_servers=2), 2), "at the start")).ok
    assert not (await check_weights(components_with(FakeWeights([]), 2), "at the start")).ok
    assert not (await check_corrupted_tensor(components_with(FakeWeights(["layer.q"]), 2))).ok


# The command


def verdict(*oks: bool) -> Report:
    return Report([Check(f"claim {i}", "1", "2", ok=ok) for i, ok in enumerate(oks)], "cafe", 1.0)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the command with a verification that returns a given report or raises a given exception."""
    from telescope.cli import main, train

    model = write_model_folder(tmp_path / "model")

    def run(outcome: Report | BaseException, *arguments: str) -> int:
        def run_verification(config: Any, view: Any, on_check: Any) -> tuple[Report, Path | None]:
            if isinstance(outcome, BaseException):
                raise outcome
            for check in outcome.checks:
                on_check(check)
            return outcome, None if outcome.ok else tmp_path

        monkeypatch.setattr("telescope.verify.run.run_verification", run_verification)
        monkeypatch.setattr(train, "fit_to_machine", lambda loaded: loaded)
        monkeypatch.setattr(train, "check_before_start", lambda loaded: [])
        return main.call("verify", [f"--model={model}", *arguments])

    return run


def test_the_exit_code_reports_whether_every_claim_holds(command: Any, tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "verify.json"
    assert command(verdict(True, True), f"--json={target}") == 0
    assert json.loads(target.read_text())["ok"] is True
    assert "all 2 checks hold" in capsys.readouterr().out
    assert command(verdict(True, False), "--json", str(target)) == 1
    assert json.loads(target.read_text())["ok"] is False
    printed = capsys.readouterr()
    assert "1 of 2 checks FAIL" in printed.out
    assert str(tmp_path / "logs") in printed.out.replace("\n", "")
    assert "FAILS  claim 1" in printed.err


def test_a_logprob_that_is_no_number_is_null_in_the_json(command: Any, tmp_path: Path) -> None:
    target = tmp_path / "verify.json"
    report = Report([Check("claim", "nan", "1", ok=False, values={"mean": float("nan"), "tokens": 3})])
    assert command(report, f"--json={target}") == 1
    assert json.loads(target.read_text(), parse_constant=pytest.fail)["checks"][0]["values"] == {
        "mean": None, "tokens": 3,
    }  # fmt: skip


def test_an_interrupt_is_130_and_a_broken_engine_is_explained(command: Any) -> None:
    from telescope.orchestrator.status import Interrupted

    with pytest.raises(SystemExit) as ended:
        command(Interrupted("stopped by a signal"))
    assert ended.value.code == 130
    with pytest.raises(RunError, match="server 0 is gone"):
        command(InfrastructureError("server 0 is gone"))


def test_bad_arguments_name_the_fix_before_the_tiny_model_is_made(tmp_path: Path, monkeypatch: Any) -> None:
    from telescope.cli import main

    monkeypatch.setattr("telescope.tiny_model.cache.ensure_tiny_model", lambda **_: pytest.fail("it was made"))
    for error, arguments, words in (
        (ConfigError, ["--json"], "--json: expected one argument"),
        (UserError, [f"--json={tmp_path}/nowhere/out.json"], "is not a folder"),
        (ConfigError, ["--temprature=0.5"], "temprature"), (ConfigError, ["--learning_rate=-1"], "learning_rate is -1"),
        (ConfigError, ["--config=a.yaml", "--config=b.yaml"], "given twice"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            main.call("verify", arguments)
