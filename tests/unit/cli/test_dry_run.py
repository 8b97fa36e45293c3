"""A dry run judges as the run would: what this machine would refuse is an error, unless it is not the one meant."""

import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from tests.model_folder import write_model_folder
from tests.unit.cli.conftest import FITTED, HERE, set_machine

from telescope.cli import main
from telescope.config import TelescopeConfig, machine
from telescope.config.generate import default_yaml
from telescope.config.plan import NodeResources
from telescope.config.remarks import remarks_on_resuming
from telescope.errors import ConfigError, RunError
from telescope.orchestrator import preflight

pytestmark = pytest.mark.usefixtures("small_machine")


def test_the_servers_for_evals_are_marked(dry_run):
    printed, _ = dry_run(**HERE, inference_num_workers=2, evals="[{name: countdown, num_samples: 3}]")
    assert "inference server 1, for evals" in printed
    assert "inference server 0, for evals" not in printed


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, [True]),
    ({"run_dir": "/proc/x"}, [False]),
    ({"device": "cuda", "gpu": 80}, [False]),
    ({"model": "/nowhere"}, [False]),
    ({"environments": "[{name: countdwn}]"}, []),
])  # fmt: skip
def test_environments_are_tried_if_they_are_found(dry_run, tried, changes, expected):
    dry_run(**HERE | changes)
    assert tried == expected


@pytest.mark.parametrize(("changes", "problems"), [
    ({}, 1),
    ({"run_dir": "/proc/x"}, 2),
    ({"run_dir": "/proc/x", "model": "/nowhere"}, 3),
    ({"run_dir": "/proc/x", "model": "/nowhere", "ray_trainer_cpus_per_worker": 8, "alert_command": "nothing"}, 5),
])  # fmt: skip
def test_problems_of_data_model_and_machine_are_reported_together(dry_run, changes, problems):
    printed, error = dry_run(**HERE | changes, broken="The dataset is empty\nat line 3")
    assert len(ConfigError(error).problems) == problems
    assert "The dataset is empty\n  at line 3" in error
    assert "nothing was started" not in printed


def test_a_long_chat_template_is_not_shown_in_full(dry_run):
    printed, _ = dry_run(**HERE, chat_template="{{ messages[-1].content }}" + "x" * 5000)
    assert 800 < printed.count("x") < 1100


def test_a_dry_run_shows_what_differs_from_the_defaults(dry_run):
    printed, _ = dry_run(**HERE, seq_len=64, max_tokens=32, eval_num_servers=1, evals="[{name: countdown}]")
    rows = [line.split()[-1] for line in printed.splitlines() if line.startswith(("* ", "  ")) and "learning" in line]
    assert rows == []
    assert re.search(r"^\* max_tokens +32 +command line", printed, re.MULTILINE)
    assert "--all shows all " in printed
    every, _ = dry_run(**HERE, all_fields=True)
    assert re.search(r"^  learning_rate +1\.0e-06 *$", every, re.MULTILINE)


CORES = "ray_inference_cpus_per_worker 4 -> {0}, ray_trainer_cpus_per_worker 4 -> {0}."


@pytest.mark.parametrize(("cpus", "gpus", "settings", "adjusted"), [
    (2.0, 0, {}, CORES.format(0.5)),
    (1.0, 0, {"device": "cpu"}, CORES.format(0.2)),
    (6.0, 0, {}, CORES.format(1)),
    (16.0, 0, {}, None),
    (2.0, 0, {"inference_num_workers": 1}, CORES.format(0.5)),
    (2.0, 0, {"ray_trainer_cpus_per_worker": 0.9}, "ray_inference_cpus_per_worker 4 -> 0.1."),
    (8.0, 2, {}, "inference_num_workers 2 -> 1, trainer_num_workers 2 -> 1."),
    (64.0, 3, {}, "inference_num_workers 2 -> 1."),
    (64.0, 3, {"inference_num_workers": 2}, "trainer_num_workers 2 -> 1."),
    (4.0, 2, {}, "inference_num_workers 2 -> 1, trainer_num_workers 2 -> 1, " + CORES.format(2)),
    (8.0, 1, {}, "inference_num_workers 2 -> 1, trainer_num_workers 2 -> 1, share_gpus false -> true."),
    (64.0, 2, {"share_gpus": "true", "inference_num_workers": 2}, None),
])  # fmt: skip
def test_defaults_that_do_not_fit_the_machine_are_adjusted_in_one_line(
    dry_run, monkeypatch, cpus, gpus, settings, adjusted
):
    node = NodeResources("here", cpus, gpus, memory_bytes=64 << 30, gpu_memory_bytes=80 << 30 if gpus else None)
    set_machine(monkeypatch, node)
    printed, error = dry_run(ray_address="local", use_wandb=False, **settings)
    assert error is None
    assert [line for line in printed.splitlines() if FITTED in line] == ([f"· {FITTED}{adjusted}"] if adjusted else [])
    assert "assumed" not in printed


@pytest.mark.parametrize(("settings", "message"), [
    ({"ray_inference_cpus_per_worker": 4}, "ray_inference_cpus_per_worker 4"),
    ({"ray_trainer_cpus_per_worker": 3, "ray_inference_cpus_per_worker": 0.1}, "ray_trainer_cpus_per_worker 3"),
])  # fmt: skip
def test_a_typed_value_that_does_not_fit_the_machine_is_kept_and_refused(dry_run, settings, message):
    printed, error = dry_run(device="cpu", ray_address="local", use_wandb=False, **settings)
    assert message in error
    assert "-> 0" not in printed


def test_a_default_that_is_written_out_is_adjusted_like_a_default(dry_run, tmp_path):
    config = tmp_path / "copy.yaml"
    config.write_text(default_yaml().replace("environments: []\n", "") + "environments: [{name: countdown}]\n")
    printed, error = dry_run(config=config, device="cpu", ray_address="local", use_wandb=False)
    assert error is None
    assert CORES.format(0.5) in printed


def test_a_default_port_in_use_is_changed(dry_run, monkeypatch):
    monkeypatch.setattr(machine, "listen_problem", lambda host, port: machine.IN_USE if port == 8101 else None)
    assert f"{FITTED}inference_base_port 8100 -> 8200." in dry_run(**HERE)[0]
    assert FITTED not in dry_run(**HERE, inference_base_port=8101)[0]


def remarks_of(printed: str) -> list[str]:
    return [line.removeprefix("· ") for line in printed.splitlines() if line.startswith("· ")]


def test_a_run_that_fits_has_one_remark_that_it_cannot_be_resumed(dry_run):
    printed, error = dry_run(**HERE)
    assert error is None
    assert remarks_of(printed) == remarks_on_resuming(TelescopeConfig(environments=[{"name": "countdown"}]))
    assert "trainer rank 1" in printed
    assert remarks_of(dry_run(**HERE, checkpoint_every=5)[0]) == []


@pytest.mark.parametrize(("number", "shown"), [(1, "1 step"), (20, "20 steps")])
def test_the_number_of_steps_is_shown_and_unused_kinds_of_memory_have_no_row(dry_run, number, shown):
    printed, _ = dry_run(**HERE, number_of_steps=number)
    assert re.search(rf"in flight; {shown}$", printed, re.MULTILINE)
    assert "gradients" in printed
    for words in ("libraries", "second copy for weight syncs", "0.0 MiB"):
        assert words not in printed


SHARED = {"share_gpus": "true", "inference_num_workers": 2, "trainer_num_workers": 2}
WITHOUT_EFFECT = [
    (SHARED, 'share_gpus is true and has no effect, because device is "cpu". Set share_gpus to false'),
    (SHARED | {"device": "auto"}, "share_gpus is true and has no effect, because no GPU was found"),
    (
        {"gradient_checkpointing": "true", "gradient_checkpointing_layers": 3},
        "model has 2 layers: all of them are recomputed, as without it. Set it to less than 2",
    ),
]


@pytest.mark.parametrize(("settings", "words"), WITHOUT_EFFECT)
def test_a_field_without_effect_is_a_remark_of_dry_run_run_and_verification(
    dry_run, tmp_path, monkeypatch, capsys, settings, words
):
    printed, error = dry_run(**HERE | settings)
    assert error is None
    assert words in printed
    run_training = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("telescope.orchestrator.run.run_training", run_training)
    monkeypatch.setattr("telescope.verify.run.run_verification", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr("telescope.cli.train.try_components", lambda config, here: [])
    values = HERE | {"model": tmp_path / "model", "environments": "[{name: countdown}]"} | settings
    flags = [f"--{name}={value}" for name, value in values.items()]
    with pytest.raises(KeyboardInterrupt):
        main.call("train", flags)
    assert any(words in note for note in run_training.call_args.args[1])
    with pytest.raises(KeyboardInterrupt):
        main.call("verify", flags)
    assert words in capsys.readouterr().err


def test_a_verification_needs_no_disk_run_directory_tracker_or_eval(tmp_path, monkeypatch, dry_run):
    dry_run(**HERE)  # makes the model

    def disk_usage(path):
        return SimpleNamespace(free=2**40 if path == machine.SHARED_MEMORY else 1, total=2**40)

    monkeypatch.setattr(preflight.shutil, "disk_usage", disk_usage)
    monkeypatch.setattr("telescope.cli.train.try_components", lambda config, here: [])
    run_verification = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("telescope.verify.run.run_verification", run_verification)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    values = HERE | {
        "model": tmp_path / "model", "environments": "[{name: countdown}]", "checkpoint_every": 5,
        "run_dir": tmp_path / "run", "use_wandb": True, "trackers": "[wandb]", "evals": "[{name: missing}]",
    }  # fmt: skip
    monkeypatch.chdir("/proc")  # where no run can be written
    with pytest.raises(KeyboardInterrupt):
        main.call("verify", [f"--{name}={value}" for name, value in values.items()])
    started = run_verification.call_args.args[0]
    assert (started.checkpoint_every, started.save_final_model, started.tracker_names) == (0, False, [])


@pytest.mark.parametrize("debug", [True, False])
def test_debug_shows_the_stack_of_an_error_that_ends_a_run(monkeypatch, capsys, tmp_path, debug):
    def run_training(config, notes, view):
        assert notes == remarks_on_resuming(config) != []
        raise RunError("the run cannot go on")

    monkeypatch.setattr("telescope.orchestrator.run.run_training", run_training)
    monkeypatch.setattr("telescope.cli.train.check_before_start", lambda loaded: [])
    with pytest.raises(RunError):
        main.call("train", ["--environments", "[{name: countdown}]", f"--debug={str(debug).lower()}"])
    assert ("in run_training" in capsys.readouterr().err) is debug


def test_a_field_with_an_effect_is_no_remark(dry_run):
    printed, _ = dry_run(**HERE | {"gradient_checkpointing_layers": 2})
    assert len(remarks_of(printed)) == 1, "that it cannot be resumed"
    printed, _ = dry_run(**SHARED, ray_trainer_cpus_per_worker=4)  # for GPUs: this machine is too small without
    assert "the plan is for a machine with 2 GPUs" in printed
    assert "has no effect" not in printed


def test_a_machine_that_is_too_small_is_an_error_after_the_plan(dry_run):
    printed, error = dry_run(**HERE | {"ray_trainer_cpus_per_worker": 4})
    assert "needs 8.2 CPU cores" in error
    assert "assumed node 1" in printed
    assert "nothing was started" not in printed


def test_a_kv_cache_that_holds_no_sequence_is_an_error(dry_run, tmp_path):
    values = {"max_model_len": 8192, "inference_kv_cache_gib": 0.5, "model_dtype": "float32"}
    assert dry_run(**HERE, **values)[1] is None
    wide = {"hidden_size": 65536, "num_key_value_heads": 256, "num_attention_heads": 256}
    model = write_model_folder(tmp_path / "wide", **wide)
    _, error = dry_run(**HERE, **values, mixed_precision_dtype="null", model=model)
    assert "max_model_len is 8192, but the KV cache" in error
