"""Detection of a running cluster on this machine, by Ray's note of its address, and of what its CPU can do."""

import socket
from pathlib import Path

import pytest

from telescope.config import machine
from telescope.config.machine import cpu_flags, ray_cluster_is_configured


@pytest.fixture(params=["RAY_TMPDIR", "TMPDIR"])
def note(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Ray notes the address; there is none yet."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(request.param, str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


def test_a_cluster_that_listens_is_joined_and_one_that_was_killed_is_not(note: Path) -> None:
    assert not ray_cluster_is_configured("auto")
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        note.write_text(f"127.0.0.1:{gcs.getsockname()[1]}")
        assert ray_cluster_is_configured("auto")
        assert not ray_cluster_is_configured("local")
    assert not ray_cluster_is_configured("auto"), "its note is still there"


@pytest.mark.parametrize("words", ["", "nonsense", "127.0.0.1:", "127.0.0.1:99999999"])
def test_a_note_that_cannot_be_read_is_none(note: Path, words: str) -> None:
    note.write_text(words)
    assert not ray_cluster_is_configured("auto")


def test_an_address_that_is_set_is_not_checked(note: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_cluster_is_configured("10.0.0.1:6379")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert ray_cluster_is_configured("auto")


@pytest.mark.parametrize(("memory", "known"), [("81559", 81559 << 20), ("[N/A]", None)])
def test_a_gpu_counts_also_if_its_memory_is_that_of_the_machine(monkeypatch, tmp_path, request, memory, known):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/log\necho '0, GPU-1, {memory}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine._ask_nvidia_smi.cache_clear()
    request.addfinalizer(machine._ask_nvidia_smi.cache_clear)
    for _ in range(2):
        [node] = machine.local_resources().nodes
        assert (node.gpus, node.gpu_memory_bytes) == (1, known)
    assert (tmp_path / "log").read_text() == "asked\n", "a question takes seconds where GPUs sleep"


def test_the_instruction_sets_of_this_cpu_are_read() -> None:
    assert {"fpu", "sse2"} <= cpu_flags()


@pytest.mark.parametrize(("texts", "cores"), [
    (["max 100000"], 8), (["250000 100000"], 3), (["50000 100000"], 1), (["9900000 100000"], 8),
    (["-1", "100000"], 8), (["400000", "100000"], 4),
])  # fmt: skip
def test_cores_are_those_of_the_container_if_it_has_fewer(monkeypatch, tmp_path: Path, texts, cores) -> None:
    files = tuple(tmp_path / str(number) for number in range(len(texts)))
    for file, text in zip(files, texts, strict=True):
        file.write_text(f"{text}\n")
    monkeypatch.setattr(machine, "CGROUP_QUOTAS", ((tmp_path / "missing",), files))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert machine.num_cores() == cores


@pytest.mark.parametrize(("limit", "is_lower"), [("1048576", True), ("max", False), (str(1 << 60), False)])
def test_memory_is_that_of_the_container_if_it_has_less(
    monkeypatch, tmp_path: Path, limit: str, is_lower: bool
) -> None:
    monkeypatch.setattr(machine, "CGROUP_LIMITS", (tmp_path / "missing",))
    whole = machine.memory_bytes()
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    monkeypatch.setattr(machine, "CGROUP_LIMITS", (tmp_path / "missing", tmp_path / "memory.max"))
    assert machine.memory_bytes() == (int(limit) if is_lower else whole)
    assert machine.local_resources().nodes[0].memory_bytes == machine.memory_bytes()
