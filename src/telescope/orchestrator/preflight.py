"""Checks a configuration before a run starts anything.

`CHECKS` lists all checks of a configuration: of environments, the model, packages, ports, the run directory, cores and
GPUs. A run, its dry run, an evaluation and `telescope doctor` make those that concern them. Changes nothing, starts
nothing, imports no environment. `model_checks` checks the model and `rules` the relations between fields.
`telescope.cluster` plans again with the nodes of a running cluster.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from telescope.config import megatron, model_checks
from telescope.config.loader import choose_run_dir
from telescope.config.machine import (
    LOOPBACK,
    SHARED_MEMORY,
    existing_parent,
    free_block,
    listen_problem,
    local_resources,
    prometheus_error,
    ray_cluster_is_configured,
    require_port,
    split_address,
    visible_gpu_capabilities,
)
from telescope.config.memory import estimate_memory
from telescope.config.messages import show
from telescope.config.model_files import ModelReport, inspect_model
from telescope.config.plan import (
    ClusterResources,
    PlacementError,
    fitting_values,
    gpus_needed,
    plan_placement,
    resolve_device,
)
from telescope.config.sections.general import client_address_problem
from telescope.environments.registry import ENVIRONMENTS
from telescope.errors import ConfigError, UserError
from telescope.evals.base import check_eval
from telescope.utils.packages import is_installed
from telescope.utils.text import pluralize, user_path

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig
    from telescope.orchestrator.checkpoints import Checkpoint

OTHER_OPEN_FILES = 512
"""Files and sockets of the driver besides its requests: Ray, environment workers, the record, control calls."""
VLLM_QUEUE_BYTES = 160 << 20
"""Shared memory that vLLM allocates for the queue to one server's workers: ten messages of 16 MiB."""
FP8_CAPABILITY = 8.9  # compute capability of the first GPUs with FP8 (Ada)
TRAINING_PACKAGES = ("torch", "transformers", "ray", "msgspec", "vllm", "accelerate")

Scope = Literal["environments", "plan", "model", "files", "machine", "here"]


@dataclass(frozen=True)
class Check:
    """One check of a configuration. `run` raises `UserError` with the problem and, as a sentence of its own, the fix.

    `run` takes the arguments of its scope:
    - environments, plan: the configuration. The outcome is the same on any machine, and the plan needs it.
    - model: the configuration and the report on the model. The outcome is the same on any machine.
    - files: the same. Free disks, the hub.
    - machine: the same and the machine of the run, which may be an assumed one.
    - here: the configuration. This machine, on which the run is started.
    """

    run: Callable[..., object]
    scope: Scope = "here"
    alone: bool = False
    """Only for a run on this machine alone: one that joins a cluster is checked by its nodes."""
    evals: bool = False
    """Also for `telescope eval`, which has no trainer."""
    doctor: str = ""
    """What `telescope doctor` calls it. It makes the check with the default configuration."""
    doctor_status: Literal["note", "bad"] = "bad"


@dataclass
class Findings:
    """All problems of a configuration, by the scope of their checks, and what was read to find them."""

    problems: dict[Scope, list[str]]
    elsewhere: str | None
    """Why the run is meant for another machine, as a sentence. None if it is not."""
    report: ModelReport | None = None
    checkpoint: Checkpoint | None = None

    def of(self, *scopes: Scope) -> list[str]:
        """Returns the problems of some scopes, by default of all, without duplicates."""
        return list(dict.fromkeys(p for scope in scopes or self.problems for p in self.problems[scope]))


def examine(config: TelescopeConfig, assumed: ClusterResources | None = None) -> Findings:
    """Makes all checks. With `assumed`, or if the run is meant for another machine, its placement is not checked here.

    Tries no user code, no backend and no engine.
    """
    found = Findings({}, why_elsewhere(config))

    def inspect(config: TelescopeConfig) -> None:
        found.report = inspect_model(config)

    def find_resumed(config: TelescopeConfig) -> None:
        if config.resume_from_checkpoint:
            from telescope.orchestrator.resume import find_checkpoint

            found.checkpoint = find_checkpoint(config, choose_run_dir(config))

    checks = [Check(inspect, "plan"), Check(find_resumed, "plan"), *CHECKS]
    if assumed is not None or found.elsewhere:
        checks = [check for check in checks if check.run != check_placement]
    for scope in get_args(Scope):
        subject: tuple[object, ...] = () if scope in ("environments", "plan", "here") else (found.report,)
        subject += (assumed or local_resources(),) if scope == "machine" else ()
        is_known = None not in subject  # not so without the model's files, which is a problem of its own
        chosen = [check for check in checks if check.scope == scope] if is_known else []
        found.problems[scope] = find_problems(chosen, config, *subject)
    return found


def fit_to_machine(config: TelescopeConfig, *, with_trainer: bool = True) -> tuple[TelescopeConfig, list[str]]:
    """Adjusts defaults that do not fit this machine. Returns the config, and a line that lists the changes.

    Does not change fields that the user set. Does not adjust a run for GPUs if this machine has none and too little
    memory to run it without. The checks then refuse what does not fit.
    """
    if ray_cluster_is_configured(config.ray_address):
        return config, []
    here = local_resources()
    values = fitting_values(config, here, with_trainer=with_trainer)
    if values and with_trainer and config.device == "auto" and not here.gpus and _exceeds_memory(config, here):
        return config, []
    most, port, servers = _most_prompts(config), config.inference_base_port, config.num_inference_servers
    if most is not None:
        values["max_concurrent_prompts_per_server"] = most
    if "inference_base_port" not in config.user_set:
        free = free_block(LOOPBACK, servers, port, choose=True)
        values |= {} if free in (None, port) else {"inference_base_port": free}
    values = {name: value for name, value in values.items() if name not in config.user_set}
    if not values:
        return config, []
    changes = ", ".join(f"{name} {show(getattr(config, name))} -> {show(value)}" for name, value in values.items())
    fitted = config.adjusted(**values)
    return fitted, [f"Defaults adjusted to this machine: {changes}.", *fitted.notes]


def _exceeds_memory(config: TelescopeConfig, machine: ClusterResources) -> bool:
    """Returns whether the trainer's states alone exceed the memory of a machine without GPUs."""
    try:
        shape, memory = inspect_model(config).shape, machine.nodes[0].memory_bytes
    except UserError:  # reported by the checks
        return False
    if shape is None or memory is None:
        return False
    estimate = estimate_memory(config, shape, device="cpu", device_memory_bytes=memory)
    return estimate.trainer.states * config.trainer_num_workers > memory


def find_problems(checks: Iterable[Check], config: TelescopeConfig, *subject: object) -> list[str]:
    """Returns the problems that the checks find, without duplicates."""
    problems: list[str] = []
    joins = ray_cluster_is_configured(config.ray_address)
    for check in checks:
        if not (joins and check.alone):
            problems += problems_of(partial(check.run, config, *subject))
    return list(dict.fromkeys(problems))


def problems_of(act: Callable[[], object]) -> list[str]:
    """Returns the problems with which `act` is refused."""
    try:
        act()
    except ConfigError as error:
        return error.problems
    except UserError as error:
        return [str(error).replace("\n", "\n  ")]
    return []


def why_elsewhere(config: TelescopeConfig) -> str | None:
    """Returns why the run is meant for another machine, as a sentence. None if it is not.

    A run is meant for another machine if it joins a cluster, or if `device` is auto, this machine has no GPUs, and the
    run does not fit without GPUs.
    """
    if ray_cluster_is_configured(config.ray_address):
        return (
            f"ray_address is {config.ray_address!r}: the run joins a cluster, which is not asked here; the placement "
            "shown is on assumed nodes."
        )
    here = local_resources()
    if config.device != "auto" or here.gpus:
        return None
    try:
        plan_placement(config, here)
    except PlacementError:
        needed = gpus_needed(config)
        return (
            "No GPU was found on this machine, and its CPU cores or memory do not hold the run: the plan is for a "
            f"machine with {pluralize(needed, 'GPU')}, and the placement shown is on assumed nodes."
        )
    return None


def check_packages(_: TelescopeConfig) -> str:
    """Checks that the packages for training are installed. A plain `telescope` installation lacks them."""
    missing = [name for name in TRAINING_PACKAGES if not is_installed(name)]
    if missing:
        raise ConfigError(
            f"Training needs packages that are not installed: {', '.join(missing)}. Install them with `make setup` in "
            "a checkout, or with `pip install '.[cuda]'` there on a machine with an NVIDIA GPU; `telescope doctor` "
            "lists what else is missing"
        )
    return f"{', '.join(TRAINING_PACKAGES)} are installed"


def check_trackers(config: TelescopeConfig) -> None:
    """Checks that the packages of the chosen trackers are installed."""
    if not config.user_set & {"trackers", "use_wandb"}:
        return  # W&B is the default; without its package, the run only warns
    if missing := [name for name in config.tracker_names if not is_installed(name)]:
        field = "trackers" if "trackers" in config.user_set else "use_wandb"
        raise ConfigError(
            f"{field} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed. "
            f"Run `pip install {' '.join(missing)}`, or change {field}"
        )


def check_plugin(_: TelescopeConfig) -> str:
    """Checks that vLLM finds Telescope's weight transfer among installed entry points."""
    entry_points = importlib.metadata.entry_points(group="vllm.general_plugins", name="telescope")
    module = next((entry_point.module for entry_point in entry_points), None)
    if module is not None and importlib.util.find_spec(module) is not None:
        return "registered"
    why = "its entry point is not installed" if module is None else f"its entry point {module} does not exist"
    raise ConfigError(
        f"vLLM cannot load Telescope's plugin: {why}. Install Telescope, with `make setup` in a checkout or "
        "`pip install -e .`: sources on the path are not enough"
    )


def check_megatron(config: TelescopeConfig) -> None:
    """Checks Megatron's packages and fields on this machine."""
    if config.train_backend == "megatron" and not is_installed("megatron.core"):
        raise ConfigError('train_backend is "megatron", which needs megatron-core: run make setup MEGATRON=1')
    megatron.check_transformer_engine(config)


def check_gpu_fields(config: TelescopeConfig) -> None:
    """Checks fields of Megatron that need GPUs, or GPUs of a generation."""
    megatron.check_gpu_fields(config, _device(config), visible_gpu_capabilities())


def _device(config: TelescopeConfig) -> Literal["cpu", "cuda"]:
    return resolve_device(config, local_resources())


def check_shared_memory(config: TelescopeConfig) -> str:
    """Checks the shared memory for queues between servers and workers."""
    if not SHARED_MEMORY.is_dir():
        raise ConfigError(f"{SHARED_MEMORY} is missing. Mount a tmpfs there: Ray and vLLM need it")
    needed, free = config.num_inference_servers * VLLM_QUEUE_BYTES, shutil.disk_usage(SHARED_MEMORY).free
    if config.inference_tensor_parallel_size > 1 and free < needed:
        raise ConfigError(
            f"{SHARED_MEMORY} has {free >> 20} MiB free, and {pluralize(config.num_inference_servers, 'server')} of "
            f"vLLM need {needed >> 20} MiB. Start the container with more, such as `docker run --shm-size=16g`, or "
            "lower inference_num_workers"
        )
    return f"enough for vLLM in {SHARED_MEMORY}"


def check_environments(config: TelescopeConfig) -> None:
    """Checks that environments exist and that their required packages are installed."""
    for entry in config.environments:
        ENVIRONMENTS.check(entry.name, config.environments_path)


def check_evals(config: TelescopeConfig) -> None:
    """Checks that evals and their packages are installed. An eval is an environment too."""
    for entry in config.evals:
        check_eval(entry.name, config.environments_path)


def check_ray_address(config: TelescopeConfig) -> str:
    """Checks that RAY_ADDRESS, which `ray_address: auto` uses, is a valid `ray_address`."""
    address = os.environ.get("RAY_ADDRESS", "")
    if config.ray_address == "auto" and (problem := client_address_problem(address)):
        raise ConfigError(f"RAY_ADDRESS is {address!r}, but {problem}. Unset RAY_ADDRESS, or set it to such an address")
    if ray_cluster_is_configured(config.ray_address):
        return f"a run joins the one at {address or config.ray_address}"
    node = local_resources().nodes[0]
    size = f"{pluralize(int(node.cpus), 'core')}, {pluralize(node.gpus, 'GPU')}"
    return f"none running: a run starts its own on this machine ({size})"


def check_placement(config: TelescopeConfig, *, with_trainer: bool = True) -> None:
    """Checks that the workers fit."""
    plan_placement(config, local_resources(), with_trainer=with_trainer)


def check_quantization(config: TelescopeConfig) -> None:
    """Checks that this machine's GPUs have FP8 if servers are quantized."""
    if config.inference_quantization == "none":
        return
    chosen = f"inference_quantization is {config.inference_quantization}, which requires GPUs with FP8"
    fix = 'Set inference_quantization to "none"'
    if _device(config) == "cpu":
        raise ConfigError(f"{chosen}, and no GPU was found. {fix}, or use such a machine")
    lowest = min(visible_gpu_capabilities(), default=FP8_CAPABILITY)
    if lowest < FP8_CAPABILITY:
        raise ConfigError(
            f"{chosen} (compute capability {FP8_CAPABILITY:g} or more), and a GPU here has {lowest:g}. {fix}"
        )


def check_router_replay(config: TelescopeConfig) -> None:
    """Checks that the installed vLLM returns routed experts for router replay."""
    if config.router_replay:
        from telescope.inference.vllm.support import check_routes

        check_routes(on_cpu=_device(config) == "cpu")


def check_open_files(config: TelescopeConfig) -> str:
    """Checks that the limit of open files fits all samples. The driver raises it up to the hard limit."""
    most, (_, hard) = _most_prompts(config), resource.getrlimit(resource.RLIMIT_NOFILE)
    if most is None:
        return "no limit" if hard == resource.RLIM_INFINITY else f"a process may open {hard:,}"
    slots = config.num_inference_servers * config.lanes_per_server
    can_lower = most < config.max_concurrent_prompts_per_server
    lower = f", or set max_concurrent_prompts_per_server to at most {most}" if can_lower else ""
    raise ConfigError(
        f"max_concurrent_prompts_per_server is {config.max_concurrent_prompts_per_server}, which with group_size "
        f"{config.group_size} and {pluralize(config.num_inference_servers, 'server')} is {slots:,} samples in flight, "
        f"each with a connection, and a process may open {hard:,} files here. Raise that limit to "
        f"{slots + OTHER_OPEN_FILES:,} (`ulimit -Hn`, or LimitNOFILE of a service){lower}"
    )


def _most_prompts(config: TelescopeConfig) -> int | None:
    """Returns the most prompts per server that the limit of open files allows, or None if the config's number fits."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (
        hard == resource.RLIM_INFINITY
        or config.num_inference_servers * config.lanes_per_server + OTHER_OPEN_FILES <= hard
    ):
        return None
    return max(1, (hard - OTHER_OPEN_FILES) // (config.num_inference_servers * config.group_size))


def check_run_dir(config: TelescopeConfig) -> str:
    """Checks that run and checkpoint directories are writable and unused."""
    run_dir = choose_run_dir(config)
    # Without run_dir, RunDirectory.create chooses a free name if another run started in the same second.
    if config.run_dir and os.path.exists(run_dir / "run.json") and not config.resume_from_checkpoint:
        raise ConfigError(
            f"run_dir is {str(run_dir)!r}, which already holds a run. Continue it with --resume {run_dir} (or "
            "resume_from_checkpoint: true), choose another directory (or leave run_dir null for a new one each time), "
            "or remove that run"
        )
    folder = config.checkpoint_dir and user_path(config.checkpoint_dir)
    if folder and any(folder.glob("step_*")) and not config.resume_from_checkpoint:
        raise ConfigError(
            f"checkpoint_dir is {str(folder)!r}, which already holds checkpoints. Continue their run with "
            "resume_from_checkpoint: true, or choose another folder"
        )
    if folder and config.checkpoint_every:
        check_writable("checkpoint_dir", folder.absolute(), "TELESCOPE_CHECKPOINT_DIR")
    return check_writable("run_dir", run_dir, "TELESCOPE_RUN_DIR")


def check_writable(field: str, folder: Path, variable: str) -> str:
    """Checks that a folder, or its nearest existing parent, can be written."""
    place = existing_parent(folder)
    fix = f"Set {field} (or {variable}) to a directory that you may write"
    if not place.is_dir():
        raise ConfigError(f"{field} is {str(folder)!r}, but {place} is a file. {fix}")
    try:
        # Permissions are not enough (read-only mounts, quotas, root), so this writes a byte.
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(b"\0")
    except OSError as error:
        raise ConfigError(
            f"{field} is {str(folder)!r}, but {place} is not writable ({error.strerror}). {fix}"
        ) from None
    return f"{place} is writable"


def check_ports(config: TelescopeConfig) -> str:
    """Checks that the servers' ports are free on this machine, or that a run would choose others (`fit_to_machine`)."""
    host = config.inference_host if "inference_host" in config.user_set else LOOPBACK
    base, count = config.inference_base_port, config.num_inference_servers
    if "inference_base_port" not in config.user_set and (free := free_block(LOOPBACK, count, base)) not in (None, base):
        taken = f"{base} is" if count == 1 else f"a port from {base} to {base + count - 1} is"
        return f"{taken} in use; a run takes {free}"
    for server in range(count):
        require_port(host, base + server, server=server, num_servers=count)
    return f"{base} is free"


def check_prometheus_address(config: TelescopeConfig) -> None:
    """Checks that the driver can serve Prometheus at its address."""
    if config.prometheus_address:
        host, port = split_address(config.prometheus_address)
        if problem := listen_problem(host, port):
            raise prometheus_error(config.prometheus_address, problem)


def check_alert_command(config: TelescopeConfig) -> None:
    """Checks that `alert_command` exists. Otherwise only the first alert would show that it is missing."""
    if config.alert_command and shutil.which(config.alert_command[0]) is None:
        raise ConfigError(
            f"alert_command: {config.alert_command[0]!r} is not a program on the PATH or an executable file. Give its "
            "whole path, or make it executable"
        )


CHECKS = (
    Check(check_environments, "environments"),
    Check(check_evals, "environments", evals=True),
    Check(model_checks.check_shape, "model"),
    Check(model_checks.check_report, "files"),
    Check(model_checks.check_disk, "files"),
    Check(model_checks.check_checkpoint_memory, "files", alone=True),
    Check(model_checks.check_memory, "machine", alone=True),
    Check(check_packages, evals=True, doctor="packages"),
    Check(check_trackers),
    Check(check_plugin, evals=True, doctor="vllm plugin"),
    Check(check_megatron),
    Check(check_gpu_fields, alone=True),
    Check(check_ray_address, evals=True, doctor="Ray cluster"),
    Check(check_placement, alone=True),
    Check(check_quantization, alone=True),
    Check(check_router_replay, alone=True),
    Check(check_open_files, evals=True, doctor="open files", doctor_status="note"),
    Check(check_shared_memory, alone=True, evals=True, doctor="shared memory"),
    Check(check_run_dir, doctor="run directory"),
    Check(check_alert_command),
    Check(check_prometheus_address),
    Check(check_ports, alone=True, evals=True, doctor="inference ports", doctor_status="note"),
)
