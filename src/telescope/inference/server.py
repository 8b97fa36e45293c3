"""Supervises one inference server: start, health checks, restart, stop.

Owns an engine process and everything it starts. Synchronous, with one supervising thread, so that a Ray actor, a test
or a script can use it. Does not own weights: a restarted server has the weights of the run's start, and refuses to
sample until it receives the current ones.

States: `starting` -> `ready` -> (`restarting` -> `ready`)* -> `failed` or `stopped`. A process is killed with its group
and restarted after a growing pause if it exits, closes its port, responds to its health route with an error (its engine
has exited, or hangs: `engine_health`), or does not respond for `unhealthy_seconds`. After `max_restarts` within
`restart_window_seconds` the server is `failed` and stays so.
"""

import http.client
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from telescope.config import TelescopeConfig
from telescope.config.machine import LOOPBACK, hold_port
from telescope.errors import InfrastructureError, RunError
from telescope.inference.base import HEALTH_ROUTE, METRICS_ROUTE, Address, EngineBackend, backend_of, error_message
from telescope.inference.process import EngineProcess
from telescope.utils.process import describe_exit

POLL_SECONDS = 0.2
HEALTH_INTERVAL_SECONDS = 2.0
NOT_LISTENING = 0
"""Used instead of a status when the connection was refused, so the process has closed its port."""
HEALTH_TIMEOUT_SECONDS = 10.0
METRICS_TIMEOUT_SECONDS = 10.0
LOG_LINES = 2000
WILDCARD_HOSTS = ("0.0.0.0", "::", "")


class EngineStartError(InfrastructureError, RunError):
    """A server did not start. The message has the relevant lines of its log and, where known, the fix."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server that responds."""

    url: str
    pid: int
    config_hash: str


@dataclass(slots=True)
class ServerStatus:
    """The state of a server. `restarts` counts processes after the first; each one loses the weights."""

    state: str
    restarts: int = 0
    pid: int | None = None
    last_log_lines: list[str] = field(default_factory=list)
    error: str | None = None
    start_seconds: float | None = None
    """Seconds from the newest process's launch to its first response; None before that."""


@dataclass(frozen=True, slots=True)
class SupervisionLimits:
    """Time limits of supervision, in seconds."""

    start_timeout: float = 900.0
    stop_grace: float = 10.0
    unhealthy_seconds: float = 60.0
    max_restarts: int = 5
    restart_window_seconds: float = 1800.0
    first_backoff: float = 1.0
    longest_backoff: float = 30.0


class InferenceServer:
    """Supervises the engine process at `address`.

    `model` is a local folder or hub id; the log goes to `run_dir/logs/inference-<index>.log`. `node_address` is the
    address at which others reach this machine, if the server listens on all interfaces. `backend` replaces the config's
    (tests).
    """

    def __init__(
        self, config: TelescopeConfig, address: Address, model: str, run_dir: Path | str, *,
        limits: SupervisionLimits | None = None, node_address: str | None = None,
        backend: type[EngineBackend] | None = None,
    ) -> None:  # fmt: skip
        self.config, self.address, self.model, self.node_address = config, address, model, node_address
        self.log_path = Path(run_dir) / "logs" / f"inference-{address.index}.log"
        self._directory = Path(run_dir) / "inference"
        self._limits = limits or SupervisionLimits(start_timeout=config.inference_start_timeout_seconds)
        self._backend = backend or backend_of(config)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._process: EngineProcess | None = None
        self._hold: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._state = "new"
        self._starts = 0
        self._start_seconds: float | None = None
        self._error: str | None = None
        self._restart_times: list[float] = []
        self._first_log: list[str] = []
        """End of the log of the first process, when it was ready."""

    @property
    def url(self) -> str:
        """Returns this server's URL for processes on this and other machines."""
        host = advertised_host(self.address.host, self.node_address)
        return f"http://[{host}]:{self.address.port}" if ":" in host else f"http://{host}:{self.address.port}"

    def start(self) -> ServerInfo:
        """Starts the process and waits until it responds. A thread supervises it afterwards.

        Raises `ConfigError` when the port is in use, `UserError` for an unsupported engine, `EngineStartError` when the
        process exits or is not ready within the start timeout.
        """
        if self._state != "new":
            raise RuntimeError(f"inference server {self.address.index} was started before (state {self._state})")
        self._hold = hold_port(
            self.address.host, self.address.port, server=self.address.index,
            num_servers=self.config.num_inference_servers,
        )  # fmt: skip
        self._state = "starting"
        try:
            self._start_process(restarted=False)
        except BaseException as error:
            self._state, self._error = "failed", str(error)
            self._hold.close()
            raise
        assert self._process is not None
        self._first_log = self._process.log_tail(LOG_LINES)
        self._state = "ready"
        name = f"inference-{self.address.index}-supervisor"
        self._thread = threading.Thread(target=self._supervise, name=name, daemon=True)
        self._thread.start()
        return ServerInfo(self.url, self._process.pid, self.config.hash)

    def status(self) -> ServerStatus:
        """Returns a snapshot. Callable from any thread at any time."""
        process = self._process
        return ServerStatus(
            state=self._state,
            restarts=max(0, self._starts - 1),
            pid=process.pid if process is not None and self._state in ("starting", "ready") else None,
            last_log_lines=process.log_tail() if process is not None else [],
            error=self._error,
            start_seconds=self._start_seconds,
        )

    def metrics_text(self) -> str | None:
        """Returns metrics as Prometheus text, or None before the server is ready. Callable from any thread.

        Raises `OSError` or `HTTPException` when a ready server does not respond.
        """
        if self._state != "ready":
            return None
        status, body = self._get(METRICS_ROUTE, METRICS_TIMEOUT_SECONDS)
        if status != 200:
            raise OSError(f"{self.url}{METRICS_ROUTE}: HTTP {status}")
        return body.decode()

    def stop(self) -> None:
        """Ends the process and everything it started. Safe to call twice, and during a start or restart."""
        self._stopping.set()
        with self._lock:  # a start in progress notices the event and releases the lock
            if self._process is not None:
                self._process.terminate(self._limits.stop_grace)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=self._limits.stop_grace + 30)
        if self._hold is not None:
            self._hold.close()
        if self._state != "failed":
            self._state = "stopped"

    # --- starting ---------------------------------------------------------------------------------------------------

    def _start_process(self, *, restarted: bool) -> None:
        log = self._first_log if restarted else None
        command = self._backend.launch(
            self.config, self.address, model=self.model, directory=self._directory, earlier_log=log
        )
        with self._lock:
            if self._stopping.is_set():
                raise EngineStartError(f"inference server {self.address.index} was stopped while it started")
            self._process = EngineProcess(command.arguments, command.environment, self.log_path)
            self._starts += 1
        process = self._process
        launched = time.monotonic()
        deadline = launched + self._limits.start_timeout
        while self._health(timeout=2.0)[0] != 200:
            code = process.poll()
            if code is not None:
                process.kill()
                if self._stopping.is_set():
                    raise EngineStartError(f"inference server {self.address.index} was stopped while it started")
                raise self._start_error(process, describe_exit(code), ended=True)
            if time.monotonic() > deadline:
                process.kill()
                seconds = self._limits.start_timeout
                raise self._start_error(
                    process, f"did not answer within {seconds:.0f} s (inference_start_timeout_seconds)", ended=False
                )
            self._stopping.wait(POLL_SECONDS)
        self._start_seconds = time.monotonic() - launched

    def _start_error(self, process: EngineProcess, what: str, *, ended: bool) -> EngineStartError:
        name = f"inference server {self.address.index} ({self.url})"
        return EngineStartError(
            self._backend.start_failure(name, what, process.log_tail(LOG_LINES), self.log_path, ended=ended)
        )

    # --- supervision ------------------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        last_answer = time.monotonic()
        next_check = last_answer
        while not self._stopping.wait(POLL_SECONDS):
            process = self._process
            assert process is not None
            code = process.poll()
            what = None if code is None else describe_exit(code)
            if code is None and time.monotonic() >= next_check:
                health, words = self._health(timeout=HEALTH_TIMEOUT_SECONDS)
                next_check = time.monotonic() + HEALTH_INTERVAL_SECONDS
                silent = time.monotonic() - last_answer
                if health == 200:
                    last_answer = time.monotonic()
                elif health == NOT_LISTENING:
                    # vLLM closes its port first when a tensor-parallel worker exits, and may then linger.
                    what = "no longer listens"
                elif health is not None:
                    what = f"answered its health check with HTTP {health}: {words or 'its engine has exited'}"
                elif silent >= self._limits.unhealthy_seconds:
                    what = f"did not answer for {silent:.0f} s"
            if what is None:
                continue
            if not self._restart(process, what):
                return
            last_answer = next_check = time.monotonic()

    def _restart(self, process: EngineProcess, what: str) -> bool:
        """Kills what is left and restarts until it works. Returns False after giving up or when asked to stop."""
        if self._stopping.is_set():
            return False
        self._error = what
        self._state = "restarting"
        try:
            process.kill()
        except InfrastructureError as error:
            self._error, self._state = f"{what}; {error}", "failed"
            return False
        while True:
            now = time.monotonic()
            self._restart_times = [t for t in self._restart_times if now - t < self._limits.restart_window_seconds]
            if len(self._restart_times) >= self._limits.max_restarts:
                self._error = f"gave up after {len(self._restart_times)} restarts: {self._error}"
                self._state = "failed"
                return False
            backoff = min(self._limits.first_backoff * 2 ** len(self._restart_times), self._limits.longest_backoff)
            self._restart_times.append(now)
            if self._stopping.wait(backoff):
                return False
            try:
                self._start_process(restarted=True)
            except InfrastructureError as error:
                if self._stopping.is_set():
                    return False
                self._error = str(error)
                continue
            except Exception as error:
                self._error = f"cannot be restarted: {error!r}"
                self._state = "failed"
                return False
            self._state = "ready"
            return True

    def _health(self, timeout: float) -> tuple[int | None, str]:
        """Returns the health route's status and error message.

        The status is `NOT_LISTENING` for a closed port, and None without a response. vLLM responds with 503 when its
        engine has exited, `engine_health` when the engine hangs.
        """
        try:
            status, body = self._get(HEALTH_ROUTE, timeout)
        except ConnectionRefusedError:
            return NOT_LISTENING, ""
        except (OSError, http.client.HTTPException):
            return None, ""
        return status, "" if status == 200 else error_message(body)

    def _get(self, route: str, timeout: float) -> tuple[int, bytes]:
        """Returns status and body of a route. Raises `OSError` or `HTTPException` without a response."""
        host = LOOPBACK if self.address.host in WILDCARD_HOSTS else self.address.host
        connection = http.client.HTTPConnection(host, self.address.port, timeout=timeout)
        try:
            connection.request("GET", route, headers={"Authorization": f"Bearer {self.address.secret}"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def advertised_host(host: str, node_address: str | None = None) -> str:
    """Returns the address at which other machines reach the server.

    If it listens on all interfaces, that is the node's address. If that is unknown or loopback, it is the address of
    the outward interface.
    """
    if host not in WILDCARD_HOSTS:
        return host
    if node_address is not None and node_address != LOOPBACK:
        return node_address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))  # a documentation address: picks the outward interface, sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return LOOPBACK
