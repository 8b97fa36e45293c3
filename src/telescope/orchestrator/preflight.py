"""Checks a configuration before a run starts anything.

Checks environments, packages, ports, the run directory, cores and GPUs of this machine. Changes nothing, starts
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from telescope.config import megatron
from telescope.config.loader import choose_run_dir
from telescope.config.machine import (
    LOOPBACK,
    SHARED_MEMORY,
    existing_parent,
    free_block,
    listen_problem,
    local_resources,
    ray_cluster_is_configured,
    require_port,
    visible_gpu_capabilities,
)
from telescope.config.memory import estimate_memory
from telescope.config.messages import show
from telescope.config.model_checks import checkpoint_sentence
from telescope.config.model_files import inspect_model
from telescope.config.plan import (
    ClusterResources,
    PlacementError,
    fitting_values,
    gpus_needed,
    plan_placement,
    resolve_device,
)
from telescope.config.remarks import remarks_on_place
from telescope.config.sections.general import client_address_problem
from telescope.environments.registry import check_environment
from telescope.errors import ConfigError, UserError
from telescope.evals.base import check_eval
from telescope.utils.packages import is_installed
from telescope.utils.text import pluralize

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig

OTHER_OPEN_FILES = 512
"""Files and sockets of the driver besides its requests: Ray, environment workers, the record, control calls."""
VLLM_QUEUE_BYTES = 160 << 20
"""Shared memory that vLLM allocates for the queue to one server's workers: ten messages of 16 MiB."""
FP8_CAPABILITY = 8.9  # compute capability of the first GPUs with FP8 (Ada)
TRAINING_PACKAGES = ("torch", "transformers", "ray", "msgspec", "vllm", "accelerate")

Check = Callable[["TelescopeConfig"], None]  # Checks one thing. Raises `UserError`.


def find_remarks(config: TelescopeConfig) -> list[str]:
    """Returns remarks on a configuration without problems. They depend on this machine and on the model."""
    joins = ray_cluster_is_configured(config.ray_address) and config.device == "auto"
    device = None if joins else resolve_device(config, local_resources())
    report = inspect_model(config, ask_hub=False)
    sentence = checkpoint_sentence(config, report)
    remarks = remarks_on_place(config, device, report.shape)
    return [*remarks, *([sentence] if sentence else [])]


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
    if any(listen_problem(LOOPBACK, port + server) for server in range(servers)):
        values["inference_base_port"] = free_block(LOOPBACK, servers, port) or port
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


def find_problems(config: TelescopeConfig, checks: Sequence[Check]) -> list[str]:
    """Returns the problems that the checks find, without duplicates."""
    problems = []
    for look in checks:
        try:
            look(config)
        except ConfigError as error:
            problems += error.problems
        except UserError as error:
            problems.append(str(error).replace("\n", "\n  "))
    return list(dict.fromkeys(problems))


def checks_of_environments() -> tuple[Check, ...]:
    """Returns the checks that have the same outcome on any machine with this checkout."""
    return (check_environments, check_evals)


def checks_of_machine() -> tuple[Check, ...]:
    """Returns the checks of the machine on which the run is started."""
    return (
        check_packages,
        check_trackers,
        check_plugin,
        check_megatron,
        check_ray_address,
        check_placement,
        check_quantization,
        check_router_replay,
        check_open_files,
        check_shared_memory,
        check_run_dir,
        check_alert_command,
        check_ports,
    )


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


def check_packages(_: TelescopeConfig) -> None:
    """Checks that the packages for training are installed. A plain `telescope` installation lacks them."""
    missing = [name for name in TRAINING_PACKAGES if not is_installed(name)]
    if missing:
        raise ConfigError(
            f"Training needs packages that are not installed: {', '.join(missing)}. Install them with `make setup` in "
            "a checkout, or with `pip install '.[cuda]'` there on a machine with an NVIDIA GPU; `telescope doctor` "
            "lists what else is missing"
        )


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


def plugin_problem() -> str | None:
    """Returns why vLLM does not find Telescope's plugin, and the fix. None if it does."""
    entry_points = importlib.metadata.entry_points(group="vllm.general_plugins", name="telescope")
    fix = "Install Telescope, with `make setup` in a checkout or `pip install -e .`: sources on the path are not enough"
    for entry_point in entry_points:
        if importlib.util.find_spec(entry_point.module) is not None:
            return None
        return f"the installed entry point names {entry_point.module}, which does not exist. {fix}"
    return f"its entry point is not installed. {fix}"


def check_plugin(_: TelescopeConfig) -> None:
    """Checks that vLLM finds Telescope's weight transfer among installed entry points."""
    if problem := plugin_problem():
        raise ConfigError(f"vLLM cannot load Telescope's plugin: {problem}")


def check_megatron(config: TelescopeConfig) -> None:
    """Checks Megatron's packages and fields on this machine."""
    if config.train_backend == "megatron" and not is_installed("megatron.core"):
        raise ConfigError('train_backend is "megatron", which needs megatron-core: run make setup MEGATRON=1')
    megatron.check_transformer_engine(config)
    if not ray_cluster_is_configured(config.ray_address):
        megatron.check_gpu_fields(config, resolve_device(config, local_resources()), visible_gpu_capabilities())


def check_shared_memory(config: TelescopeConfig) -> None:
    """Checks the shared memory for queues between servers and workers."""
    resources = local_resources()
    has_queue = config.inference_tensor_parallel_size > 1 or resolve_device(config, resources) == "cpu"
    if ray_cluster_is_configured(config.ray_address) or not has_queue or not SHARED_MEMORY.is_dir():
        return
    needed, free = config.num_inference_servers * VLLM_QUEUE_BYTES, shutil.disk_usage(SHARED_MEMORY).free
    if free < needed:
        raise ConfigError(
            f"{SHARED_MEMORY} has {free >> 20} MiB free, and {pluralize(config.num_inference_servers, 'server')} of "
            f"vLLM need {needed >> 20} MiB. Start the container with more, such as `docker run --shm-size=16g`, or "
            "lower inference_num_workers"
        )


def check_environments(config: TelescopeConfig) -> None:
    """Checks that environments exist and that their required packages are installed."""
    for entry in config.environments:
        check_environment(entry.name, config.environments_path)


def check_evals(config: TelescopeConfig) -> None:
    """Checks that evals and their packages are installed. An eval is an environment too."""
    for entry in config.evals:
        check_eval(entry.name, config.environments_path)


def check_ray_address(config: TelescopeConfig) -> None:
    """Checks that RAY_ADDRESS, which `ray_address: auto` uses, is a valid `ray_address`."""
    address = os.environ.get("RAY_ADDRESS", "")
    if config.ray_address == "auto" and (problem := client_address_problem(address)):
        raise ConfigError(f"RAY_ADDRESS is {address!r}, but {problem}; unset RAY_ADDRESS, or set it to such an address")


def check_placement(config: TelescopeConfig, *, with_trainer: bool = True) -> None:
    """Checks that the workers fit, unless the run joins a cluster."""
    if not ray_cluster_is_configured(config.ray_address):
        plan_placement(config, local_resources(), with_trainer=with_trainer)


def check_quantization(config: TelescopeConfig) -> None:
    """Checks that this machine's GPUs have FP8 if servers are quantized. Skipped for a run that joins a cluster."""
    if config.inference_quantization == "none" or ray_cluster_is_configured(config.ray_address):
        return
    chosen = f"inference_quantization is {config.inference_quantization}, which requires GPUs with FP8"
    fix = 'Set inference_quantization to "none"'
    if resolve_device(config, local_resources()) == "cpu":
        raise ConfigError(f"{chosen}, and no GPU was found. {fix}, or use such a machine")
    lowest = min(visible_gpu_capabilities(), default=FP8_CAPABILITY)
    if lowest < FP8_CAPABILITY:
        raise ConfigError(
            f"{chosen} (compute capability {FP8_CAPABILITY:g} or more), and a GPU here has {lowest:g}. {fix}"
        )


def check_router_replay(config: TelescopeConfig) -> None:
    """Checks that the installed vLLM returns routed experts for router replay."""
    if not config.router_replay or ray_cluster_is_configured(config.ray_address):
        return
    from telescope.inference.vllm.support import check_routes

    check_routes(on_cpu=resolve_device(config, local_resources()) == "cpu")


def check_open_files(config: TelescopeConfig) -> None:
    """Checks that the limit of open files fits all samples. The driver raises it up to the hard limit."""
    most, (_, hard) = _most_prompts(config), resource.getrlimit(resource.RLIMIT_NOFILE)
    if most is None:
        return
    slots = config.num_inference_servers * config.lanes_per_server
    raise ConfigError(
        f"max_concurrent_prompts_per_server is {config.max_concurrent_prompts_per_server}, which with group_size "
        f"{config.group_size} and {config.num_inference_servers} servers is {slots:,} samples in flight, each with a "
        f"connection, and a process may open {hard:,} files here. Raise that limit (`ulimit -Hn`, or LimitNOFILE of a "
        f"service), or set max_concurrent_prompts_per_server to at most {most}"
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


def check_run_dir(config: TelescopeConfig) -> None:
    """Checks that run and checkpoint directories are writable and unused."""
    run_dir = choose_run_dir(config)
    # Without run_dir, RunDirectory.create chooses a free name if another run started in the same second.
    if config.run_dir and (run_dir / "run.json").exists() and not config.resume_from_checkpoint:
        raise ConfigError(
            f"run_dir is {str(run_dir)!r}, which already holds a run. Continue it with --resume {run_dir} (or "
            "resume_from_checkpoint: true), choose another directory (or leave run_dir null for a new one each time), "
            "or remove that run"
        )
    folder = config.checkpoint_dir and Path(config.checkpoint_dir).expanduser()
    if folder and any(folder.glob("step_*")) and not config.resume_from_checkpoint:
        raise ConfigError(
            f"checkpoint_dir is {str(folder)!r}, which already holds checkpoints. Continue their run with "
            "resume_from_checkpoint: true, or choose another folder"
        )
    _check_writable("run_dir", run_dir, "TELESCOPE_RUN_DIR")
    if folder and config.checkpoint_every:
        _check_writable("checkpoint_dir", folder.absolute(), "TELESCOPE_CHECKPOINT_DIR")


def _check_writable(field: str, folder: Path, variable: str) -> None:
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


def check_ports(config: TelescopeConfig) -> None:
    """Checks that the servers' ports are free on this machine."""
    if ray_cluster_is_configured(config.ray_address):
        return  # the servers may run elsewhere, and each reports its own port
    host = config.inference_host if "inference_host" in config.user_set else LOOPBACK
    count = config.num_inference_servers
    for server in range(count):
        require_port(host, config.inference_base_port + server, server=server, num_servers=count)


def check_alert_command(config: TelescopeConfig) -> None:
    """Checks that `alert_command` exists. Otherwise only the first alert would show that it is missing."""
    if config.alert_command and shutil.which(config.alert_command[0]) is None:
        raise ConfigError(
            f"alert_command: {config.alert_command[0]!r} is not a program on the PATH or an executable file. Give its "
            "whole path, or make it executable"
        )
