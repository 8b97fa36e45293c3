"""Exit codes and help of the `telescope` command, and its configuration commands."""

import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock
from unittest.mock import Mock

import pytest
import yaml
from rich.console import Console

from telescope.cli import main as cli
from telescope.cli import ui
from telescope.cli.train import build_parser, print_summary
from telescope.config import TelescopeConfig, load_config
from telescope.errors import ConfigError, RunError, UserError
from telescope.orchestrator import preflight


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


SUMMARY_OF_TRAIN = ["--learning_rate", "Weight Broadcasting", "--dry-run", "--gpu-memory-gib N", "--help-all"]
OF_A_FIELD = ["default", ">= 1", "must be divisible by inference_tensor_parallel_size", "Workers"]
OF_A_KEY = ["evals[].num_samples", "-1: the full dataset"]


@pytest.mark.parametrize(("arguments", "words", "max_lines"), [
    ("--help", ["train", "config", "tiny-model", "runs", "query"], 100), ("--version", ["telescope "], 1),
    ("train --help", [*SUMMARY_OF_TRAIN, "telescope config explain"], 45),
    ("config explain inference-num-workers", OF_A_FIELD, 100),
    ("config explain Trainer", ["--learning_rate"], 1000), ("config explain evals", ["pass_k"], 100),
    *((f"config explain {name}", OF_A_KEY, 20) for name in ("evals.num_samples", "evals[0].num_samples")),
    ("config explain evals.num-samples", OF_A_KEY, 20), ("config explain environments.weight", ["weight"], 20),
])  # fmt: skip
def test_help_names_what_a_reader_looks_for_and_fits_a_screen(capsys, arguments, words, max_lines):
    code, out, _ = run(capsys, *arguments.split())
    assert code == 0
    assert [word for word in words if word not in out] == []
    assert len(out.splitlines()) <= max_lines


@pytest.mark.parametrize(("arguments", "words"), [
    ("trian", "There is no command 'trian'. Did you mean 'train'?"),
    ("tiny-modle --output x", "There is no command 'tiny-modle'. Did you mean 'tiny-model'?"),
    ("config", "the following arguments are required: ACTION"),
    ("train x", "Unexpected argument 'x'"),
    ("config explain learning_rte", "'learning_rate'"),
    ("config explain beta", "kl_penalty_tau"),
    ("config explain rollout.n", "'group_size'"),
    ("config explain evals.num_sample", "Did you mean 'num_samples'? The keys are name,"),
    ("config explain learning_rate.x", "There is no field or section 'learning_rate.x'"),
    ("config explain eval.num_samples", "Did you mean 'evals.num_samples'?"),
    ("train --config run.yaml --gpu-memory-gib 80", "Add --dry-run, or omit --gpu-memory-gib"),
    ("train --dry-run --gpu-memory-gib", "--gpu-memory-gib: expected one argument"),
    ("train --dry-run --gpu-memory-gib --seed=1", "--gpu-memory-gib: expected one argument"),
    ("train --dry-run --gpu-memory-gib 80 --gpu-memory-gib 141", "given twice: 80.0 and 141.0"),
])  # fmt: skip
def test_bad_input_exits_with_2_and_names_the_nearest(capsys, arguments, words):
    code, out, err = run(capsys, *arguments.split())
    assert (code, out) == (2, "")
    assert words in err


ABSENT = ModuleNotFoundError("No module named 'absent'", name="absent.part")


@pytest.mark.parametrize(("raised", "code", "words"), [
    (UserError("one thing"), 2, "telescope: one thing"),
    (ConfigError("one\ntwo"), 2, "2 problems:\n  - one\n  - two"),
    (UserError("one error\nin two lines"), 2, "telescope: one error\nin two lines"),
    (RunError("one error\nin two lines"), 1, "telescope: one error\nin two lines"),
    (KeyboardInterrupt(), 130, "Interrupted"),
    (SystemExit(3), 3, ""),
    (ConfigError("it is \x1b[31mred\nit is red"), 2, "telescope: it is red\n"),
    (ABSENT, 2, f"telescope: {mock.__file__}:"),
    (ABSENT, 2, "needs the package absent.part, which is not"),
    (ABSENT, 2, "Install it, perhaps with: pip install absent. `make setup`"),
])  # fmt: skip
def test_errors_become_messages_and_exit_codes(capsys, monkeypatch, raised, code, words):
    monkeypatch.setattr(cli, "_dispatch", Mock(side_effect=raised))
    got, _, err = run(capsys, "runs")
    assert got == code
    assert words in err


@pytest.mark.parametrize("raised", [RuntimeError("a bug"), BrokenPipeError(32, "a connection broke")])
def test_a_bug_and_a_broken_connection_keep_their_traceback(monkeypatch, raised):
    monkeypatch.setattr(cli, "_dispatch", Mock(side_effect=raised))
    with pytest.raises(type(raised), match=r"a bug|a connection broke"):
        cli.main(["eval"])


def test_arguments_of_train_are_separated_from_fields():
    own = build_parser().parse_args(["--config", "a.yaml", "--seed", "1", "--dry-run", "--debug"])
    assert (own.config, own.dry_run, own.help, own.fields) == (Path("a.yaml"), True, None, ["--seed", "1", "--debug"])
    assert build_parser().parse_args(["-c", "a.yaml", "-h"]).help == "short"
    assert build_parser().parse_args(["-h", "--help-all"]).help == "all"
    assert build_parser().parse_args(["--seed=1", "--config=a=b.yaml"]).config == Path("a=b.yaml")
    for memory in (["--gpu_memory_gib=79.6"], ["--gpu-memory-gib", "79.6"]):
        own = build_parser().parse_args([*memory, "--dry-run"])
        assert (own.gpu_memory_gib, own.fields) == (79.6, [])
    assert build_parser().parse_args(["--dry-run"]).gpu_memory_gib is None


@pytest.mark.parametrize("value", ["0", "-80", "nan", "inf", "1e300", "85899345920", "80GiB", "many", ""])
def test_a_memory_that_no_gpu_has_is_refused(capsys, value):
    code, out, err = run(capsys, "train", "--dry-run", f"--gpu-memory-gib={value}")
    assert (code, out) == (2, "")
    assert "--gpu-memory-gib: it is" in err or "--gpu-memory-gib: invalid float value" in err
    assert value in err


def test_show_prints_the_resolved_configuration_and_defaults_every_field(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("environments: [{name: countdown}]\nenable_individual_sample_lanes: false\n")
    code, out, err = run(capsys, "config", "show", str(path), "--set", "seed=7")
    assert code == 0
    values = yaml.safe_load(out)
    assert (values["seed"], values["free_lane_after_generation"]) == (7, False)
    assert "free_lane_after_generation adjusted" in err
    assert "seed: 7  # set" in out
    defaults = yaml.safe_load(run(capsys, "config", "defaults")[1])
    assert set(values) == set(defaults) == set(TelescopeConfig.model_fields)


@dataclass
class Summary:
    run_name: str = "demo"
    sentence: str = "finished 100 steps in 200 s"
    run_dir: str = "/somewhere/else/runs/demo"
    heldout_before: float | None = 0.22
    heldout_after: float | None = 0.53
    heldout_items: int | None = 500
    heldout_metric: str | None = "correct"
    heldout_temperature: float | None = 1.0
    heldout_gain_interval: list[float] | None = None
    reward_first: float | None = None
    reward_trained_first: float = 0.25
    reward_trained_last: float = 0.375
    reward_last: float | None = None
    model_dir: str | None = "/somewhere/else/runs/demo/model"
    record_error: str | None = None
    heldout_failed: tuple[int, ...] = ()
    eval_problems: tuple[str, ...] = ()
    status: str = "finished"
    steps: int = 100


def closing_lines(summary, **options):
    console = Console(file=io.StringIO(), width=120)
    print_summary(summary, console, **options)
    return console.file.getvalue()


def test_the_closing_lines_show_results_and_next_commands(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    text = closing_lines(Summary(run_dir=str(tmp_path)))
    results = ("0.220 → 0.530", "+0.310", "500 items, temperature 1", "/somewhere/else/runs/demo/model")
    for word in (*results, f"telescope ui {tmp_path}", "telescope query"):
        assert word in text
    assert "query" not in closing_lines(Summary(run_dir=str(tmp_path), steps=0)), "there is no step to list"


@pytest.mark.parametrize(
    ("status", "command"), [("stopped", "train --resume {}"), ("finished", "train --resume {} --number_of_steps 14")]
)
def test_the_closing_lines_show_how_to_continue_a_run_with_checkpoints(tmp_path, status, command):
    (tmp_path / "run.json").write_text("{}")
    text = closing_lines(Summary(run_dir=str(tmp_path), status=status, steps=7), last_checkpoint=7)
    assert text.strip().splitlines()[-1].endswith(command.format(tmp_path))
    assert "the newest is" not in text
    text = closing_lines(Summary(run_dir=str(tmp_path), status=status, steps=7), last_checkpoint=5)
    assert "the newest is after step 5: a resume begins there and repeats 2 steps" in text


def test_the_closing_lines_show_how_to_measure_checkpoints_if_there_are_evals(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    text = closing_lines(Summary(run_dir=str(tmp_path)), last_checkpoint=100, has_evals=True)
    assert f"telescope eval {tmp_path}\n" in text
    assert f"telescope chat {tmp_path}\n" in text
    assert f"query --run {tmp_path} " in text
    assert "eval" not in closing_lines(Summary(run_dir=str(tmp_path)), has_evals=True)


PROBLEM = "eval math500 at version 20 was skipped: the last eval on its servers is still running"


@pytest.mark.parametrize(("summary", "words"), [
    (Summary(eval_problems=(PROBLEM,)), f"evals              1 problem, the last: {PROBLEM}"),
    (Summary(heldout_failed=(0, 46)), "500 items (0 and 46 samples failed), temperature 1"),
    (Summary(heldout_failed=(18,), heldout_after=None), "0.220 before training (500 items (18 samples failed))"),
    (Summary(heldout_gain_interval=[0.27, 0.352]), "(+0.310, 95 % interval +0.270 to +0.352; 500 items"),
    (Summary(heldout_gain_interval=[0.0, 0.0], heldout_after=0.22), "(+0.000 on every item; 500 items"),
], ids=["problems of evals", "failed samples", "failed before training", "interval", "no gain"])  # fmt: skip
def test_the_closing_lines_show(summary, words):
    assert words in closing_lines(summary)
    assert "problem" not in closing_lines(Summary())


def test_the_closing_lines_do_not_point_into_a_run_directory_that_is_gone(tmp_path):
    gone = tmp_path / "gone"
    text = closing_lines(Summary(run_dir=str(gone), record_error=f"[Errno 2] it was removed: '{gone}'"))
    assert f"{gone} was removed during the run" in text
    assert f"the record is incomplete: [Errno 2] it was removed: '{gone}'" in text
    assert "0.220 → 0.530" in text
    assert "telescope query" not in text


def test_training_without_its_packages_explains_how_to_install_them(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("telescope.orchestrator.preflight.TRAINING_PACKAGES", ("no_such_package_anywhere",))
    path = tmp_path / "run.yaml"
    path.write_text(f"environments: [{{name: countdown, kwargs: {{dataset: generated}}}}]\nmodel: {tmp_path}/nowhere\n")
    code, _, err = run(capsys, "train", "--config", str(path))
    assert code == 2
    assert "no_such_package_anywhere" in err
    assert "make setup" in err


@pytest.mark.parametrize("flags", [[], ["--port=8105", "--host", "127.0.0.2"], ["--no_browser"]])
def test_the_command_alone_opens_the_dashboard_also_where_no_runs_are(tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TELESCOPE_RUN_DIR", str(tmp_path / "elsewhere"))
    opened = []
    monkeypatch.setattr(ui, "serve", lambda arguments, folders, remotes: opened.append((arguments, folders)) or 0)
    assert cli.main(flags) == 0
    ((arguments, folders),) = opened
    assert folders == [Path("runs"), tmp_path / "elsewhere"]
    given = (arguments.port, arguments.host, arguments.no_browser)
    assert given == ((8105, "127.0.0.2", False) if len(flags) == 3 else (8005, "127.0.0.1", bool(flags)))


def lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes /locked a folder that this user may not enter."""

    def stat(path: Path, **_: bool) -> os.stat_result:
        if path.is_relative_to("/locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return os.stat(path)

    monkeypatch.setattr(Path, "stat", stat)


def test_folders_of_a_run_that_the_user_may_not_enter_are_refused(capsys, monkeypatch):
    lock(monkeypatch)
    environments = ("--environments", "[{name: countdown}]")
    assert run(capsys, "train", *environments, "--run_dir=/locked", "--resume_from_checkpoint")[::2] == (
        2, "telescope: '/locked' cannot be read: Permission denied. Ask its owner, or name another\n",
    )  # fmt: skip
    config = load_config(None, [*environments, "--checkpoint_dir=/locked"]).config
    with pytest.raises(UserError, match="'/locked' cannot be read"):
        preflight.check_run_dir(config)


@pytest.mark.parametrize("arguments", [
    *(["ui", "{}"], ["runs", "--root", "{}"], ["convert", "{}"], ["envs", "list", "--path", "{}"]),
    *(["train", "--config", "{}"], ["train", "--resume", "{}"], ["eval", "{}"], ["tiny-model", "--output", "{}"]),
    *(["verify", "--config", "{}"], ["config", "show", "{}"], ["query", "select 1", "--root", "{}"]),
    *(["query", "select 1", "--run", "{}"], ["tui", "{}"], ["compact", "{}"], ["sandbox", "reap", "{}"]),
    ["launch", "slurm", "--config", "{}"],
])  # fmt: skip
@pytest.mark.parametrize("path", ["~no-such-user/x", "x" * 300, "x/" * 3000, "/locked/x"])
def test_a_path_that_cannot_exist_or_be_read_is_refused_in_one_line(capsys, monkeypatch, arguments, path):
    lock(monkeypatch)
    code, out, err = run(capsys, *(argument.format(path) for argument in arguments))
    assert (code, out) == (2, "")
    expected = "'/locked/x' cannot be read: Permission denied" if path == "/locked/x" else "is not a path: "
    assert expected in err and err.count("\n") == 1 and len(err) < 300


def test_a_locale_without_a_character_gets_its_number():
    command = [sys.executable, "-m", "telescope", "config", "explain", "interleaved_rollouts"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "across turns \\u2014 avoids" in " ".join(done.stdout.split())
