"""The Ray cluster of a run: joins a running cluster or starts one here, reports its resources, and leaves it.

Owns the call to `ray.init` and the runtime environment that every actor inherits (interpreter, virtual environment, run
directory). Does not own actors or placement.

A cluster that is started here is private: it listens on loopback, keeps its files in the run's temporary directory and
requires its own token. `daemon_failure` reports when one of its daemons has exited.

When Ray joins a cluster, the form of the address decides whether it sends a token, not what the cluster requires: with
"auto" it sends the token in the home directory if there is one, with an address it sends none. So the cluster is asked
first, unless the user has set `RAY_AUTH_MODE`.
"""

import asyncio
import atexit
import contextlib
import logging
import math
import os
import re
import secrets
import shutil
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants, services
from ray._private import worker as ray_worker
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled

from telescope.cluster.reaper import MARK_VARIABLE
from telescope.config import TelescopeConfig
from telescope.config.machine import LOOPBACK
from telescope.config.plan import ClusterResources, NodeResources
from telescope.errors import RunError, UserError
from telescope.record.files import RunFiles
from telescope.utils.process import describe_exit, log_tail, sigterm_blocked

logger = logging.getLogger(__name__)

STARTED_TOO_SLOWLY = "timed out during startup"
"""Part of Ray's error when its daemons are not up in time."""

STOP_SECONDS = 10.0
"""Daemons of a cluster that is being stopped are killed after this time."""

DAEMONS = ("gcs_server", "raylet")
"""Ray's processes without which a run cannot continue. The raylet exits when one of its agents does."""

DAEMON_LOG_LINES = 8
DAEMON_MESSAGE = re.compile(r"\[\d{4}-\d\d-\d\d ")
"""Start of a message in a daemon's log. Every minute it also writes its state, in lines without a time."""
DAEMON_STATE = re.compile(r"\[state-dump\]|(stats|state|dump):\s*$")

MODE_VARIABLE = "RAY_AUTH_MODE"
TOKEN_VARIABLE = "RAY_AUTH_TOKEN_PATH"
AUTHENTICATION_VARIABLES = (MODE_VARIABLE, "RAY_AUTH_TOKEN", TOKEN_VARIABLE)
PROBE_METHOD = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""Method to which a cluster's head node responds for every authorized client."""
PROBE_SECONDS = 10.0

FORWARDED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", MARK_VARIABLE)
"""Variables of this process that every actor gets, unless `ray_runtime_env` sets them."""

LOCAL_OBJECT_STORE_BYTES = 1 << 30
"""Batches pass through the object store and are a few MB; Ray's default, 30 % of the memory, is for data work."""


@dataclass(frozen=True)
class Cluster:
    """A connection to Ray. `started_here`: this process started the cluster and must stop it."""

    started_here: bool
    resources: ClusterResources
    node_names: Mapping[str, str]
    """The name of each node in the record, by Ray's node id."""
    driver_node: str
    """Ray's id of this process's node."""
    has_private_token: bool = False


def runtime_environment(config: TelescopeConfig, run_dir: Path) -> dict[str, Any]:
    """Returns the runtime environment of every actor. Variables in the user's `ray_runtime_env` take precedence."""
    user = dict(config.ray_runtime_env or {})
    variables: dict[str, str] = {
        # Otherwise each actor without GPUs warns that it sees no accelerator.
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
    # A cluster that was already running has not inherited them from this process.
    variables |= {name: value for name, value in os.environ.items() if name.startswith(FORWARDED_PREFIXES)}
    user["env_vars"] = {**variables, **(user.get("env_vars") or {})}
    if config.ray_pin_py_executable:
        user.setdefault("py_executable", sys.executable)
    return user


def connect(
    config: TelescopeConfig,
    run_dir: Path,
    temporary: Path,
    *,
    local_cpus: float,
    local_gpus: float,
    stopped: threading.Event | None = None,
) -> Cluster:
    """Connects to `ray_address`, or starts a cluster if `ray_auto_start_local` allows it.

    `temporary` is a private directory for the files of a cluster started here, and `local_cpus` are the CPUs that it
    offers (CPU shares only order Ray's bookkeeping; they bind no core). After `stopped` is set no second start is
    attempted. Raises UserError if there is no cluster and none may be started, RunError if it does not start.
    """
    if config.ray_disable_runtime_env_hook:
        # Under `uv run`, Ray would otherwise rebuild the whole environment for each worker. The variable is for the
        # processes that Ray starts; this one read it when it imported Ray.
        os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
        ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    _log_advice()
    common: dict[str, Any] = {
        "_skip_env_hook": config.ray_disable_runtime_env_hook,  # the hook that RAY_RUNTIME_ENV_HOOK names
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
            may_start = config.ray_address == "auto" and config.ray_auto_start_local
            if not may_start or not isinstance(error, ConnectionError):
                raise UserError(
                    f"ray_address: {config.ray_address!r} cannot be reached ({error}). Start Ray there with `ray start "
                    "--head`. A run with ray_address: auto and ray_auto_start_local: true starts its own."
                ) from error
    # The run monitors its memory itself. Ray's monitor would kill a trainer that loads a large model.
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    # Ray lowers the priority of its workers by default.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray would start an idle worker of 80 MB per core, which no actor uses, because actors have a runtime environment.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Only Ray's dashboard needs task events; the GCS would keep 100,000 of them.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    has_private_token = _use_private_token(temporary)
    arguments = {
        "num_cpus": math.ceil(local_cpus),
        "num_gpus": int(local_gpus),
        "include_dashboard": False,
        "_node_ip_address": LOOPBACK,
        # A subdirectory, because Ray makes the directory that it is given writable for everyone.
        "_temp_dir": str(temporary / "ray"),
        "object_store_memory": LOCAL_OBJECT_STORE_BYTES,
        **common,
    }
    try:
        _start_here(arguments, stopped or threading.Event())
    except Exception as error:
        reason = str(error).strip().rstrip(".") or type(error).__name__
        logs = keep_logs(temporary, run_dir)
        raise RunError(
            f"Ray could not be started on this machine: {reason}. Its logs are in {logs}; `telescope doctor` checks "
            "what it needs (memory, /dev/shm, open files, a writable temporary folder)"
        ) from error
    return replace(_cluster(started_here=True), has_private_token=has_private_token)


def _start_here(arguments: dict[str, Any], stopped: threading.Event) -> None:
    """Starts a cluster here. Tries a second time if the first start is too slow.

    Ray gives its daemons 30 s to start and has no setting for that. On a busy machine the first start may need more.
    """
    for is_last_attempt in (False, True):
        try:
            with _only_loopback(), sigterm_blocked():
                ray.init(address="local", **arguments)
            return
        except Exception as error:  # Ray raises plain exceptions when one of its daemons does not come up
            ray.shutdown()
            if is_last_attempt or stopped.is_set() or STARTED_TOO_SLOWLY not in str(error):
                raise
            logger.warning("Ray did not start within its 30 s; trying once more")


def _log_advice() -> None:
    """Sends messages of Ray's daemons to the log instead of the terminal, such as why an actor was lost.

    The run reports lost processes itself, with signal, log and the command that continues the run.
    """
    show = ray_worker.print_to_stdstream

    def log(data: dict[str, Any], ignore_prefix: bool) -> None:
        if data["pid"] == "raylet":
            logger.info("Ray: %s", "\n".join(data["lines"]))
        else:
            show(data, ignore_prefix)

    if show.__module__ != __name__:
        ray_worker.print_to_stdstream = log


def _use_private_token(temporary: Path) -> bool:
    """Makes the next cluster require a private token of this user.

    By default Ray writes a token to ~/.ray/auth_token, readable by everyone. Returns False if the user has set
    authentication variables.
    """
    if any(name in os.environ for name in AUTHENTICATION_VARIABLES):
        return False
    token = temporary / "ray_token"
    with open(os.open(token, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    os.environ[TOKEN_VARIABLE] = str(token)
    AuthenticationTokenLoader.instance().reset_cache()
    return True


def daemon_failure() -> str | None:
    """Describes a started Ray daemon that has exited, with the end of its log. None while all run."""
    node: Any = ray._private.worker._global_node
    for name in DAEMONS if node is not None else ():
        for daemon in node.all_processes.get(name, []):
            code = daemon.process.poll()
            if code is None:
                continue
            ended = f"Ray's {name} (process {daemon.process.pid}) {describe_exit(code)}"
            log = Path(node.get_logs_dir_path(), name)
            lines = [line for line in log_tail(log.with_suffix(".err"), 4000).splitlines() if line.strip()]
            if not lines:
                output = log_tail(log.with_suffix(".out"), 64_000).splitlines()
                lines = [line for line in output if DAEMON_MESSAGE.match(line) and not DAEMON_STATE.search(line)]
            end = "\n".join(lines[-DAEMON_LOG_LINES:])
            return f"{ended}. Its log ends:\n{end}" if end else f"{ended}. Its log is empty"
    return None


async def watch_daemons(poll_seconds: float = 1.0) -> None:
    """Raises RunError when a Ray daemon that this process started exits. Calls to Ray would hang for minutes."""
    while True:
        if failure := daemon_failure():
            raise RunError(failure)
        await asyncio.sleep(poll_seconds)


def keep_logs(temporary: Path, run_dir: Path) -> Path:
    """Copies the logs of a cluster started here. Returns their folder."""
    logs, kept = temporary / "ray" / "session_latest" / "logs", RunFiles(run_dir).logs / "ray"
    try:
        shutil.copytree(logs, kept, dirs_exist_ok=True)
    except OSError as error:  # shutil.Error too: files that vanish while daemons exit
        logger.warning("not all of Ray's logs could be copied to %s: %s", kept, error)
    return kept


@contextlib.contextmanager
def _only_loopback() -> Iterator[None]:
    """Makes a cluster that is started inside the block listen only on loopback.

    For a node at 127.0.0.1 Ray looks up an address that other machines can reach, unless this switch is off. Ray reads
    the variable when it is imported, so the variable is set for the processes that Ray starts, and the constant for
    this one.
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
    """Returns the address at which other machines of the cluster reach this one."""
    return str(ray.util.get_node_ip_address())


def disconnect(cluster: Cluster, config: TelescopeConfig) -> None:
    """Leaves the cluster. Stops it if it was started here or `ray_shutdown_on_exit` is set."""
    if daemon_failure() is not None:
        abandon()
        return
    if not ray.is_initialized():
        return
    stop_all = config.ray_shutdown_on_exit and not cluster.started_here
    node = ray._private.worker._global_node
    session = node.session_name if node is not None else None
    ray.shutdown()
    if cluster.has_private_token:
        del os.environ[TOKEN_VARIABLE]
        forget_authentication()
    if stop_all and session is not None:
        logger.info("ray_shutdown_on_exit: stopping the processes of the Ray cluster on this machine")
        _stop_session(session)


def abandon() -> None:
    """Leaves Ray without waiting for its daemons, now and at exit. The run's reaper kills them."""
    atexit.unregister(ray.shutdown)


def _stop_session(session: str) -> None:
    """Stops the daemons of one Ray session on this machine. Its workers, and nodes that lose their head, then exit.

    `ray stop` would stop every cluster on the machine, including those of other users. Raylets and the autoscaler's
    monitor report to the GCS when they stop, and wait long if it is gone, so raylets are stopped first and the GCS
    last.
    """
    daemons = [
        process
        for process in psutil.process_iter(["cmdline", "name"])
        if any(session in argument for argument in process.info["cmdline"] or [])
    ]
    raylets = [process for process in daemons if process.info["name"] == "raylet"]
    gcs = [process for process in daemons if process.info["name"] == "gcs_server"]
    between = [process for process in daemons if process not in raylets + gcs]
    running = [process for turn in (raylets, between, gcs) for process in _end(turn, psutil.Process.terminate)]
    if left := _end(running, psutil.Process.kill):
        numbers = ", ".join(str(process.pid) for process in left)
        logger.warning("ray_shutdown_on_exit: processes still running %g s after SIGKILL: %s", STOP_SECONDS, numbers)


def _end(processes: Sequence[psutil.Process], signal: Callable[[psutil.Process], None]) -> list[psutil.Process]:
    """Sends a signal. Returns the processes that still run after `STOP_SECONDS`."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            signal(process)
    return psutil.wait_procs(processes, timeout=STOP_SECONDS)[1]


def _cluster(*, started_here: bool) -> Cluster:
    """Returns the connected cluster with its nodes' total resources."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    total = [(node["NodeManagerAddress"], node["Resources"]) for node in nodes]
    resources = tuple(NodeResources(name, float(r.get("CPU", 0)), int(r.get("GPU", 0))) for name, r in total)
    here = ray.get_runtime_context().get_node_id()
    return Cluster(started_here, ClusterResources(resources), names_of_nodes(nodes), here)


def names_of_nodes(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns host names by node id. A name that several nodes have is followed by the address."""
    count = Counter(node["NodeManagerHostname"] for node in nodes)
    return {
        node["NodeID"]: name if count[name] == 1 else f"{name} ({node['NodeManagerAddress']})"
        for node in nodes
        for name in [node["NodeManagerHostname"]]
    }


def settle_authentication(ray_address: str) -> None:
    """Sets `RAY_AUTH_MODE` to what the cluster at `ray_address` requires.

    Raises ConnectionError if nothing listens there, UserError if the cluster requires a token that is not available.
    Leaves other faults to `ray.init`.
    """
    if "://" in ray_address:
        return
    address = services.canonicalize_bootstrap_address(ray_address)
    if address is None:
        return
    check_port_open(address)
    if MODE_VARIABLE in os.environ or (open_to_all := admits(address)) is None:
        return
    if not open_to_all:
        loader = AuthenticationTokenLoader.instance()
        loader.reset_cache()
        has_token = loader.has_token(ignore_auth_mode=True)
        if not has_token or admits(address, loader.get_raw_token(ignore_auth_mode=True)) is False:
            raise UserError(
                f"ray_address: the cluster at {ray_address!r} ({address}) asks for a token, and "
                + ("rejects the one found here" if has_token else "none was found here")
                + ". Copy ~/.ray/auth_token from the machine of its head node, or set RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH"
            )
    os.environ[MODE_VARIABLE] = "disabled" if open_to_all else "token"
    Config.initialize("")  # Ray reads the environment once


def forget_authentication() -> None:
    """Undoes `settle_authentication`, after joining failed or the cluster was left."""
    os.environ.pop(MODE_VARIABLE, None)
    Config.initialize("")


def admits(address: str, token: str | None = None) -> bool | None:
    """Returns whether the cluster at `address` accepts this token, or no token. None if it does not respond."""
    import grpc  # 7 MiB, which no actor needs

    shown: Sequence[tuple[str, str]] = [("authorization", f"Bearer {token}")] if token is not None else []
    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(PROBE_METHOD)(b"", timeout=PROBE_SECONDS, metadata=shown)
        except grpc.RpcError as error:
            return False if error.code() == grpc.StatusCode.UNAUTHENTICATED else None
    return True


def check_port_open(address: str) -> None:
    """Raises ConnectionError if nothing listens; `ray.init` would try for minutes. A cluster behind TLS passes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # `ray.init` reports it
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"nothing answers at {address}: {error}") from error
