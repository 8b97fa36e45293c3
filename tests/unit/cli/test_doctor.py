"""`telescope doctor`: every problem comes with a fix, and the exit code shows whether training can run."""

import argparse
import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from telescope.cli import doctor
from telescope.cli.doctor import Check
from telescope.config.machine import LOOPBACK, PortHold

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


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("note", 0), ("bad", 1)])
def test_the_exit_code_shows_whether_training_can_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: doctor.Status, code: int
):
    fix = None if status == "ok" else "do this"
    monkeypatch.setattr(doctor, "run_checks", lambda hub: [Check("thing", status, "as found", fix)])
    assert doctor.run(argparse.Namespace(json=True, no_hub=True, sandbox=None, cluster=False)) == code
    printed = json.loads(capsys.readouterr().out)
    assert printed["can_train"] == (code == 0)
    assert printed["checks"] == [{"name": "thing", "status": status, "found": "as found", "fix": fix}]
    assert doctor.run(argparse.Namespace(json=False, no_hub=True, sandbox=None, cluster=False)) == code
    table = capsys.readouterr().out
    assert "as found" in table
    assert ("do this" in table) == (fix is not None)


def test_a_torch_that_cannot_be_imported_is_missing_with_its_reason():
    check = doctor.check_torch({"error": "import torch fails: ImportError: libcudart"}, [])
    assert check.status == "bad"
    assert "libcudart" in check.found


@pytest.mark.parametrize(
    ("answer", "gpus", "status"),
    [
        (CPU_TORCH, [], "ok"),
        (CPU_TORCH, GPUS, "note"),
        (CUDA_TORCH, GPUS, "ok"),
        (CUDA_TORCH | {"gpus": 0}, GPUS, "bad"),
        (CPU_TORCH | {"gloo": False}, [], "bad"),
    ],
)
def test_torch_has_to_fit_the_devices(answer: dict[str, object], gpus: list[str], status: str):
    assert doctor.check_torch(answer, gpus).status == status


@pytest.mark.parametrize(
    ("version", "cpu", "gpus", "status"),
    [
        ("0.32.0", True, [], "ok"),
        ("0.32.0", True, GPUS, "note"),
        ("0.26.0", False, GPUS, "ok"),
        ("0.26.0", False, [], "bad"),
        ("0.9.1", True, [], "bad"),
        (None, True, [], "bad"),
    ],
)
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
    check = doctor.check_megatron()
    assert check.status == status
    assert ("MEGATRON=1" in (check.fix or "")) == (status == "note")


@pytest.mark.parametrize("present", [{}, {"transformer-engine": "2.20.2"}])
def test_a_missing_transformer_engine_is_named_with_the_fields_that_need_it(monkeypatch, present):
    monkeypatch.setattr(doctor, "installed_version", present.get)
    check = doctor.check_transformer_engine()
    assert check.status == "note"
    assert "transformer-engine-torch" in check.found
    assert ("transformer-engine and" in check.found) == (not present)
    assert "docs/gpu.md" in (check.fix or "")
    assert "megatron_fp8" in (check.fix or "")
    monkeypatch.setattr(doctor, "installed_version", lambda name: "2.20.2")
    assert doctor.check_transformer_engine().status == "ok"


def test_a_port_in_use_is_named_with_the_option_that_changes_it(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setattr(doctor, "default_of", lambda field: listener.getsockname()[1])
        check = doctor.check_port()
        port = listener.getsockname()[1]
    assert check.status == "note"
    assert check.found == f"{port}: in use"
    assert f"stop the process using port {port}" in str(check.fix)
    assert "--inference_base_port" in str(check.fix)


def test_a_port_reserved_by_a_run_is_in_use_before_its_server_listens(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    monkeypatch.setattr(doctor, "default_of", lambda field: port)
    reserved = PortHold(port)
    check = doctor.check_port()
    reserved.release()
    assert (check.status, check.found) == ("note", f"{port}: in use")
    assert f"stop the process using port {port}, perhaps another run, or set --inference_base_port" in str(check.fix)
    assert doctor.check_port() == Check("inference port", "ok", f"{port} is free")


def test_a_folder_that_cannot_be_written_keeps_training_from_running(tmp_path: Path):
    assert doctor.check_writable("run directory", tmp_path / "nowhere").status == "bad"
    assert doctor.check_writable("run directory", tmp_path).status in ("ok", "note")


@pytest.mark.parametrize(("has_gpus", "status"), [(False, "bad"), (True, "note")])
def test_shared_memory_below_one_queue_of_vllm_keeps_servers_on_the_cpu_from_starting(monkeypatch, has_gpus, status):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20, total=64 << 20))
    check = doctor.check_shared_memory(Path("/dev"), has_gpus=has_gpus)
    assert check.status == status
    assert "0.06 of 0.06 GiB free" in check.found
    assert "vLLM needs 160 MiB for each server" in str(check.fix)


def test_shared_memory_that_is_missing_keeps_training_from_running(tmp_path: Path):
    assert doctor.check_shared_memory(tmp_path / "shm").status == "bad"


def test_an_unreachable_hub_is_a_note_that_names_what_still_works(monkeypatch: pytest.MonkeyPatch):
    def refuse(url: str, timeout: float) -> None:
        raise OSError("no route to host")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    check = doctor.check_hub(refuse)
    assert (check.status, "hub.example" in check.found, "no route" in check.found) == ("note", True, True)
    assert doctor.check_hub(lambda url, timeout: None).status == "ok"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in doctor.check_hub(lambda url, timeout: None).found


def test_wandb_without_credentials_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    assert doctor.check_wandb().status == "note"
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert doctor.check_wandb().status == "ok"
