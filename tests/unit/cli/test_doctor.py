"""`telescope doctor`: every problem comes with a fix, and the exit code shows whether training can run."""

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from urllib.error import HTTPError

import pytest

from telescope.cli import doctor
from telescope.cli.doctor import Check
from telescope.cli.main import main
from telescope.config import load_config, machine
from telescope.config.machine import LOOPBACK
from telescope.orchestrator import preflight

CPU_TORCH: dict[str, object] = {"version": "2.13.0+cpu", "cuda": None, "gpus": 0, "gloo": True, "nccl": False}
CUDA_TORCH: dict[str, object] = {"version": "2.11.0", "cuda": "13.0", "gpus": 1, "gloo": True, "nccl": True}
GPUS = ["NVIDIA H100 (80 GiB, driver 580)"]


def test_every_check_returns_a_result_and_a_fix_unless_ok(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "ask_torch", lambda: CPU_TORCH)
    checks = doctor.run_checks(hub=False)
    assert len({check.name for check in checks}) == len(checks) > 15
    for check in checks:
        assert check.found
        assert (check.fix is None) == (check.status == "ok")


@pytest.mark.parametrize("argv", [
    "--nodes 2", "--address 10.0.0.9:6379", "--wait-seconds 5", "--run-dir /shared", "--image alpine",
    "--sandbox local --nodes 2",
])  # fmt: skip
def test_an_option_of_another_mode_is_refused(argv: str, capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", *argv.split()]) == 2
    assert "is an option of `telescope doctor --" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("note", 0), ("bad", 1)])
def test_the_exit_code_shows_whether_training_can_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: doctor.Status, code: int
):
    fix = None if status == "ok" else "do this"
    monkeypatch.setattr(doctor, "run_checks", lambda hub: [Check("thing", status, "as found", fix)])
    assert main(["doctor", "--json", "--no-hub"]) == code
    printed = json.loads(capsys.readouterr().out)
    assert printed["can_train"] == (code == 0)
    assert printed["checks"] == [{"name": "thing", "status": status, "found": "as found", "fix": fix}]
    assert main(["doctor", "--no-hub"]) == code
    table = capsys.readouterr().out
    assert "as found" in table
    assert ("do this" in table) == (fix is not None)


@pytest.mark.parametrize(("answer", "gpus", "status"), [
    (CPU_TORCH, [], "ok"),
    (CPU_TORCH, GPUS, "note"),
    (CUDA_TORCH, GPUS, "ok"),
    (CUDA_TORCH | {"gpus": 0}, GPUS, "bad"),
    (CPU_TORCH | {"gloo": False}, [], "bad"),
    ({"error": "import torch fails: ImportError: libcudart"}, [], "bad"),
])  # fmt: skip
def test_torch_has_to_fit_the_devices(answer: dict[str, object], gpus: list[str], status: str):
    check = doctor.check_torch(answer, gpus)
    assert check.status == status
    assert str(answer.get("error", "")) in check.found


@pytest.mark.parametrize(("version", "cpu", "gpus", "status"), [
    ("0.32.0", True, [], "ok"), ("0.32.0", True, GPUS, "note"), ("0.26.0", False, GPUS, "ok"),
    ("0.26.0", False, [], "bad"), ("0.9.1", True, [], "bad"), (None, True, [], "bad"),
])  # fmt: skip
def test_vllm_has_to_be_a_supported_version_for_the_device(
    monkeypatch: pytest.MonkeyPatch, version: str | None, cpu: bool, gpus: list[str], status: str
):
    monkeypatch.setattr(doctor.support, "installed_version", lambda: version)
    monkeypatch.setattr(doctor.support, "is_cpu_build", lambda: cpu)
    check = doctor.check_vllm(gpus)
    assert check.status == status
    assert "0.26 to 0.32" in check.found


def test_a_torchvision_for_cuda_beside_a_cpu_torch_is_found(monkeypatch: pytest.MonkeyPatch):
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    monkeypatch.setattr(doctor, "installed_version", versions.get)
    assert doctor.check_torchvision().status == "bad"
    versions["torchvision"] = "0.28.0+cpu"
    assert doctor.check_torchvision().status == "ok"


@pytest.mark.parametrize(("versions", "status"), [({}, "note"), ({"megatron-core": "0.19.2"}, "ok")])
def test_missing_parts_for_large_models_are_named(monkeypatch: pytest.MonkeyPatch, versions, status):
    monkeypatch.setattr(doctor, "installed_version", versions.get)
    monkeypatch.setattr(doctor, "ask_torch", lambda: CPU_TORCH)
    (check,) = (check for check in doctor.run_checks(hub=False) if check.name == "megatron-core")
    assert check.status == status
    assert ("MEGATRON=1" in (check.fix or "")) == (status == "note")


def test_a_variable_that_no_configuration_can_have_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TELESCOPE_RUN_DIR", "~unknown-user/run")
    (check,) = doctor.check_default_run()
    assert check.status == "bad"
    assert "TELESCOPE_RUN_DIR" in check.found


@pytest.mark.parametrize("present", [{}, {"transformer-engine": "2.20.2"}])
def test_a_missing_transformer_engine_is_named_with_the_fields_that_need_it(monkeypatch, present):
    monkeypatch.setattr(doctor, "installed_version", present.get)
    check = doctor.check_transformer_engine()
    assert check.status == "note"
    assert "transformer-engine-torch" in check.found
    assert ("transformer-engine and" in check.found) == (not present)
    assert "docs/gpu.md" in check.fix and "megatron_fp8" in check.fix
    monkeypatch.setattr(doctor, "installed_version", lambda name: "2.20.2")
    assert doctor.check_transformer_engine().status == "ok"


def default_run(monkeypatch: pytest.MonkeyPatch, **values: str) -> dict[str, Check]:
    """Returns the checks of a run with the default configuration and `values`."""
    flags = [f"--{name}={value}" for name, value in {"ray_address": "local", **values}.items()]
    monkeypatch.setattr(doctor, "load_config", lambda path, given: load_config(path, [*given, *flags], {}))
    return {check.name: check for check in doctor.check_default_run()}


def test_a_port_in_use_is_a_note_with_the_field_that_changes_it(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        port = listener.getsockname()[1]
        check = default_run(monkeypatch, inference_base_port=str(port))["inference ports"]
    assert check.status == "note"
    assert check.found.startswith(f"inference_base_port is {port}, but port {port}")
    assert check.fix.startswith("Stop the process that uses it, or set inference_base_port")


@pytest.mark.parametrize(
    ("name", "setting"),
    [("packages", ("TRAINING_PACKAGES", ("no_such_package",))), ("run directory", None), ("temporary files", None)],
)
def test_what_a_run_would_refuse_keeps_training_from_running(monkeypatch: pytest.MonkeyPatch, name, setting):
    if setting is not None:
        monkeypatch.setattr(preflight, *setting)
    monkeypatch.setenv("RAY_TMPDIR", "/proc/telescope")
    checks = default_run(monkeypatch, run_dir="/proc/telescope")
    assert checks[name].status == "bad"
    assert checks[name].fix
    assert not doctor.can_train(list(checks.values()))


@pytest.mark.parametrize(("num_workers", "status"), [(2, "bad"), (1, "ok")])
def test_shared_memory_below_the_queues_of_vllm_keeps_servers_of_several_workers_from_starting(
    monkeypatch, num_workers, status
):
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20, total=64 << 20))
    sizes = {"inference_tensor_parallel_size": str(num_workers), "inference_num_workers": str(2 * num_workers)}
    check = default_run(monkeypatch, **sizes)["shared memory"]
    assert check.status == status
    assert ("2 servers of vLLM need 320 MiB" in check.found) == (status == "bad")
    rooms = {check.name: check for check in doctor.check_machine([])}
    assert (rooms["object store"].status, rooms["disk"].status) == ("note", "note")


def test_a_driver_that_fails_is_named_where_no_gpu_is_found(monkeypatch, tmp_path: Path, request):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho Failed to initialize NVML: Driver/library version mismatch\nexit 18\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    machine._ask_nvidia_smi.cache_clear()
    request.addfinalizer(machine._ask_nvidia_smi.cache_clear)
    [check] = [check for check in doctor.check_machine([]) if check.name == "GPU"]
    assert check.found.endswith("nvidia-smi fails: Failed to initialize NVML: Driver/library version mismatch")
    assert check.fix and "driver" in check.fix


def test_shared_memory_that_is_missing_keeps_training_from_running(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(preflight, "SHARED_MEMORY", tmp_path / "shm")
    assert default_run(monkeypatch)["shared memory"].status == "bad"


def test_an_unreachable_hub_is_a_note_that_names_what_still_works(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    asked = Mock(side_effect=OSError("no route to host"))
    monkeypatch.setattr("urllib.request.urlopen", asked)
    check = doctor.check_hub()
    assert (check.status, "hub.example" in check.found, "no route" in check.found) == ("note", True, True)
    for answer, status in (
        (None, "ok"),
        (HTTPError("", 404, "", {}, None), "ok"),
        (HTTPError("", 503, "", {}, None), "note"),
    ):
        asked.side_effect = answer
        assert doctor.check_hub().status == status
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in doctor.check_hub().found


def test_wandb_without_credentials_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    assert doctor.check_wandb().status == "note"
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert doctor.check_wandb().status == "ok"
