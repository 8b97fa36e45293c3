"""A small machine, and dry runs on it."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from tests.model_folder import write_model_folder

from telescope.cli import train
from telescope.cli.dry_run import print_dry_run
from telescope.config import load_config
from telescope.config.plan import ClusterResources, NodeResources
from telescope.errors import ConfigError, UserError
from telescope.orchestrator import preflight

DryRun = Callable[..., tuple[str, str | None]]

HERE = {"device": "cpu", "ray_address": "local", "use_wandb": False, "ray_inference_cpus_per_worker": 0.1,
        "ray_trainer_cpus_per_worker": 0.1}  # fmt: skip
"""Settings of a run that fits the small machine."""

FITTED = "Defaults adjusted to this machine: "


def set_machine(monkeypatch: pytest.MonkeyPatch, node: NodeResources) -> None:
    """Makes `node` the machine that a dry run finds."""
    for module in ("telescope.cli.dry_run", "telescope.orchestrator.preflight"):
        monkeypatch.setattr(f"{module}.local_resources", lambda: ClusterResources((node,)))


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two cores, 8 GiB and no GPU, with everything installed, all ports free and no cluster running."""
    node = NodeResources("here", cpus=2.0, gpus=0, memory_bytes=8 << 30)
    set_machine(monkeypatch, node)
    monkeypatch.setattr("telescope.config.remarks.cpu_flags", frozenset)
    monkeypatch.setattr(preflight, "TRAINING_PACKAGES", ())
    monkeypatch.setattr(preflight, "require_port", lambda host, port, **server: None)
    monkeypatch.setattr("telescope.config.machine.listen_problem", lambda host, port: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


@pytest.fixture
def tried() -> list[bool]:
    """Whether the run is meant for this machine, for each time that user code was tried."""
    return []


@pytest.fixture
def dry_run(tmp_path: Path, tried: list[bool]) -> DryRun:
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
