"""Configuration, environments, run reading and command line work without training packages."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
TRAIN = [re.split(r"[^\w-]", requirement)[0] for requirement in PROJECT["optional-dependencies"]["train"]]
HEAVY = (*(name.replace("-", "_") for name in TRAIN), "grpc", "vllm")
"""Modules of the extra `train` and of vLLM, none of which `pip install telescope` brings."""

BLOCKER = f"""
import sys
from importlib.machinery import PathFinder

class WithoutHeavy(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {HEAVY!r} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutHeavy
"""


def run_without_heavy_packages(code: str) -> str:
    """Standard output of `code` in a process that cannot find the packages of `HEAVY`."""
    finished = subprocess.run([sys.executable, "-c", BLOCKER + code], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_configuration_environments_rollouts_and_dashboard_work_without_heavy_packages():
    printed = run_without_heavy_packages("""
import importlib, pkgutil
import telescope.config, telescope.environments, telescope.record.reader, telescope.evals.base, telescope.evals.entries
import telescope.rollout.environments, telescope.rollout.worker, telescope.rollout.rendering, telescope.cli.ui
for package in (telescope.config, telescope.environments):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)

from telescope.config.loader import load_config
from telescope.config.schema import TelescopeConfig
loaded = load_config(None, ["--learning_rate", "5e-7", "--environments", "[{name: countdown}]"])
assert TelescopeConfig.from_json(loaded.config.to_json()).hash == loaded.config.hash

from telescope.dashboard.app import create_app
assert create_app([]).title == "Telescope API"

from telescope.environments.registry import get_environment, list_environments
assert "countdown" in list_environments()
environment = get_environment("countdown", dataset="generated", num_samples=3)
print(len(environment), environment.compute_reward("no answer", environment.get_sample(0)).total_reward)
""")
    assert printed.split() == ["3", "0.0"]


def test_the_command_line_starts_without_heavy_packages():
    printed = run_without_heavy_packages("""
from telescope.cli.main import main
assert main(["--help"]) == 0
assert main(["runs", "--root", "/nonexistent-folder"]) in (0, 2)
assert main(["doctor", "--no-hub", "--json"]) in (0, 1)
import sys
assert not {"fastapi", "starlette", "uvicorn"} & sys.modules.keys(), "only `telescope ui` needs them"
""")
    assert "doctor" in printed
