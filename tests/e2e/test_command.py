"""`telescope train` that is interrupted or killed, as a process of its own."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from tests.e2e.train_command import ROOT, Command

from telescope.orchestrator.checkpoints import CheckpointFolder
from telescope.record.reader import Run
from telescope.weights.model_folder import read_origin

pytestmark = pytest.mark.e2e


def test_a_second_ctrl_c_ends_at_once_and_leaves_no_process_behind(tiny_model: Path, tmp_path: Path) -> None:
    with Command(tiny_model, tmp_path, 18620) as command:
        command.wait_for("start of the workers", command.printed("starting the trainer"), 300)
        command.wait_for("vLLM process", lambda: any("vllm" in line for line in command.family()), 120)
        command.interrupt()
        time.sleep(0.3)
        command.interrupt()
        assert command.process.wait(timeout=60) == 130
    command.leaves_no_process()


def test_ctrl_c_while_ray_starts_does_not_wait_for_ray(tiny_model: Path, tmp_path: Path) -> None:
    with Command(tiny_model, tmp_path, 18650) as command:
        command.wait_for("start of Ray", command.printed("starting Ray"), 120)
        command.wait_for("GCS", lambda: any("gcs_server" in line for line in command.family()), 60)
        command.interrupt()
        assert command.process.wait(timeout=60) == 130
    command.leaves_no_process()
    assert json.loads((command.run_dir / "summary.json").read_text())["status"] == "stopped"


@pytest.mark.parametrize(
    ("phase", "process"),
    [
        pytest.param("starting Ray", "raylet", id="in Ray"),
        pytest.param("starting the trainer", "vllm", id="in vLLM", marks=pytest.mark.slow),
    ],
)
def test_a_driver_that_is_killed_while_something_starts_leaves_no_process_behind(
    tiny_model: Path, tmp_path: Path, phase: str, process: str
) -> None:
    with Command(tiny_model, tmp_path, 18630) as command:
        command.wait_for(phase, command.printed(phase), 300)
        command.wait_for(f"{process} process", lambda: any(process in line for line in command.family()), 120)
        time.sleep(1.0)  # into its imports
        assert len(command.family()) > 3
    command.leaves_no_process()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("flags", ["", "--lora_rank=8 --lora_sync=adapter --learning_rate=2e-3"], ids=["all", "lora"])
def test_a_killed_run_continues_and_its_checkpoints_are_evaluated_and_its_printed_commands_work(
    tiny_model: Path, tmp_path: Path, flags: str
) -> None:
    command = Command(tiny_model, tmp_path, 18660, "--checkpoint_every=1", *flags.split())
    checkpoints = CheckpointFolder(command.run_dir / "checkpoints")
    with command:
        command.wait_for("second checkpoint", lambda: len(checkpoints.steps()) > 1, 400)
        assert len(command.family()) > 8
    command.leaves_no_process()
    last = checkpoints.steps()[-1]
    resume = partial(Command, tiny_model, tmp_path, 18660, number_of_steps=last + 2, resume=True)
    with resume() as resumed:  # killed again between its last checkpoint and its end
        resumed.wait_for("evals after training", resumed.printed("] evaluating "), 400)
    resumed.leaves_no_process()
    assert not (command.run_dir / "summary.json").exists()
    finishing = resume()
    run = finishing.finish(400)
    output = finishing.log.read_text()
    summary = json.loads((command.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["evals"][-1]["version"]) == ("finished", last + 2, last + 2)
    origin = read_origin(command.run_dir / "model")
    assert origin is not None and origin.checkpoint.step == last + 2
    finished = resume()
    finished.finish(100)
    assert f"has finished {last + 2} steps: nothing is left to do" in finished.log.read_text()
    steps = [(row["step"], row["attempt"]) for row in run.table("steps").to_pylist()]
    assert sorted(steps) == [(step, 1 if step < last else 2) for step in range(last + 2)]
    assert all(row["step"] >= last for row in run.table("alerts").to_pylist() if row["attempt"] > 1)
    assert checkpoints.steps()[-1] == last + 2
    evaluate_checkpoints(command.run_dir, tmp_path, [last + 1, last + 2])
    num_steps = run_printed_commands(output, tmp_path)
    assert checkpoints.steps()[-1] == num_steps > last + 2


def run_printed_commands(output: str, folder: Path) -> int:
    """Runs the commands that a run prints at its end. Returns the steps after which the continued run ends."""
    lines = output.partition("\nNext:\n")[2].splitlines()
    commands = {words[1]: words for words in map(shlex.split, lines) if words}
    assert list(commands) == ["ui", "runs", "query", "chat", "eval", "train"]
    with subprocess.Popen([*commands.pop("ui"), "--port", "0"], cwd=folder, stdout=subprocess.PIPE, text=True) as ui:
        assert ui.stdout is not None and "Telescope shows" in ui.stdout.readline()
        ui.terminate()
    for words in commands.values():
        done = subprocess.run(
            words, cwd=folder, capture_output=True, text=True, timeout=600, input="1 2 3 -> 6\n/exit\n"
        )
        assert done.returncode == 0, (words, done.stderr)
    resume = commands["train"]
    return int(resume[resume.index("--number_of_steps") + 1])


EVALS = """
evals:
  - name: countdown
    num_samples: 500
    separate_eval_samples: true
    temperature: 1.0
    kwargs: &puzzles {dataset: generated, prompt_style: short, min_numbers: 3, max_numbers: 3, max_number: 10,
                      operations: "+-", format_reward: 0.0, portion: heldout}
  - name: countdown
    num_samples: 30
    temperature: 0.8
    pass_k: {at_k: {metrics: [correct], k: [1, 4]}}
    kwargs: {<<: *puzzles, portion: train}
"""


def evaluate_checkpoints(run_dir: Path, folder: Path, steps: list[int]) -> None:
    """Evaluates two checkpoints with an interruption, and compares with the run's own evals."""
    (folder / "eval.yaml").write_text(EVALS)
    results = folder / "results.json"
    command = [sys.executable, str(ROOT / "eval.py"), str(run_dir), "--config", str(folder / "eval.yaml")]
    command += ["--step", ",".join(map(str, steps)), "--inference_base_port=18660", "--json", str(results)]
    interrupted = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def num_samples() -> int:
        return sum(len(file.read_bytes().splitlines()) for file in run_dir.glob("evals/*/samples.jsonl"))

    try:
        deadline = time.monotonic() + 300
        while num_samples() < 100:
            assert interrupted.poll() is None, interrupted.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        interrupted.send_signal(signal.SIGINT)
        output, _ = interrupted.communicate(timeout=90)
    finally:
        interrupted.kill()
    assert interrupted.returncode == 130
    assert "The same command continues" in output
    kept, all_samples = num_samples(), 2 * (500 + 4 * 30)
    assert 100 <= kept < all_samples
    continued = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    assert continued.returncode == 0, continued.stderr
    assert num_samples() == all_samples, "no sample twice"
    assert not list(run_dir.glob("evals/*/models")), "converted checkpoints are removed"
    assert list(run_dir.glob("evals/*/accuracy.svg"))
    models = json.loads(results.read_text())["models"]
    assert [model["step"] for model in models] == steps
    first, second = models[-1]["evals"]
    assert {"pass@1/correct", "pass@4/correct"} <= second["metrics"].keys()
    rows = Run(run_dir).table("evals").to_pylist()
    (live,) = (row for row in rows if row["source"] == "live" and row["version"] == steps[-1])
    assert (first["accuracy"], first["num_scored"]) == (live["accuracy"], live["num_scored"])
    finished = [row for row in rows if row["source"] == "standalone" and row["status"] == "finished"]
    assert sorted((row["version"], row["number"]) for row in finished) == [(step, n) for step in steps for n in (0, 1)]
