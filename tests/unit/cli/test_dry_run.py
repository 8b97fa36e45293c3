"""A dry run judges as the run would: what this machine would refuse is an error, unless it is not the one meant."""

from __future__ import annotations

import io
import re
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from tests.model_folder import write_model_folder

from telescope.cli import train, verify
from telescope.cli.dry_run import MOST_WORKERS_SHOWN, print_dry_run
from telescope.config import TelescopeConfig, load_config, machine, preflight
from telescope.config.generate import default_yaml
from telescope.config.model_files import inspect_model
from telescope.config.plan import ClusterResources, NodeResources
from telescope.config.remarks import remarks_on_resuming
from telescope.errors import ConfigError, RunError, UnreachableError, UserError

HERE = {"device": "cpu", "ray_address": "local", "use_wandb": False, "ray_inference_cpus_per_worker": 0.1,
        "ray_trainer_cpus_per_worker": 0.1}  # fmt: skip


@pytest.fixture(autouse=True)
def small_machine(monkeypatch, tmp_path):
    """Two cores, 8 GiB and no GPU, with everything installed, all ports free and no cluster running."""
    node = NodeResources("here", cpus=2.0, gpus=0, memory_bytes=8 << 30)
    for module in ("telescope.cli.dry_run", "telescope.config.preflight"):
        monkeypatch.setattr(f"{module}.local_resources", lambda: ClusterResources((node,)))
    monkeypatch.setattr("telescope.config.remarks.cpu_flags", frozenset)
    monkeypatch.setattr(preflight, "TRAINING_PACKAGES", ())
    monkeypatch.setattr(preflight, "require_port", lambda host, port, **server: None)
    monkeypatch.setattr(preflight, "listen_problem", lambda host, port: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


@pytest.fixture
def tried() -> list[bool]:
    """Whether the run is meant for this machine, for each time that user code was tried."""
    return []


@pytest.fixture
def dry_run(tmp_path: Path, tried: list[bool]):
    """Prints the dry run of a configuration that nothing is wrong with, with `values` set. Returns what was printed
    and, where it was refused, the error."""
    model = write_model_folder(tmp_path / "model")

    def run(
        *,
        config: Path | None = None,
        gpu: float | None = None,
        width: int = 1000,
        broken: str | Exception = "",
        all_fields: bool = False,
        **values: object,
    ) -> tuple[str, str | None]:
        settings = {"model": str(model), "environments": "[{name: countdown}]", "run_dir": str(tmp_path / "run")}
        flags = [f"--{name}={value}" for name, value in {**settings, **values}.items()]
        out = io.StringIO()

        def try_user_code(here: bool) -> list[str]:
            tried.append(here)
            if broken:
                raise broken if isinstance(broken, Exception) else UserError(broken)
            return []

        console = Console(file=out, width=width)
        try:
            loaded = load_config(config, flags, {})
            loaded = loaded if gpu else train.fit_to_machine(loaded)
            print_dry_run(loaded, console, try_user_code, gpu_memory_gib=gpu, all_fields=all_fields)
        except ConfigError as error:
            return out.getvalue(), str(error)
        return out.getvalue(), None

    return run


def test_the_servers_for_evals_are_marked(dry_run):
    printed, _ = dry_run(**HERE, inference_num_workers=2, evals="[{name: countdown, num_samples: 3}]")
    assert "inference server 1, for evals" in printed
    assert "inference server 0, for evals" not in printed


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [True]),
        ({"run_dir": "/proc/x"}, [False]),
        ({"device": "cuda", "gpu": 80}, [False]),
        ({"model": "/nowhere"}, [False]),
        ({"environments": "[{name: countdwn}]"}, []),
    ],
)
def test_environments_are_tried_if_they_are_found(dry_run, tried, changes, expected):
    dry_run(**HERE | changes)
    assert tried == expected


@pytest.mark.parametrize(
    ("changes", "problems"),
    [
        ({}, 1),
        ({"run_dir": "/proc/x"}, 2),
        ({"run_dir": "/proc/x", "model": "/nowhere"}, 3),
        ({"run_dir": "/proc/x", "model": "/nowhere", "ray_trainer_cpus_per_worker": 8, "alert_command": "nothing"}, 5),
    ],
)
def test_problems_of_data_model_and_machine_are_reported_together(dry_run, changes, problems):
    printed, error = dry_run(**HERE | changes, broken="The dataset is empty\nat line 3")
    assert len(ConfigError(error).problems) == problems
    assert "The dataset is empty\n  at line 3" in error
    assert "nothing was started" not in printed


def test_a_dry_run_shows_what_differs_from_the_defaults(dry_run):
    printed, _ = dry_run(**HERE, seq_len=64, max_tokens=32, eval_num_servers=1, evals="[{name: countdown}]")
    rows = [line.split()[-1] for line in printed.splitlines() if line.startswith(("* ", "  ")) and "learning" in line]
    assert rows == []
    assert re.search(r"^\* max_tokens +32 +command line", printed, re.MULTILINE)
    assert "--all shows all " in printed
    every, _ = dry_run(**HERE, all_fields=True)
    assert re.search(r"^  learning_rate +1\.0e-06 *$", every, re.MULTILINE)


FITTED = "Defaults adjusted to this machine: "
CORES = "ray_inference_cpus_per_worker 4 -> {0}, ray_trainer_cpus_per_worker 4 -> {0}."


@pytest.mark.parametrize(
    ("cpus", "gpus", "settings", "adjusted"),
    [
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
    ],
)
def test_defaults_that_do_not_fit_the_machine_are_adjusted_in_one_line(
    dry_run, monkeypatch, cpus, gpus, settings, adjusted
):
    node = NodeResources("here", cpus, gpus, memory_bytes=64 << 30, gpu_memory_bytes=80 << 30 if gpus else None)
    for module in ("telescope.cli.dry_run", "telescope.config.preflight"):
        monkeypatch.setattr(f"{module}.local_resources", lambda: ClusterResources((node,)))
    printed, error = dry_run(ray_address="local", use_wandb=False, **settings)
    assert error is None
    assert [line for line in printed.splitlines() if FITTED in line] == ([f"· {FITTED}{adjusted}"] if adjusted else [])
    assert "assumed" not in printed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ray_inference_cpus_per_worker": 4}, "ray_inference_cpus_per_worker 4"),
        ({"ray_trainer_cpus_per_worker": 3, "ray_inference_cpus_per_worker": 0.1}, "ray_trainer_cpus_per_worker 3"),
    ],
)
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
    monkeypatch.setattr(preflight, "listen_problem", lambda host, port: machine.IN_USE if port == 8101 else None)
    monkeypatch.setattr(preflight, "free_block", lambda host, count, above: above + 100)
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
def test_the_number_of_steps_is_shown(dry_run, number, shown):
    printed, _ = dry_run(**HERE, number_of_steps=number)
    assert re.search(rf"in flight; {shown}$", printed, re.MULTILINE)


def test_unused_kinds_of_memory_have_no_row(dry_run):
    printed, _ = dry_run(**HERE)
    assert "gradients" in printed
    assert "libraries" not in printed
    assert "second copy for weight syncs" not in printed
    assert "0.0 MiB" not in printed


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
    shown = []

    def run_training(config, notes, view):
        shown.extend(notes)
        raise KeyboardInterrupt

    def run_verification(config, view, report):
        raise KeyboardInterrupt

    monkeypatch.setattr("telescope.orchestrator.run.run_training", run_training)
    monkeypatch.setattr("telescope.verify.run.run_verification", run_verification)
    monkeypatch.setattr("telescope.cli.train.try_components", lambda config, here: [])
    values = HERE | {"model": tmp_path / "model", "environments": "[{name: countdown}]"} | settings
    flags = [f"--{name}={value}" for name, value in values.items()]
    with pytest.raises(KeyboardInterrupt):
        train.run(flags)
    assert any(words in note for note in shown)
    with pytest.raises(KeyboardInterrupt):
        verify.run(flags)
    assert words in capsys.readouterr().err


def test_a_verification_needs_no_disk_for_checkpoints_or_a_model(tmp_path, monkeypatch, dry_run):
    dry_run(**HERE)  # makes the model

    def disk_usage(path):
        return SimpleNamespace(free=2**40 if path == machine.SHARED_MEMORY else 1, total=2**40)

    monkeypatch.setattr(preflight.shutil, "disk_usage", disk_usage)
    monkeypatch.setattr("telescope.cli.train.try_components", lambda config, here: [])
    started = []

    def run_verification(config, view, report):
        started.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr("telescope.verify.run.run_verification", run_verification)
    values = HERE | {"model": tmp_path / "model", "environments": "[{name: countdown}]", "checkpoint_every": 5}
    with pytest.raises(KeyboardInterrupt):
        verify.run([f"--{name}={value}" for name, value in values.items()])
    assert (started[0].checkpoint_every, started[0].save_final_model) == (0, False)


@pytest.mark.parametrize("debug", [True, False])
def test_debug_shows_the_stack_of_an_error_that_ends_a_run(monkeypatch, capsys, tmp_path, debug):
    def run_training(config, notes, view):
        assert notes == remarks_on_resuming(config) != []
        raise RunError("the run cannot go on")

    monkeypatch.setattr("telescope.orchestrator.run.run_training", run_training)
    monkeypatch.setattr("telescope.cli.train.check_before_start", lambda loaded: [])
    with pytest.raises(RunError):
        train.run(["--environments", "[{name: countdown}]", f"--debug={str(debug).lower()}"])
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


def test_a_port_in_use_is_an_error(dry_run, monkeypatch):
    monkeypatch.setattr(preflight, "require_port", machine.require_port)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        _, error = dry_run(**HERE, inference_base_port=port)
    assert f"inference_base_port is {port}" in error


def test_a_run_directory_that_cannot_be_written_is_an_error(dry_run):
    _, error = dry_run(**HERE | {"run_dir": "/proc/telescope"})
    assert "run_dir is '/proc/telescope'" in error


def test_missing_packages_are_an_error(dry_run, monkeypatch):
    monkeypatch.setattr(preflight, "TRAINING_PACKAGES", ("no_such_package",))
    _, error = dry_run(**HERE)
    assert "no_such_package" in error


def test_a_kv_cache_that_holds_no_sequence_is_an_error(dry_run, tmp_path):
    values = {"max_model_len": 8192, "inference_kv_cache_gib": 0.5, "model_dtype": "float32"}
    assert dry_run(**HERE, **values)[1] is None
    wide = {"hidden_size": 65536, "num_key_value_heads": 256, "num_attention_heads": 256}
    model = write_model_folder(tmp_path / "wide", **wide)
    _, error = dry_run(**HERE, **values, mixed_precision_dtype="null", model=model)
    assert "max_model_len is 8192, but the KV cache" in error


def test_all_problems_of_this_machine_are_reported_together(dry_run):
    _, error = dry_run(**HERE | {"ray_trainer_cpus_per_worker": 4, "run_dir": "/proc/telescope"})
    assert len(error.splitlines()) == 2


def test_a_model_too_large_for_the_memory_here_is_planned_for_a_machine_with_gpus(dry_run, tmp_path):
    printed, error = dry_run(ray_address="local", model=write_model_folder(tmp_path / "4b", **FOUR_B))
    assert error is None
    assert "No GPU was found on this machine, and its CPU cores or memory do not hold the run" in printed
    assert "the plan is for a machine with 4 GPUs" in printed
    assert FITTED not in printed
    assert "assumed node 1" in printed


@pytest.mark.parametrize("settings", [{}, {"inference_quantization": "fp8_per_block"}, {"share_gpus": "true"}])
def test_gpus_that_are_asked_for_and_not_here_are_an_error(dry_run, settings):
    _, error = dry_run(device="cuda", ray_address="local", **settings)
    assert 'device is "cuda", but no GPU was found' in error
    assert "--gpu-memory-gib 80 plans for a machine with such GPUs" in error
    assert dry_run(device="cuda", ray_address="local", gpu=80, **settings)[1] is None


def test_a_problem_of_this_machine_is_a_remark_on_a_run_for_another(dry_run):
    for values in ({"device": "cuda", "gpu": 80}, {"ray_address": "10.0.0.1:6379"}):
        printed, error = dry_run(**values, run_dir="/proc/telescope")
        assert error is None
        assert "On this machine, a run would be refused: run_dir is '/proc/telescope'" in printed


def test_a_problem_on_any_machine_is_an_error_for_another_machine_too(dry_run, tmp_path):
    printed, error = dry_run(device="cuda", gpu=80, environments="[{name: countdwn}]", model=tmp_path / "nowhere")
    assert "Did you mean 'countdown'?" in error
    assert "does not exist" in error
    assert printed == ""


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 64}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_that_are_always_updated_in_place_are_a_remark(dry_run, tmp_path, device):
    values = HERE | ({"device": device, "gpu": 80} if device == "cuda" else {})
    assert "in place" not in dry_run(**values)[0]
    two, error = dry_run(**values, inference_tensor_parallel_size=2, inference_num_workers=2)
    assert error is None
    assert "Weights reach the servers in place, inside a pause of each: collectives of a tensor-parallel" in two
    experts, error = dry_run(**values, model=write_model_folder(tmp_path / "experts", **EXPERTS))
    assert error is None
    assert "Weights reach the servers in place, inside a pause of each: the model has experts." in experts


def test_thousands_of_workers_are_planned_and_the_first_are_shown(dry_run):
    printed, error = dry_run(device="cuda", gpu=80, trainer_num_workers=1000, inference_num_workers=1000)
    assert error is None
    assert printed.count("inference server ") == MOST_WORKERS_SHOWN
    assert "and 1936 more, on 250 nodes in all" in printed


EXAMPLE = Path(__file__).parents[3] / "configs" / "examples" / "example_countdown.yaml"
FOUR_B = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
          "num_key_value_heads": 8, "vocab_size": 151936}  # fmt: skip
ONE_GPU = {"inference_num_workers": 1, "trainer_num_workers": 1, "share_gpus": "true"}
DOES_NOT_FIT = "A trainer worker needs about"
UNKNOWN = "GPU memory is not known here: --gpu-memory-gib 80 checks the plan for such GPUs."


def memory_of(printed: str) -> list[str]:
    """The rows of the estimate and what is shown of them."""
    rows = printed.partition("Memory (estimate")[2].splitlines()[1:]
    return [row for row in rows if row and row != "Remarks" and "assumed" not in row]


def test_a_dataset_that_cannot_be_reached_is_refused_for_this_machine_and_a_remark_for_another(dry_run):
    missing = UnreachableError("hendrycks_math: the dataset cannot be loaded from the hub")
    assert dry_run(**HERE, broken=missing)[1] == str(missing)
    printed, error = dry_run(config=EXAMPLE, gpu=80, broken=missing)
    assert error is None
    assert f"· Not checked on this machine: {missing}" in printed
    assert "no column" in dry_run(config=EXAMPLE, gpu=80, broken="the dataset has no column problem")[1]


def test_a_plan_that_fits_the_assumed_gpus_is_printed_in_full(dry_run):
    printed, error = dry_run(config=EXAMPLE, gpu=80)
    assert error is None
    assert "GPUs of 80 GiB are assumed (--gpu-memory-gib): the plan is for a machine with 4 of them" in printed
    assert "Memory (estimate, for GPUs of 80 GiB as assumed)" in printed
    assert re.search(r"second copy for weight syncs +\d", printed)
    assert re.search(r"KV cache holds [\d,]+ tokens", printed)
    assert re.search(r"total +72\.00 GiB", printed)
    for words in (UNKNOWN, "what is left", DOES_NOT_FIT, "would be refused"):
        assert words not in printed


def test_the_memory_estimate_is_never_cut_off(dry_run):
    shared = {"share_gpus": True, "inference_num_workers": 1, "trainer_num_workers": 1}
    printed, _ = dry_run(config=EXAMPLE, gpu=80, width=80, **shared)
    assert "…" not in "".join(memory_of(printed))


def test_without_an_assumption_the_option_is_named_and_known_sizes_are_listed(dry_run, tmp_path):
    printed, error = dry_run(config=EXAMPLE, model=write_model_folder(tmp_path / "4b", **FOUR_B))
    assert error is None
    assert UNKNOWN in printed
    assert "assumed)" not in printed
    assert "second copy for weight syncs" not in printed
    insists, _ = dry_run(config=EXAMPLE, model=tmp_path / "4b", weight_transfer="background")
    assert re.search(r"second copy for weight syncs +\d", insists)
    assert UNKNOWN not in dry_run(**HERE)[0]


@pytest.mark.parametrize(
    ("gpu", "settings", "shown", "refused"),
    [
        (80, {}, "KV cache holds", False),
        (24, {}, DOES_NOT_FIT, False),
        (19, {"max_model_len": 8192, "max_tokens": 4096, "weight_transfer": "background"}, "saves", False),
        (141, ONE_GPU, "second copy for weight syncs", False),
        (80, ONE_GPU, "share_gpus leaves it 47.0 of a GPU's 80.0 GiB", True),
    ],
)
def test_the_verdict_applies_to_a_machine_with_the_assumed_gpus(
    dry_run, monkeypatch, tmp_path, gpu, settings, shown, refused
):
    values = {"ray_address": "local", "model": write_model_folder(tmp_path / "4b", **FOUR_B)} | settings
    printed, error = dry_run(config=EXAMPLE, gpu=gpu, **values)
    assert shown in printed
    assert (error is not None) == refused
    assert shown in (error or shown)

    node = NodeResources("gpus", cpus=64.0, gpus=4, memory_bytes=1 << 40, gpu_memory_bytes=gpu << 30)
    for module in ("telescope.cli.dry_run", "telescope.config.preflight"):
        monkeypatch.setattr(f"{module}.local_resources", lambda: ClusterResources((node,)))
    there, error_there = dry_run(config=EXAMPLE, **values)
    assert memory_of(printed) == memory_of(there)
    assert error == error_there


def test_assumed_gpus_replace_those_of_this_machine(dry_run, monkeypatch, tmp_path):
    node = NodeResources("gpus", cpus=64.0, gpus=1, memory_bytes=1 << 40, gpu_memory_bytes=24 << 30)
    for module in ("telescope.cli.dry_run", "telescope.config.preflight"):
        monkeypatch.setattr(f"{module}.local_resources", lambda: ClusterResources((node,)))
    values = {"ray_address": "local", "model": write_model_folder(tmp_path / "4b", **FOUR_B)} | ONE_GPU
    assert "a GPU's 24.0 GiB" in dry_run(**values)[1]
    assert dry_run(**values, gpu=141)[1] is None
    assert "a machine with 4 of them" in dry_run(config=EXAMPLE, ray_address="local", gpu=141)[0]


def test_experts_on_two_ranks_do_not_fit(dry_run, tmp_path):
    experts = {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
               "num_experts": 128, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
               "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}  # fmt: skip
    model = write_model_folder(tmp_path / "experts", **experts)
    assert DOES_NOT_FIT not in dry_run(config=EXAMPLE, model=model)[0]
    printed, _ = dry_run(config=EXAMPLE, model=model, gpu=80)
    assert re.search(r"A trainer worker needs about \d+\.\d GiB, and a GPU has 80\.0 GiB: raise trainer_num_w", printed)


def test_a_problem_of_this_machine_is_a_remark_on_a_plan_for_assumed_gpus(dry_run, tried):
    printed, error = dry_run(config=EXAMPLE, gpu=80, run_dir="/proc/telescope")
    assert error is None
    assert "On this machine, a run would be refused: run_dir is '/proc/telescope'" in printed
    assert tried == [False]


def test_what_the_sizes_of_a_model_exclude_is_an_error_on_a_plan_for_assumed_gpus(dry_run):
    _, error = dry_run(config=EXAMPLE, gpu=80, router_replay=True)
    assert error is not None
    assert error.startswith("router_replay is true, but ")


def test_a_sync_of_adapters_is_described_as_one(dry_run):
    adapters = {"lora_rank": 8, "lora_sync": "adapter", "model_dtype": "bfloat16"}
    printed, _ = dry_run(config=EXAMPLE, gpu=80, **adapters)
    assert "A sync loads the adapter alone into each server" in printed
    assert "Weights reach the servers in place" not in printed


def test_an_unreachable_hub_is_an_error_only_if_nothing_can_be_checked(dry_run, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("telescope.cli.dry_run.inspect_model", lambda config: inspect_model(config, ask_hub=False))
    printed, error = dry_run(config=EXAMPLE, gpu=80, model="Qwen/Qwen2.5-3B")
    assert error is None
    assert "On this machine, a run would be refused: model is 'Qwen/Qwen2.5-3B'" in printed
    printed, error = dry_run(config=EXAMPLE, gpu=80, model="acme/secret-1B")
    assert "model is 'acme/secret-1B'" in error
    assert "no estimate" in printed


def test_a_run_on_the_cpu_has_no_gpu_to_assume(dry_run):
    printed, error = dry_run(**HERE, gpu=80)
    assert printed == ""
    assert 'device is "cpu", so that the run takes no GPU. Leave --gpu-memory-gib out' in error
