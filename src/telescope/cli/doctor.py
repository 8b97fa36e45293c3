"""Implements `telescope doctor`, which checks packages and machine, or with `--sandbox` a provider of sandboxes.

With `--cluster` it only checks the requirements of a run on the nodes of a Ray cluster.

One function per check. Starts no engine, joins no cluster, leaves no files. torch is imported in a separate process
with a deadline, because a broken installation can hang or crash. Ray, vLLM and transformers are not imported; only
their versions are read. Exit code 0: a run can start here; 1: something prevents it.

Invariant: every check returns a result on any machine. `bad` means that training is impossible here, `note` is for
other facts that a user should know. Both have a fix.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

import telescope
from telescope.cli.main import CommandParser, number
from telescope.config import load_config, machine
from telescope.config.megatron import NEEDS_TRANSFORMER_ENGINE, TRANSFORMER_ENGINE, TRANSFORMER_ENGINE_FIX
from telescope.config.memory import GIB
from telescope.errors import UserError
from telescope.inference.vllm import support
from telescope.orchestrator import preflight
from telescope.sandbox import SandboxConfig, get_provider
from telescope.sandbox.base import PROVIDERS
from telescope.trackers.wandb import has_credentials
from telescope.utils.packages import installed_version, is_installed
from telescope.utils.process import describe_exit
from telescope.utils.text import pluralize, user_path

if TYPE_CHECKING:
    from telescope.cluster.checks import ProbeResults

TORCH_DEADLINE_SECONDS = 120.0  # the first import on a slow disk
HUB_DEADLINE_SECONDS = 3.0
ENOUGH_MEMORY_BYTES = 6 * GIB  # the demo: engine, two trainer ranks, Ray, driver
ROOMS = (
    ("object store", machine.SHARED_MEMORY, 2 * GIB, "docker run --shm-size=16g: Ray uses files on disk instead"),
    ("disk", Path("runs"), 5 * GIB, "5 GiB and more for runs and checkpoints"),
)
"""Folders with the bytes that batches in Ray's object store and NCCL's buffers, or a run's files, take."""
FARTHEST_CLOCK_SECONDS = 1.0  # beyond this, spans of two nodes would change their order
SET_UP = '`make setup` in a checkout, or `pip install ".[cuda]"` there'

DEFAULTS_OF_MODES: dict[str, dict[str, object]] = {
    "sandbox": {"image": ""},
    "cluster": {"address": "auto", "nodes": 1, "wait_seconds": 600.0, "run_dir": Path("runs")},
}
"""Options that only `--sandbox` or `--cluster` has."""

Status = Literal["ok", "note", "bad"]


@dataclass(frozen=True)
class Check:
    """One line of the output. `fix` is None exactly if `status` is ok."""

    name: str
    status: Status
    found: str
    fix: str | None = None


def judge(name: str, found: str, *problems: tuple[object, Status, str]) -> Check:
    """Returns a check with the first problem that holds, or with status `ok`."""
    return next((Check(name, status, found, fix) for holds, status, fix in problems if holds), Check(name, "ok", found))


def run_checks(*, hub: bool = True) -> list[Check]:
    """Runs all checks, basic ones first. With `hub=False`, sends nothing over the network."""
    with ThreadPoolExecutor(2) as pool:  # the two slow checks run concurrently with the others
        torch_answer = pool.submit(ask_torch)
        hub_answer = pool.submit(check_hub) if hub else None
        found = machine.visible_gpus("name", "memory.total", "driver_version")
        gpus = [f"{name} ({memory} MiB, driver {driver})" for name, memory, driver in found]
        checks = [
            *check_machine(gpus),
            check_torch(torch_answer.result(), gpus),
            check_package("transformers"),
            check_package("ray"),
            check_vllm(gpus),
            check_torchvision(),
            check_package("megatron-core", "note", "make setup MEGATRON=1, for train_backend megatron"),
            check_transformer_engine(),
            *check_default_run(),
            check_wandb(),
        ]
        return [*checks, hub_answer.result()] if hub_answer is not None else checks


def check_default_run() -> Iterator[Check]:
    """Makes the checks of a run with the default configuration that concern a machine."""
    try:
        config = load_config(None, ["--environments", "[{name: countdown}]"]).config
    except UserError as error:  # by an environment variable
        yield Check("configuration", "bad", str(error), "change the variable, or unset it")
        return
    temporary = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    can_write = partial(preflight.check_writable, "RAY_TMPDIR", temporary, "TMPDIR")
    for check in (*preflight.CHECKS, preflight.Check(lambda _: can_write(), doctor="temporary files")):
        if check.doctor:
            try:
                yield Check(check.doctor, "ok", str(check.run(config)))
            except UserError as error:
                found, _, fix = str(error).partition(". ")
                yield Check(check.doctor, check.doctor_status, found, fix)


def can_train(checks: list[Check]) -> bool:
    """Returns whether no check prevents a run on this machine."""
    return all(check.status != "bad" for check in checks)


# --- this program and this machine ----------------------------------------------------------------------------------


def check_machine(gpus: list[str]) -> Iterator[Check]:
    """Checks Python, the system, its processors, memory, compiler and GPUs."""
    yield Check("telescope", "ok", f"{telescope.__version__} in {Path(telescope.__file__).parent}")
    is_supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    fix = "use CPython 3.11, 3.12 or 3.13: Ray and vLLM have builds for those"
    yield judge("Python", f"{platform.python_version()} ({sys.executable})", (not is_supported, "bad", fix))
    system, processor = platform.system(), platform.machine()
    yield judge(
        "system", f"{system} {platform.release()} {processor}",
        (system != "Linux", "bad", "train on Linux; reading runs works everywhere"),
        (processor != "x86_64", "note", "untested: the pinned packages were tried on x86_64"),
    )  # fmt: skip
    cores, memory = machine.num_cores(), machine.memory_bytes()
    fix = "two or more, or the engine and the trainer take turns"
    yield judge("processor", pluralize(cores, "core"), (cores < 2, "note", fix))
    fix = f"{ENOUGH_MEMORY_BYTES // GIB} GiB for the demo on CPU"
    found = f"{memory / GIB:.1f} GiB, {psutil.virtual_memory().available / GIB:.1f} GiB of it available"
    yield judge("memory", found, (memory < ENOUGH_MEMORY_BYTES, "note", fix))
    for name, folder, enough, fix in ROOMS:
        usage = shutil.disk_usage(machine.existing_parent(folder))
        found = f"{usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB free in {folder}"
        yield judge(name, found, (usage.free < enough, "note", fix))
    names = filter(None, (os.environ.get("CC"), "gcc", "cc", "clang"))
    compiler = next(filter(None, map(shutil.which, names)), None)
    fix = "install gcc: vLLM on GPU and torch.compile build kernels with it"
    yield judge("C compiler", compiler or "none", (not compiler, "note", fix))
    found = ", ".join(f"{gpus.count(kind)} x {kind}" for kind in dict.fromkeys(gpus))
    fix = "none is needed for `make demo`; models of more than a few million parameters want one"
    if problem := machine.driver_problem():
        found, fix = f"none, because nvidia-smi fails: {problem}", "repair the driver; after its update, restart"
    yield judge("GPU", found or "no NVIDIA GPU", (not gpus, "note", fix))


# --- packages -------------------------------------------------------------------------------------------------------

_TORCH_QUESTION = """
import json, torch
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "gpus": torch.cuda.device_count(),
    "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
    "nccl": torch.distributed.is_available() and torch.distributed.is_nccl_available(),
}))
"""


def ask_torch() -> dict[str, object]:
    """Returns facts about torch, read in a separate process. `{"error": ...}` if it cannot be imported."""
    if not is_installed("torch"):
        return {"error": "not installed"}
    command = [sys.executable, "-c", _TORCH_QUESTION]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_DEADLINE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"import torch did not end within {TORCH_DEADLINE_SECONDS:.0f} s"}
    if answer.returncode != 0:
        last_line = (answer.stderr.strip().splitlines() or [describe_exit(answer.returncode)])[-1]
        return {"error": f"import torch fails: {last_line}"}
    return json.loads(answer.stdout.strip().splitlines()[-1])


def check_torch(answer: dict[str, object], gpus: list[str]) -> Check:
    if "error" in answer:
        return Check("torch", "bad", str(answer["error"]), SET_UP)
    build = f"CUDA {answer['cuda']}" if answer["cuda"] else "CPU build"
    backends = [name for name in ("gloo", "nccl") if answer[name]]
    found = f"{answer['version']}, {build}, {' and '.join(backends) or 'no process groups'}"
    is_blind = bool(gpus and answer["cuda"] and not answer["gpus"])
    return judge(
        "torch", f"{found}; it sees none of {pluralize(len(gpus), 'GPU')}" if is_blind else found,
        (not answer["gloo"], "bad", "a torch with torch.distributed and gloo: " + SET_UP),
        (gpus and not answer["cuda"], "note", "runs on CPU although there is a GPU: make setup ACCELERATOR=cuda"),
        (is_blind, "bad", "update the NVIDIA driver, or check CUDA_VISIBLE_DEVICES"),
    )  # fmt: skip


def check_package(name: str, status: Status = "bad", fix: str = SET_UP) -> Check:
    version = installed_version(name)
    return judge(name, version or "not installed", (not version, status, fix))


def check_vllm(gpus: list[str]) -> Check:
    version = support.installed_version()
    low, high = (".".join(map(str, v)) for v in (support.OLDEST_SUPPORTED, support.NEWEST_TESTED))
    supported = f"supported: {low} to {high}"
    try:
        support.check_supported(version)
    except UserError as error:
        return Check("vllm", "bad", f"{version or 'not installed'} ({supported})", f"{error} ({SET_UP})")
    cpu = support.is_cpu_build()
    found = f"{version}, {'CPU' if cpu else 'CUDA'} build ({supported})"
    return judge(
        "vllm", found,
        (not cpu and not gpus, "bad", "this build needs an NVIDIA GPU: make setup ACCELERATOR=cpu"),
        (cpu and gpus, "note", "generates on CPU although there is a GPU: make setup ACCELERATOR=cuda"),
    )  # fmt: skip


def check_torchvision() -> Check:
    """Checks that torchvision matches torch. A CUDA build beside a CPU torch breaks `import transformers`."""
    torchvision, torch = installed_version("torchvision"), installed_version("torch")
    if torchvision and torch and "+cpu" in torch and "+cpu" not in torchvision:
        found = f"{torchvision} does not fit torch {torch}"
        fix = "pip uninstall torchvision torchaudio torchcodec: text models need none of them"
        return Check("torchvision", "bad", found, fix)
    return Check("torchvision", "ok", torchvision or "not installed, and not needed")


def check_transformer_engine() -> Check:
    """Checks the Megatron backend's optional kernels and their torch extension."""
    versions = {name: installed_version(name) for name in TRANSFORMER_ENGINE}
    if missing := [name for name, version in versions.items() if version is None]:
        fix = f"{TRANSFORMER_ENGINE_FIX}, for {', '.join(NEEDS_TRANSFORMER_ENGINE)}"
        return Check("Transformer Engine", "note", f"{' and '.join(missing)} not installed", fix)
    return Check("Transformer Engine", "ok", ", ".join(f"{name} {version}" for name, version in versions.items()))


# --- services -------------------------------------------------------------------------------------------------------


def check_wandb() -> Check:
    found = "credentials found" if (has := has_credentials(os.environ)) else "no credentials: runs are recorded offline"
    return judge("W&B", found, (not has, "note", "wandb login, or use_wandb: false"))


def check_hub() -> Check:
    """Checks that models and datasets can be downloaded."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    fix = "give paths of models and datasets that are on disk; the demo needs no hub"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return Check("model hub", "note", "HF_HUB_OFFLINE is set: only what is cached", fix)
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=HUB_DEADLINE_SECONDS).close()
    except (OSError, ValueError) as error:
        # An error below 500 is an answer of the hub; the others also come from a proxy that refuses.
        if getattr(error, "code", 500) >= 500:
            return Check("model hub", "note", f"{endpoint} cannot be reached ({getattr(error, 'reason', error)})", fix)
    return Check("model hub", "ok", f"{endpoint} answers")


def check_cluster(results: "ProbeResults", num_nodes: int, run_dir: Path) -> Iterator[Check]:
    """Yields checks of what the nodes of a cluster reported."""
    found = ", ".join(f"{name} ({pluralize(gpus, 'GPU')})" for name, gpus in results.gpus.items())
    fix = f"start Ray on the others: {num_nodes} nodes are asked for"
    yield judge("nodes", found, (len(results.gpus) < num_nodes, "bad", fix))
    versions = {
        name: {facts[name] for facts in results.versions.values()} for name in next(iter(results.versions.values()))
    }
    unequal = [name for name, values in versions.items() if len(values) > 1]
    rows = {name: {node: facts[name] for node, facts in results.versions.items()} for name in unequal}
    same = ", ".join(f"{name} {next(iter(values)) or 'missing'}" for name, values in versions.items())
    yield judge("versions", str(rows) if unequal else same, (unequal, "bad", "install the same versions on all nodes"))
    node, offset = max(results.clock_offsets.items(), key=lambda item: abs(item[1]))
    fix = "run an NTP client on each node: times of the record would not fit together"
    found = f"{node} is {offset:+.3f} s from this one, the others are closer"
    yield judge("clocks", found, (abs(offset) > FARTHEST_CLOCK_SECONDS, "note", fix))
    lacking = ", ".join(results.without_folder)
    found = f"{run_dir} is not seen by {lacking}" if lacking else f"{run_dir} is shared"
    yield judge("run directory", found, (lacking, "bad", "put run_dir on a file system that all nodes mount"))
    for backend, result in results.collectives.items():
        failed = isinstance(result, str)
        fix = f"check firewalls, and {backend.upper()}_SOCKET_IFNAME (docs/multi-node.md)"
        yield judge(backend, str(result) if failed else f"a sum over all nodes in {result:.3f} s", (failed, "bad", fix))


_MARKS: dict[Status, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "note": ("note", "yellow"),
    "bad": ("missing", "bold red"),
}


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="telescope doctor",
        description="Check the packages, devices, memory, ports and services that a run needs. Starts and changes "
        "nothing. Exit code 0: a run can start here; 1: something marked `missing` prevents it. With --sandbox it "
        "creates real sandboxes of one provider instead, which may cost money, tries what the provider promises, "
        "prints each check with its time, and destroys them. Exit code 0: all pass; 1: one fails; 2: the "
        "provider cannot be used here.",
    )
    names = ", ".join(PROVIDERS)
    parser.add_argument(
        "--sandbox", metavar="NAME", help=f"try a provider of sandboxes: {names}, or package.module.Class"
    )
    parser.add_argument("--image", help="with --sandbox: the image (default: the provider's usual one)")
    parser.add_argument("--cluster", action="store_true", help="check a Ray cluster between its nodes instead")
    parser.add_argument("--address", help="with --cluster: host:port of Ray's head (default: auto)")
    parser.add_argument("--nodes", type=number(int, 1), help="with --cluster: how many nodes to wait for")
    parser.add_argument("--wait-seconds", type=number(float, 0), help="with --cluster: how long (default: 600)")
    parser.add_argument("--run-dir", type=user_path, help="with --cluster: folder of the runs")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of a table")
    parser.add_argument("--no-hub", action="store_true", help="send nothing over the network")
    parser.set_defaults(**DEFAULTS_OF_MODES["sandbox"], **DEFAULTS_OF_MODES["cluster"])
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Prints the results of all checks. Returns the exit status. Raises `UserError` for options of another mode."""
    for mode, defaults in DEFAULTS_OF_MODES.items():
        for name, default in defaults.items():
            if not getattr(arguments, mode) and getattr(arguments, name) != default:
                option = name.replace("_", "-")
                raise UserError(f"--{option} is an option of `telescope doctor --{mode}`. Add --{mode}")
    if arguments.sandbox:
        return asyncio.run(check_sandbox(arguments.sandbox, arguments.image, as_json=arguments.json))
    if arguments.cluster:
        from telescope.cluster.checks import ask_nodes

        results = ask_nodes(arguments.address, arguments.run_dir, arguments.nodes, arguments.wait_seconds)
        checks = list(check_cluster(results, arguments.nodes, arguments.run_dir))
    else:
        checks = run_checks(hub=not arguments.no_hub)
    able = can_train(checks)
    if arguments.json:
        print(json.dumps({"can_train": able, "checks": [dataclasses.asdict(check) for check in checks]}, indent=1))
    else:
        print_checks(checks, Console(), "these nodes" if arguments.cluster else "this machine")
    return 0 if able else 1


def print_checks(checks: list[Check], console: Console, where: str = "this machine") -> None:
    """Prints a table of all checks, then the verdict."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("what", no_wrap=True)
    table.add_column("found, and the fix", overflow="fold")
    for check in checks:
        mark, style = _MARKS[check.status]
        table.add_row(Text(mark, style=style), check.name, Text(check.found))
        if check.fix:
            table.add_row("", "", Text(f"-> {check.fix}", style=style))
    console.print(table)
    console.print()
    if can_train(checks):
        console.print(Text(f"Training can run on {where}.", style="bold green"))
    else:
        missing = ", ".join(check.name for check in checks if check.status == "bad")
        console.print(Text(f"Training cannot run on {where} yet: {missing}.", style="bold red"))


async def check_sandbox(name: str, image: str, *, as_json: bool) -> int:
    """Runs the contract of providers on a real provider and prints each check as it ends. Returns the exit status."""
    from telescope.sandbox.contract import CHECKS, Trial, run_contract, sentence

    trial = Trial(get_provider(name), SandboxConfig(image=image, timeout_seconds=3600))
    problems, rows, console = 0, [], Console()
    async for check, seconds, problem in run_contract(trial):
        problems += bool(problem)
        rows.append({"name": check.__name__, "holds": sentence(check), "seconds": seconds, "problem": problem})
        if not as_json:
            mark, style = ("failed", "bold red") if problem else _MARKS["ok"]
            text = f"{mark:6} {seconds:7.2f} s  {sentence(check)}" + (f"\n-> {problem}" if problem else "")
            console.print(Text(text, style=style if problem else ""), soft_wrap=True)
    if as_json:
        print(json.dumps({"provider": name, "checks": rows}, indent=1))
    else:
        console.print(f"\n{len(CHECKS) - problems} of {len(CHECKS)} checks pass for {name}.")
    return 1 if problems else 0
