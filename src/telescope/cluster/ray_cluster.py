"""The Ray cluster: connecting to one or starting a local one, what it offers, and shutting it down.

Owns the call to `ray.init` and the runtime environment that every actor inherits (interpreter, virtual environment, run
directory). Does not own actors or placement.

Whether the Ray cluster that a run joins asks for a token, and so whether this process shows one.

Ray decides that by how a cluster was named and not by the cluster. Found by "auto", it shows a token, and wants to be
shown one, if there is one in the home directory; named by its address, it never does. So a cluster that was started
where there is one (the first local run on a machine makes it) cannot be joined by address, and one that was started
without is joined by "auto" and loses every actor at once. Therefore the cluster is asked. A user's own `RAY_AUTH_MODE`
wins.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import ray
from ray._private import ray_constants, services
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled

from telescope.config import TelescopeConfig
from telescope.config.machine import LOOPBACK
from telescope.config.plan import ClusterResources, NodeResources
from telescope.errors import RunError, UserError

logger = logging.getLogger(__name__)

STARTED_TOO_SLOWLY = "timed out during startup"
"""In what Ray raises when its daemons are not up in time."""

STOP_SECONDS = 10.0
"""After which daemons of a cluster that is to be stopped are killed."""

FORWARDED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
"""Variables of this process that every actor gets, as long as `ray_runtime_env` says nothing else."""

LOCAL_OBJECT_STORE_BYTES = 1 << 30
"""Batches pass through the object store and are a few MB; Ray's default, 30 % of the memory, is for data work."""


@dataclass(frozen=True)
class Cluster:
    """A connection to Ray. `started_here` says whether this process started the cluster and so ends it."""

    started_here: bool
    resources: ClusterResources
    node_names: Mapping[str, str]
    """What the record calls each node, by its id in Ray."""
    driver_node: str
    """The node that this process is on, by its id."""


def runtime_environment(config: TelescopeConfig, run_dir: Path) -> dict[str, Any]:
    """What every actor inherits. A `ray_runtime_env` of the user's wins over ours, variable by variable."""
    user = dict(config.ray_runtime_env or {})
    variables: dict[str, str] = {
        # One warning per actor otherwise, about accelerators that an actor without GPUs is not meant to see.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.ray_propagate_run_dir:
        variables["TELESCOPE_RUN_DIR"] = str(run_dir)
    if config.ray_propagate_active_venv and sys.prefix != sys.base_prefix:
        variables["VIRTUAL_ENV"] = sys.prefix
        variables["PATH"] = f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    if config.debug:
        variables["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    # A cluster that runs already has not inherited them from this process.
    variables |= {name: value for name, value in os.environ.items() if name.startswith(FORWARDED_PREFIXES)}
    user["env_vars"] = {**variables, **(user.get("env_vars") or {})}
    if config.ray_pin_py_executable:
        user.setdefault("py_executable", sys.executable)
    return user


def connect(config: TelescopeConfig, run_dir: Path, *, local_cpus: float, local_gpus: float) -> Cluster:
    """Connect to `ray_address`, or start a cluster here when there is none and `ray_auto_start_local` allows.

    `local_cpus` is what a cluster started here offers; CPU shares only order Ray's bookkeeping, they bind no core.
    Raises UserError when there is no cluster and none may be started.
    """
    if config.ray_disable_runtime_env_hook:
        # Under `uv run`, Ray would otherwise rebuild the whole environment for each worker. The variable is for the
        # processes that Ray starts; in this one it was read when Ray was imported.
        os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
        ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    common: dict[str, Any] = {
        "_skip_env_hook": config.ray_disable_runtime_env_hook,  # the one that RAY_RUNTIME_ENV_HOOK names
        "namespace": config.ray_namespace,
        "runtime_env": runtime_environment(config, run_dir),
        "log_to_driver": config.ray_log_to_driver,
        "logging_level": logging.DEBUG if config.debug else logging.ERROR,
    }
    if config.ray_address != "local":
        mode_was_set = MODE_VARIABLE in os.environ
        try:
            settle_authentication(config.ray_address)
            ray.init(address=config.ray_address, **common)
            return _cluster(started_here=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            if not mode_was_set:
                forget_authentication()
            may_start = (
                config.ray_address == "auto" and config.ray_auto_start_local and isinstance(error, ConnectionError)
            )
            if not may_start:
                raise UserError(
                    f"ray_address: {config.ray_address!r} cannot be reached ({error}). Start Ray there with `ray start "
                    "--head`, or set ray_address: auto and ray_auto_start_local: true to start one on this machine."
                ) from error
    # Memory is supervised by the run itself; Ray's monitor would kill a trainer that loads a large model.
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    # Ray lowers the priority of its workers, for the sake of a desktop; here they are the run.
    os.environ.setdefault("RAY_worker_niceness", "0")
    _start_here(
        {
            "num_cpus": math.ceil(local_cpus),
            "num_gpus": int(local_gpus),
            "include_dashboard": False,
            # It is of this machine alone, and here Ray listens to nobody else.
            "_node_ip_address": LOOPBACK,
            "object_store_memory": LOCAL_OBJECT_STORE_BYTES,
            **common,
        }
    )
    return _cluster(started_here=True)


def _start_here(arguments: dict[str, Any]) -> None:
    """Start a cluster on this machine, in a second attempt if need be. Raises RunError with Ray's own words.

    Ray gives its daemons 30 s to come up and has no setting for that; on a busy machine they need more the first time.
    """
    for is_last_attempt in (False, True):
        try:
            with _only_loopback():
                ray.init(address="local", **arguments)
            return
        except Exception as error:  # Ray raises plain exceptions when one of its daemons does not come up
            ray.shutdown()
            words = str(error).strip().rstrip(".") or type(error).__name__
            if STARTED_TOO_SLOWLY in words and not is_last_attempt:
                logger.warning("Ray did not start within its 30 s; trying once more")
                continue
            logs = Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray", "session_latest", "logs")
            raise RunError(
                f"Ray could not be started on this machine: {words}. Its logs are under {logs.resolve()}; `telescope "
                "doctor` looks at what it needs (memory, /dev/shm, open files, a writable temporary folder)"
            ) from error


@contextlib.contextmanager
def _only_loopback() -> Iterator[None]:
    """A cluster that is started inside has the loopback address for its node's, so that all of it listens there alone.

    Asked for a node at 127.0.0.1, Ray looks for an address that other machines can reach, unless this switch says that
    there are none. The switch is read from the environment when Ray is imported: the environment is for the processes
    that Ray starts, the constant for this one.
    """
    before = os.environ.get(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        variable, ray_constants.ENABLE_RAY_CLUSTER = before
        if variable is None:
            del os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR]
        else:
            os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = variable


def own_address() -> str:
    """The address of this machine that the other machines of the cluster reach it by."""
    return str(ray.util.get_node_ip_address())


def disconnect(cluster: Cluster, config: TelescopeConfig) -> None:
    """Leave the cluster; end it when it was started here, or when `ray_shutdown_on_exit` says so."""
    if not ray.is_initialized():
        return
    stop_all = config.ray_shutdown_on_exit and not cluster.started_here
    node = ray._private.worker._global_node
    session = node.session_name if node is not None else None
    ray.shutdown()
    if stop_all and session is not None:
        logger.info("ray_shutdown_on_exit: stopping the processes of the Ray cluster on this machine")
        _stop_session(session)


def _stop_session(session: str) -> None:
    """End the daemons of one Ray session on this machine; its workers, and other nodes without their head, follow.

    `ray stop` ends those of every cluster that the machine has, other people's included. What has something to tell the
    GCS at its end, as raylets and the autoscaler's monitor do, waits long for an answer once the GCS has ended: so the
    raylets are first and the GCS is last.
    """
    daemons = [
        process
        for process in psutil.process_iter(["cmdline", "name"])
        if any(session in argument for argument in process.info["cmdline"] or [])
    ]
    raylets = [process for process in daemons if process.info["name"] == "raylet"]
    gcs = [process for process in daemons if process.info["name"] == "gcs_server"]
    between = [process for process in daemons if process not in raylets + gcs]
    deaf = [process for turn in (raylets, between, gcs) for process in _end(turn, psutil.Process.terminate)]
    if left := _end(deaf, psutil.Process.kill):
        numbers = ", ".join(str(process.pid) for process in left)
        logger.warning("ray_shutdown_on_exit: still there %g s after SIGKILL: processes %s", STOP_SECONDS, numbers)


def _end(processes: Sequence[psutil.Process], signal: Callable[[psutil.Process], None]) -> list[psutil.Process]:
    """Those of the processes that are still there `STOP_SECONDS` after they were sent the signal."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            signal(process)
    return psutil.wait_procs(processes, timeout=STOP_SECONDS)[1]


def _cluster(*, started_here: bool) -> Cluster:
    """The cluster that this process is connected to, with what its nodes offer in total, not what is free just now."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    resources = tuple(
        NodeResources(
            name=node["NodeManagerAddress"],
            cpus=float(node["Resources"].get("CPU", 0)),
            gpus=int(node["Resources"].get("GPU", 0)),
        )
        for node in nodes
    )
    here = ray.get_runtime_context().get_node_id()
    return Cluster(started_here, ClusterResources(resources), names_of_nodes(nodes), here)


def names_of_nodes(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The host name of each node by its id, with its address where several nodes have one name."""
    count = Counter(node["NodeManagerHostname"] for node in nodes)
    return {
        node["NodeID"]: name if count[name] == 1 else f"{name} ({node['NodeManagerAddress']})"
        for node in nodes
        for name in [node["NodeManagerHostname"]]
    }


MODE_VARIABLE = "RAY_AUTH_MODE"
QUESTION = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""What the head node of a cluster answers to everybody who may speak with it."""
QUESTION_SECONDS = 10.0


def settle_authentication(ray_address: str) -> None:
    """Set `RAY_AUTH_MODE` of this process to what the cluster at `ray_address` wants, if it can be asked.

    Raises ConnectionError when nobody is there, UserError when it wants a token that is not here. Otherwise what is
    wrong is for `ray.init` to say.
    """
    if "://" in ray_address:
        return
    address = services.canonicalize_bootstrap_address(ray_address)
    if address is None:
        return
    check_that_somebody_listens(address)
    if MODE_VARIABLE in os.environ or (open_to_all := admits(address)) is None:
        return
    if not open_to_all:
        _check_token(ray_address, address)
    os.environ[MODE_VARIABLE] = "disabled" if open_to_all else "token"
    Config.initialize("")  # Ray reads the environment once


def forget_authentication() -> None:
    """Take back what `settle_authentication` has set: the cluster was not joined after all."""
    os.environ.pop(MODE_VARIABLE, None)
    Config.initialize("")


def admits(address: str, token: str | None = None) -> bool | None:
    """Whether the cluster at `address` speaks with who shows this token, or none. None: it gives no answer."""
    shown: Sequence[tuple[str, str]] = [("authorization", f"Bearer {token}")] if token is not None else []
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(QUESTION)(b"", timeout=QUESTION_SECONDS, metadata=shown)
        except grpc.RpcError as error:
            return False if error.code() == grpc.StatusCode.UNAUTHENTICATED else None
    return True


def check_that_somebody_listens(address: str) -> None:
    """Raises ConnectionError when nobody does: `ray.init` would try for minutes. A cluster behind TLS passes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # for `ray.init` to say
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=QUESTION_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"nothing answers at {address}: {error}") from error


def _check_token(ray_address: str, address: str) -> None:
    loader = AuthenticationTokenLoader.instance()
    loader.reset_cache()
    has_token = loader.has_token(ignore_auth_mode=True)
    if has_token and admits(address, loader.get_raw_token(ignore_auth_mode=True)) is not False:
        return
    raise UserError(
        f"ray_address: the cluster at {ray_address!r} ({address}) asks for its token, and "
        + ("the one that is here is another" if has_token else "there is none here")
        + ". Copy ~/.ray/auth_token from the machine that its head was started on, or set RAY_AUTH_TOKEN or "
        "RAY_AUTH_TOKEN_PATH"
    )
