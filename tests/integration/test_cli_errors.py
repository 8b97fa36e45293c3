"""Bad input: a clear message, exit code 2, quickly, and nothing started."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.model_folder import write_model_folder
from tests.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "ray", "vllm", "transformers")
WITHOUT_MODEL = "TESTS_WITHOUT_MODEL"
"""Variable of a command that leaves out the trial of the model, whose process imports torch."""
OTHER_TRIALS = {"--environments", "--environments_path", "--train_backend", "--vllm_tool_call_parser"}
"""Flags of tests in which something else is tried."""

# Imports what every command imports, then runs each command line that it reads in a fork of its own: a tenth of the
# time of a new process. Prints which heavy packages the command imported.
COMMAND_SERVER = f"""
import json, os, sys
from telescope.cli import dry_run, train
from telescope.cli.main import main
from telescope.trainer import trial

def run(arguments, folder, variables):
    os.chdir(folder)
    os.environ.update(variables)
    if {WITHOUT_MODEL!r} in variables:
        trial.try_model = lambda config: None
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), stream)
    code = main(arguments)
    print("imported:", [name for name in {HEAVY!r} if name in sys.modules], flush=True)
    sys.exit(code)

for line in sys.stdin:
    if (pid := os.fork()) == 0:
        sys.stdin = open(os.devnull)
        run(*json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@dataclass
class Result:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Result]]:
    """Runs `telescope` with arguments in a folder, where its output is left, and with these environment variables."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TELESCOPE_", "RAY_"))}
    place = {"cwd": tmp_path_factory.mktemp("commands"), "env": {**environment, "HF_HUB_OFFLINE": "1"}}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", COMMAND_SERVER], **pipes, **place) as server:

        def run(arguments: list[str], folder: Path, **variables: str) -> Result:
            server.stdin.write(json.dumps([arguments, str(folder), variables]) + "\n")
            server.stdin.flush()
            code = int(server.stdout.readline())
            return Result(code, (folder / "stdout").read_text(), (folder / "stderr").read_text())

        yield run
        server.stdin.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model until it is loaded."""
    return write_model_folder(tmp_path / "model")


@pytest.fixture
def run_yaml(tmp_path: Path, model: Path) -> Path:
    """A run that has nothing wrong with it before it starts."""
    path = tmp_path / "run.yaml"
    path.write_text(
        f"""\
model: {model}
environments: [{{name: countdown, kwargs: {{dataset: generated}}}}]
device: cpu
ray_address: local
inference_num_workers: 1
trainer_num_workers: 1
ray_inference_cpus_per_worker: 0.1
ray_trainer_cpus_per_worker: 0.1
use_wandb: false
inference_base_port: {free_port()}
"""
    )
    return path


@pytest.fixture
def train(tmp_path: Path, run_yaml: Path, commands: Callable[..., Result]):
    """Runs `telescope train` on that run with further flags, and checks that a refusal starts nothing."""

    def run(*flags: str, config: Path | None = run_yaml) -> Result:
        run_dir = tmp_path / "run"
        arguments = ["train", *(["--config", str(config)] if config else []), *flags]
        variables = {} if OTHER_TRIALS.isdisjoint(flags) else {WITHOUT_MODEL: "1"}
        result = commands(arguments, tmp_path, TELESCOPE_RUN_DIR=str(run_dir), **variables)
        if result.code == 2:
            assert "imported: []" in result.out, "heavy packages were imported before the input was refused"
            assert not run_dir.exists(), "a run directory was made for a run that never was"
            assert "\ntelescope: " in f"\n{result.err}"
        assert "Traceback" not in result.err
        return result

    return run


def refused(result: Result, *words: str) -> None:
    assert result.code == 2, f"exit code {result.code}\n{result.out}\n{result.err}"
    output = result.err.lower()  # a word may begin a sentence
    for word in words:
        assert word.lower() in output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text + "learning_rat: 1e-6\n", ["'learning_rat'", "line 11", "Did you mean 'learning_rate'?"]),
        (lambda text: "seed: 1\n", ["environments must name at least one environment", "[{name: countdown}]"]),
        (lambda text: "model: [1\n", ["is not valid YAML", "line 2"]),
    ],
    ids=["an unknown key", "no environment at all", "not YAML"],
)
def test_a_file_that_is_no_run(train, run_yaml, change, words):
    run_yaml.write_text(change(run_yaml.read_text()))
    refused(train(), *words)


PARSERS = "--vllm_tool_call_parser hermez --vllm_reasoning_parser qwen33"
TOOL_PARSER = ["vllm_tool_call_parser is 'hermez'", "Did you mean 'hermes'?", "mistral"]
REASONING_PARSER = ["vllm_reasoning_parser is 'qwen33'", "Did you mean 'qwen3'?", "deepseek_r1"]
ENGINE = "--train_backend megatron --megatron_use_transformer_engine"
NO_SERVER = "--evals [{name:\xa0math500}] --inference_num_workers 2 --eval_num_servers 2"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--number-of-step 3", ["Did you mean 'number_of_steps'?"]),
        ("--gpu_memory_utilization 1.5", ["gpu_memory_utilization is 1.5", "at most 1"]),
        ("--use_tis --use_ppo_clip", ["use_tis", "use_ppo_clip", 'Set ppo_clip_ref_logprobs to "batch"']),
        ("--max_tokens 5000", ["max_tokens is 5000", "max_model_len is 4096", "Lower max_tokens"]),
        ("--algorithm ppo", ['algorithm is "ppo"', '"grpo"', '"sapo"']),
        (PARSERS, [*TOOL_PARSER, *REASONING_PARSER]),
        (ENGINE, ["megatron_use_transformer_engine is true", "Transformer Engine", "docs/gpu.md"]),
        ("--environments [{name:\xa0countdwn}]", ["countdwn", "Did you mean 'countdown'?"]),
        ("--evals [{name:\xa0math50}]", ["no eval 'math50'", "Did you mean 'math500'?"]),
        (NO_SERVER, ["eval_num_servers is 2", "no server is left for rollouts", "Lower eval_num_servers to at most 1"]),
        ("--model nowhere/at/all", ["does not exist", "Qwen/Qwen2.5-3B"]),
        ("--model no-owner/no-such-model", ["could not be checked", "Set model to a local folder"]),
        ("--trainer_num_workers 1000", ["trainer_num_workers is 1000", "Lower"]),
        ("--run_dir /proc/telescope", ["run_dir is '/proc/telescope'", "TELESCOPE_RUN_DIR"]),
    ],
)
def test_flags_that_cannot_be_meant(train, flags, words):
    refused(train(*(flag.replace("\xa0", " ") for flag in flags.split(" "))), *words)


@pytest.mark.parametrize(
    ("path", "words"),
    [("broken_backend:Mine", ["cannot be imported", "ZeroDivisionError"]), ("no-class-path", ["class path"])],
)
def test_a_class_path_that_leads_to_no_backend(train, tmp_path, path, words):
    (tmp_path / "broken_backend.py").write_text("1 / 0\n")
    refused(train("--train_backend", path), "train_backend", *words)


def test_a_missing_package_of_an_environment(train, tmp_path):
    folder = tmp_path / "environments" / "needy"
    folder.mkdir(parents=True)
    (folder / "environment.py").write_text('REQUIRED_PACKAGES = ["no-such-package-anywhere"]\n')
    result = train("--environments", "[{name: needy}]", "--environments_path", f"[{folder.parent}]")
    refused(result, "no-such-package-anywhere", "pip install no-such-package-anywhere")


def test_a_model_that_cannot_be_loaded(train, model):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    refused(train(), f"model is '{model}'", "model.safetensors", "cut off", "Download or save the model again")


def test_a_port_in_use(train):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        result = train("--inference_base_port", str(port))
    refused(result, f"inference_base_port is {port}", "in use", "set inference_base_port")


def test_a_file_that_does_not_exist(train, tmp_path):
    refused(train(config=tmp_path / "ron.yaml"), "does not exist", "run.yaml")
    refused(train(config=None), "telescope train --config")


ENVIRONMENT = """
from telescope.environments.base import RewardResult, Sample, SingleTurnEnvironment

class Odd(SingleTurnEnvironment):
    def load_dataset(self, num_samples=-1):
        {load}

    def compute_reward(self, completion, sample, eos_token=""):
        return RewardResult(total_reward=0.0)
"""


@pytest.fixture
def environment_of(tmp_path: Path):
    """Flags for an environment called `odd` with that code."""

    def make(code: str) -> list[str]:
        folder = tmp_path / "environments" / "odd"
        folder.mkdir(parents=True)
        (folder / "environment.py").write_text(code)
        return ["--environments", "[{name: odd}]", "--environments_path", f"[{folder.parent}]"]

    return make


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_an_empty_dataset(train, environment_of, flags):
    result = train(*flags, *environment_of(ENVIRONMENT.format(load="return []")))
    refused(result, "dataset of environment 'odd' is empty", "num_samples")
    assert ("config hash" in result.out) == bool(flags)


def test_a_dataset_that_cannot_be_loaded(train, environment_of):
    result = train(*environment_of(ENVIRONMENT.format(load="return [][1]")))
    refused(result, "loading the dataset of the environment 'odd' failed", "IndexError", "odd/environment.py:6")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys\nsys.exit(3)", ["cannot be imported", "SystemExit: 3", "environment.py:2"]),
        ("import os\nprint('bye', flush=True)\nos.kill(os.getpid(), 11)", ["importing", "killed by SIGSEGV", "bye"]),
        ("import time\ntime.sleep(3600)", ["did not end within 2 seconds", "environment.py", "line 2 in <module>"]),
    ],
    ids=["exits", "crashes", "hangs"],
)
def test_an_environment_that_cannot_be_imported(train, environment_of, code, words):
    result = train(*environment_of(code), "--environment_timeout_seconds", "2")
    refused(result, "the environment 'odd'", *words)


def test_an_eval_that_cannot_be_made(train, environment_of, tmp_path):
    environment_of("raise ValueError('no luck')")
    result = train("--evals", "[{name: odd}]", "--environments_path", f"[{tmp_path / 'environments'}]")
    refused(result, "The environment 'odd' cannot be imported: ValueError: no luck")


def test_an_eval_with_fewer_items_than_it_asks_for(train, environment_of):
    flags = environment_of(ENVIRONMENT.format(load="return [Sample('a'), Sample('b'), Sample('c')]"))
    result = train(*flags, "--evals", "[{name: odd, num_samples: 30}]", "--eval_num_servers", "0")
    refused(result, "num_samples of 'odd' is 30", "has 3 items", "-1 for all")


def test_several_problems_are_reported_together(train, model):
    (model / "tokenizer.json").unlink()
    result = train("--run_dir", "/proc/telescope", "--environments", "[{name: countdwn}]")
    refused(result, "3 problems", "run_dir", "countdwn", "holds no tokenizer")


def test_a_dry_run_shows_the_run_and_starts_nothing(train, tmp_path):
    result = train("--dry-run", "--learning_rate", "3e-4")
    assert result.code == 0, result.err
    assert "imported: []" in result.out
    for word in ("* learning_rate", "3.0e-04" if "3.0e-04" in result.out else "0.0003", "config hash", "trainer rank 0",
                 "inference server 0", "optimizer", "KV cache", "nothing was started"):  # fmt: skip
        assert word in result.out
    assert not (tmp_path / "run").exists()


def test_a_dry_run_reports_that_another_dataset_replaces_the_hubs(train, tmp_path):
    result = train("--dry-run", "--environments", "[{name: countdown, kwargs: {num_samples: 12}}]")
    assert result.code == 0, result.err
    output = " ".join(result.out.split())  # lines are wrapped
    assert "Remarks of the environments · countdown: dataset is 'auto', and Jiayi-Pan/Countdown-Tasks-3to4" in output
    assert "12 generated puzzles replace it" in output


def test_the_example_of_the_documentation_resolves_anywhere(train):
    result = train("--dry-run", config=ROOT / "configs" / "examples" / "example_countdown.yaml")
    assert result.code == 0, result.err
    for word in ("Qwen/Qwen2.5-3B", "3,085.9 M parameters", "trainer rank 1", "inference server 1", "GiB"):
        assert word in result.out


def test_the_script_in_the_root_is_the_same_command(tmp_path):
    command = [sys.executable, str(ROOT / "train.py"), "--learning_rte", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2 and "Did you mean 'learning_rate'?" in done.stderr


def test_help_lists_every_field_by_section(train):
    result = train("--help-all", config=None)
    assert result.code == 0
    assert "imported: []" in result.out
    for word in ("--learning_rate", "Weight Broadcasting", "--dry-run", "Every field is a flag"):
        assert word in result.out


@pytest.mark.parametrize(("arguments", "opened"), [
    (["runs", "--root"], os.pipe),
    (["--help"], os.pipe),
    (["--help"], lambda: [end.detach() for end in socket.socketpair()]),
    (["config", "explain", "learning_rate"], os.pipe),
])  # fmt: skip
def test_a_closed_output_ends_a_command_quietly(arguments, opened, tmp_path):
    read_end, write_end = opened()
    os.close(read_end)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    command = [sys.executable, "-m", "telescope", *arguments, *[str(tmp_path)] * ("--root" in arguments)]
    done = subprocess.run(command, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["config", "explain", "learning_rate"], ["runs", "--json", "--root", "tests"]])
def test_an_output_on_a_full_disk_ends_a_command_with_one_line(arguments):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "telescope", *arguments]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    message = "telescope: the output cannot be written: No space left on device. Free space on its disk\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_an_error_that_nobody_reads_keeps_its_exit_code():
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "telescope", "train", "--config", "nowhere.yaml"]
    assert subprocess.run(command, cwd=ROOT, stdout=write_end, stderr=write_end).returncode == 2
    os.close(write_end)


def test_without_a_standard_error_nothing_of_it_is_in_the_output():
    telescope = f"{sys.executable} -m telescope"
    for arguments, code in ("config explain learning_rate", 0), ("config explain nothing", 2):
        done = subprocess.run(
            ["sh", "-c", f"{telescope} {arguments} 2>&-"], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert (done.returncode, "telescope:" in done.stdout) == (code, False)
