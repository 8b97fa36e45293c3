"""A run as a person starts it, watched and ended by Ctrl-C.

It trains adapters with a custom backend, every modifier of the loss, and two ranks that share each row.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.browser import DashboardProcess, open_browser
from tests.e2e.train_command import Command, steps_of

from telescope.record.reader import Run

pytestmark = pytest.mark.e2e

BACKEND = """
from telescope.trainer.backends import TrainingBackend


class MyBackend(TrainingBackend):
    def init(self):
        super().init()
        self.compiles = True
        self.warm_ups = 0

    def warm_up(self):
        super().warm_up()
        self.warm_ups += 1

    def train_step(self, trainer_data):
        metrics = super().train_step(trainer_data)
        metrics["custom/data/ranks"] = float(self.world_size)
        metrics["custom/warm_ups"] = float(self.warm_ups)
        metrics["custom/step"] = float(trainer_data["step"])
        return metrics
"""

FLAGS = """
--train_backend own_backend:MyBackend --number_of_minibatches 2 --fsdp_context_parallel_size 2
--use_ppo_clip --ppo_clip_ref_logprobs batch --clip_ratio_c 3 --use_tis --tis_mode icepop --tis_floor 0.5
--seq_is_masking --kl_penalty_tau 0.01 --entropy_coef 0.001
--filter_repetition --filter_gibberish --overlong_penalty_factor 0.1 --overlong_buffer_tokens 8
--lora_rank 8 --lora_sync adapter --weight_probe_every 1
"""

EXPECTED = """
entropy kl_divergence_inference grad_norm learning_rate loss/policy loss/penalty clip/low_share clip/high_share
tis/weight_mean tis/truncated_share masked/sequence_ratio/token_share masked/sequence_ratio/sample_share
mismatch/on_policy_share
timing_step_total timing_step_active timing_waiting_for_data timing_weight_sync_trainer_total
timing_weight_sync_inference_total
"""

OPERATIONS = (
    "forward", "backward", "loss_computation", "compute_kl", "compute_entropy", "data_to_device", "prepare_tensors",
)  # fmt: skip


@pytest.fixture(scope="module")
def command(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """A run that has ended its third step."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "own_backend.py").write_text(BACKEND)
    with Command(tiny_model, folder, 20000, *FLAGS.split()) as command:
        command.wait_for("third step", command.printed("step 2 (3 of 500)"), 400)
        assert "libtorch" not in Path(f"/proc/{command.process.pid}/maps").read_text(), "the driver has no tensor"
        yield command


@pytest.mark.browser
def test_pages_follow_a_run_that_trains(command: Command) -> None:
    from playwright.sync_api import expect

    with DashboardProcess(command.run_dir) as dashboard, open_browser() as browser:
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{dashboard.address}#/run/metrics?metric=entropy")
        expect(page.get_by_role("banner")).to_contain_text("training", timeout=60_000)
        progress = page.get_by_label("Progress").first
        expect(progress).to_contain_text("of 500 steps", timeout=60_000)
        shown = "() => Number(/(\\d+) of 500 steps/.exec(document.querySelector('[aria-label=Progress]').innerText)[1])"
        first = page.evaluate(shown)
        page.wait_for_function(f"(first) => ({shown})() >= first + 2", arg=first, timeout=120_000)
        with page.expect_download() as begun:
            page.get_by_role("button", name="More for entropy").first.click()
            page.get_by_role("menuitem", name="Save as CSV").click()
        saved = [(int(step), float(value)) for step, value in list(csv.reader(begun.value.path().open()))[1:]]
        assert errors == []
    recorded = Run(command.run_dir).sql("select step, metrics['entropy'] as value from steps order by step").to_dicts()
    assert len(saved) >= first + 2
    assert [step for step, _ in saved] == [row["step"] for row in recorded[: len(saved)]]
    in_the_record = [row["value"] for row in recorded[: len(saved)]]
    assert [value for _, value in saved] == pytest.approx(in_the_record, rel=1e-8), "nine digits are saved"


def test_a_run_with_a_custom_backend_reports_every_modifier_and_ends_by_a_scheduler(command: Command) -> None:
    assert len(command.family()) > 8, "Ray, vLLM, trainer and environment workers carry the mark"
    assert command.listens_on() == {"127.0.0.1"}
    for _ in range(3):
        command.terminate_all()
    assert command.process.wait(timeout=90) == 130
    assert "Aborted" not in command.log.read_text()
    assert "Traceback" not in command.log.read_text()
    command.leaves_no_process()
    summary = json.loads((command.run_dir / "summary.json").read_text())
    assert summary["status"] == "stopped"
    run = Run(command.run_dir)
    assert run.status == "stopped"
    steps = steps_of(run)
    numbers = {row["step"] for row in steps}
    assert numbers == set(run.table("step_stats")["step"].to_pylist()) == set(run.table("tokens")["step"].to_pylist())
    assert {"driver", "inference-0"} <= set(run.table("logs")["component"].to_pylist())
    assert (run.files.code / "attempt-1.tar.gz").stat().st_size > 0
    assert len(steps) == summary["steps"] >= 3
    assert [row["metrics"]["custom/step"] for row in steps] == list(range(len(steps)))
    assert "staleness/age_0/logprob_difference_mean" in steps[0]["metrics"], "nothing is stale at the first step"
    wanted = [*EXPECTED.split(), *(f"timing_{o}_{kind}" for o in OPERATIONS for kind in ("total", "microbatch_mean"))]
    for row in steps:
        metrics = row["metrics"]
        assert metrics["custom/data/ranks"] == 2.0
        assert metrics["custom/warm_ups"] == 1.0
        assert metrics["optimizer_steps"] == 2.0
        missing = [name for name in wanted if name not in metrics]
        assert not missing
        assert all(math.isfinite(metrics[name]) for name in wanted)
    spans = [row for row in run.table("spans").to_pylist() if row["component"] == "trainer"]
    compiling = [row for row in spans if row["name"] == "compile"]
    assert sorted((row["rank"], row["step"]) for row in compiling) == [(0, None), (1, None)]
    assert max(row["end"] for row in compiling) < min(row["start"] for row in spans if row["name"] == "step")


def test_a_sync_sends_adapters_only_and_engines_agree_with_the_trainer(command: Command, tiny_model: Path) -> None:
    steps = [row["metrics"] for row in steps_of(Run(command.run_dir))]
    model_bytes = sum(tensor.nbytes for tensor in load_file(tiny_model / "model.safetensors").values())
    sent = [metrics["weight_sync/bytes"] for metrics in steps if "weight_sync/bytes" in metrics]
    assert len(sent) >= len(steps) - 1
    assert max(sent) < 0.1 * model_bytes
    name = "mismatch/logprob_difference_max"
    on_policy = [metrics[name] for metrics in steps if name in metrics]
    assert on_policy
    assert max(on_policy) < 1e-4
