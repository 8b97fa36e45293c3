"""The wheel of the source distribution, installed where nothing else is: complete, its commands work from any folder.

It is installed beside the packages that `pip install telescope` brings, and those are linked from the environment of
these tests so that nothing is downloaded. There is no torch, no Ray and no vLLM, and no way back to the checkout.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from telescope import __version__

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 120


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, made as for a release: from the source distribution of a copy of this checkout."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("src", "scripts"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    pages = source / "src" / "telescope" / "dashboard" / "static" / "index.html"
    if not pages.is_file():  # built pages need Node.js
        pages.parent.mkdir()
        pages.write_text("pages")
    make = "import sys; sys.path.insert(0, 'scripts'); import build_backend; build_backend.build_sdist(sys.argv[1])"
    run([sys.executable, "-c", make, str(output)], cwd=source)
    (archive,) = output.glob("telescope-*.tar.gz")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    run([*command, "--wheel-dir", str(output), str(archive)], cwd=output)
    (built,) = output.glob("telescope-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment with the wheel and its dependencies, and nothing else."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False, symlinks=True)
    (packages,) = (environment / "lib").glob("python*/site-packages")
    for distribution in dependencies_of("telescope"):
        for top in {path.parts[0] for path in distribution.files or () if path.parts[0] != ".."}:
            target = packages / top
            if not target.exists():
                target.symlink_to(Path(str(distribution.locate_file(top))))
    interpreter = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(interpreter), "install", "--quiet", "--no-index", "--no-deps"]
    run([*pip, str(wheel)], cwd=environment)
    return interpreter.parent


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is not the checkout, as the current one, with no path that leads back to it."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: list[str], *, cwd: Path, expect: int = 0) -> str:
    finished = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert finished.returncode == expect, f"{command}\n{finished.stdout}\n{finished.stderr}"
    return finished.stdout + finished.stderr


def dependencies_of(name: str) -> list[importlib.metadata.Distribution]:
    """The distributions that `name` needs without extras, and theirs."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = [name]
    while waiting:
        for text in importlib.metadata.distribution(waiting.pop()).requires or ():
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            if requirement.name not in found:
                found[requirement.name] = importlib.metadata.distribution(requirement.name)
                waiting.append(requirement.name)
    return list(found.values())


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path):
    """Folders without __init__.py included, since an environment needs none; data files included."""
    files = [path for path in (ROOT / "src" / "telescope").rglob("*") if path.is_file()]
    kept = {str(path.relative_to(ROOT / "src")) for path in files if "__pycache__" not in path.parts}
    names = set(zipfile.ZipFile(wheel).namelist())
    assert kept <= names, sorted(kept - names)
    assert "telescope/dashboard/static/index.html" in names
    assert not [name for name in names if not name.startswith("telescope")], "the wheel installs foreign folders"
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_installed_package_is_the_wheels_and_has_nothing_heavy(installed: Path, elsewhere: Path):
    code = "import importlib.util as u, telescope; print(telescope.__file__);"
    code += "print([n for n in ('torch', 'ray', 'vllm', 'transformers') if u.find_spec(n)])"
    printed = run([str(installed / "python"), "-c", code], cwd=elsewhere)
    path, heavy = printed.splitlines()
    assert Path(path).is_relative_to(installed.parent)
    assert heavy == "[]"


def test_telescope_ui_is_the_same_package_without_what_trains(installed: Path, elsewhere: Path):
    project = tomllib.loads((ROOT / "packages" / "telescope-ui" / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    assert project["dependencies"] == [f"telescope=={__version__}", "wandb>=0.23"]
    assert project["scripts"] == {"telescope-ui": "telescope.cli.main:ui"}
    code = "import telescope.dashboard.app, telescope.dashboard.remote, telescope.tui.app; "
    code += "import sys; from telescope.cli.main import ui; sys.argv[1:] = ['--help']; ui()"
    run([str(installed / "python"), "-c", code], cwd=elsewhere)


def test_commands_work_from_another_folder(installed: Path, elsewhere: Path):
    telescope = str(installed / "telescope")
    assert "telescope" in run([telescope, "--version"], cwd=elsewhere)
    assert "train" in run([telescope, "--help"], cwd=elsewhere)
    assert "learning_rate" in run([telescope, "config", "explain", "learning_rate"], cwd=elsewhere)
    assert "max_async_rollout" in run([telescope, "config", "defaults"], cwd=elsewhere)
    assert "No runs" in run([telescope, "runs"], cwd=elsewhere)


def test_a_dry_run_resolves_the_example_from_another_folder(installed: Path, elsewhere: Path):
    shutil.copy(ROOT / "configs" / "examples" / "example_countdown.yaml", elsewhere / "mine.yaml")
    printed = run([str(installed / "telescope"), "train", "--config", "mine.yaml", "--dry-run"], cwd=elsewhere)
    assert "Qwen/Qwen2.5-3B" in printed


def test_bad_input_is_refused_with_exit_code_2(installed: Path, elsewhere: Path):
    (elsewhere / "mine.yaml").write_text("learnin_rate: 1.0e-6\n")
    printed = run([str(installed / "telescope"), "train", "--config", "mine.yaml"], cwd=elsewhere, expect=2)
    assert "learning_rate" in printed


def test_doctor_lists_missing_packages_with_install_commands(installed: Path, elsewhere: Path):
    printed = run([str(installed / "telescope"), "doctor", "--json", "--no-hub"], cwd=elsewhere, expect=1)
    answer = json.loads(printed)
    missing = {check["name"]: check["fix"] for check in answer["checks"] if check["status"] == "bad"}
    assert not answer["can_train"]
    assert {"torch", "ray", "vllm", "transformers"} <= missing.keys()
    assert ".[cuda]" in missing["torch"]


def test_an_environment_is_written_and_tested_with_the_wheel_alone(installed: Path, elsewhere: Path):
    folder = elsewhere / "environments" / "length"
    folder.mkdir(parents=True)
    (folder / "environment.py").write_text("""
from telescope.environments.base import RewardResult, Sample, SingleTurnEnvironment

class Length(SingleTurnEnvironment):
    def load_dataset(self, num_samples=-1, **kwargs):
        return [Sample(prompt="Say four letters.")]
    def compute_reward(self, completion, sample, eos_token=""):
        return RewardResult(total_reward=float(len(completion) == 4))
""")
    code = """
from telescope.environments.registry import get_environment, list_environments
names = list_environments(environments_path=["environments"])
assert {"length", "countdown"} <= set(names), names
environment = get_environment("length", environments_path=["environments"])
print(environment.compute_reward("four", environment.get_sample(0)).total_reward)
"""
    assert run([str(installed / "python"), "-c", code], cwd=elsewhere).strip() == "1.0"


def test_runs_are_read_with_the_wheel_alone(installed: Path, elsewhere: Path):
    writer = """
from telescope.record.recorder import Recorder
recorder = Recorder("runs/one", attempt=1)
for step in range(3):
    recorder.write("steps", {"step": step, "reward_mean": step / 2})
recorder.close()
"""
    run([sys.executable, "-c", writer], cwd=elsewhere)
    question = "select max(reward_mean) as best from steps"
    command = [str(installed / "telescope"), "query", "--run", "runs/one", "--format", "json", question]
    printed = run(command, cwd=elsewhere)
    assert json.loads(printed) == [{"best": 1.0}]


def test_the_entry_point_of_vllm_is_registered(installed: Path, elsewhere: Path):
    code = (
        "from importlib.metadata import entry_points as e; print(*[p.value for p in e(group='vllm.general_plugins')])"
    )
    found = run([str(installed / "python"), "-c", code], cwd=elsewhere)
    assert found.strip() == "telescope.inference.vllm.plugin:register"


def test_the_environment_of_these_tests_does_not_leak_in(installed: Path):
    """Guards the test itself: a link to all of site-packages would make every claim above empty."""
    (packages,) = (installed.parent / "lib").glob("python*/site-packages")
    assert not (packages / "torch").exists()
    assert os.readlink(packages / "pydantic")
