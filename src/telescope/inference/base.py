"""The interface of an inference engine to the rest of Telescope: requests, generations, and a server's protocol.

An engine is a server process, which `server` supervises, and its client. `client.EngineClient` implements both for vLLM
with the package `vllm`; nothing outside `inference` imports that package, except checks of the installation. Another
engine implements `EngineBackend` and is chosen in `backend_of`. Its process responds to `HEALTH_ROUTE` with 200 while
it can sample and to `METRICS_ROUTE` with Prometheus text, only for requests with the run's secret as a bearer token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec
import numpy as np

if TYPE_CHECKING:
    from telescope.config import TelescopeConfig
    from telescope.weights.plan import InitInfo, UpdateInfo

HEALTH_ROUTE = "/health"
METRICS_ROUTE = "/metrics"


@dataclass(slots=True, frozen=True)
class GenerateRequest:
    """One turn to sample: token ids in, token ids out. `request_id` is unique within the run and can be aborted."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    temperature: float
    top_p: float | None = None
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the completion, in addition to those in the model's files."""
    stop: Sequence[str] = ()
    """Texts that end the completion. Its ids include them."""
    priority: int = 0
    """Lower values are served first."""
    ignore_eos: bool = False
    """Sample exactly `max_tokens` tokens (benchmarks)."""
    routes_start: int = 0
    """First prompt token whose routes are returned, if the server returns any (`router_replay`)."""
    payload: Any = None
    """Further data of the prompt, such as images. Only an engine reads it; vLLM's does not yet."""


@dataclass(slots=True, frozen=True)
class RequestId:
    """Parsed request id. `attempt` counts the tries of a sample, which makes every id unique."""

    sample_id: str
    turn: int
    attempt: int
    slot: int

    def __str__(self) -> str:
        return f"{self.sample_id}.{self.turn}.{self.attempt}@{self.slot}"


def parse_request_id(text: str) -> RequestId | None:
    """Parses `str(RequestId(...))`. Returns None for an id of another form, such as a probe's."""
    found = re.fullmatch(r"(.*)\.(\d+)\.(\d+)@(\d+)", text, re.DOTALL)
    return RequestId(found[1], int(found[2]), int(found[3]), int(found[4])) if found else None


@dataclass(slots=True)
class Generation:
    """The tokens that the engine sampled for one request.

    `version_spans` are (policy version, first token, end token) over the N sampled tokens, contiguous from 0 to N.
    """

    token_ids_N: np.ndarray
    logprobs_N: np.ndarray
    finish_reason: str
    """`stop` (end token), `length` (`max_tokens` or context exhausted) or `abort`."""
    version_spans: list[tuple[int, int, int]]
    routes_MXK: np.ndarray | None = None
    """Experts of the M tokens from the request's `routes_start` to the last sampled one, which has none, in each of X
    layers (`router_replay`)."""

    @property
    def version_N(self) -> np.ndarray:
        """Returns the policy version of each sampled token, int32 [N]."""
        versions = np.empty(len(self.token_ids_N), dtype=np.int32)
        for version, start, end in self.version_spans:
            versions[start:end] = version
        return versions


class Engine(Protocol):
    """A rollout's view of one inference server."""

    @property
    def loaded_version(self) -> int:
        """Returns the newest policy version known to be loaded. Requests sent now get it or a newer one."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples one turn. Raises `InfrastructureError` when the server fails, exits or exceeds the deadline."""

    async def abort(self, request_ids: list[str]) -> None:
        """Aborts these requests in the engine. Ignores unknown ids."""


class EngineBackend(Engine, Protocol):
    """One inference server. Every call raises `InfrastructureError` when the server fails or exceeds the deadline.

    An update in place is `pause`, `start_update`, `update_weights`, `finish_update`, `resume`. An update in the
    background is `begin_background`, then `start_update`, `update_weights`, `pause`, `finish_update`, `resume`. After a
    failure the server samples nothing until an update succeeds.
    """

    name: ClassVar[str]
    base_url: str
    server_index: int
    loaded_version: int
    initial_version: int
    """Version of the weights that the server starts with."""

    @staticmethod
    def launch(
        config: TelescopeConfig, address: Address, *, model: str, directory: Path, earlier_log: Sequence[str] | None
    ) -> LaunchCommand:
        """Returns the command of a server with the folder or hub id `model`. `directory` is for small files.

        `earlier_log` is the log of the server's first process, None for the first process itself: a restarted server
        must not sample before an update. Raises `UserError` when the installed engine cannot serve `config`.
        """

    @staticmethod
    def hang_timeout(config: TelescopeConfig) -> float:
        """Returns the seconds without progress after which a server is restarted."""

    @staticmethod
    def progress(log: Sequence[str], last: str = ...) -> str:
        """Returns the stage of a starting server from the end of its log, or `last` if the log does not show it."""

    @staticmethod
    def start_failure(name: str, what: str, log: Sequence[str], log_path: Path, *, ended: bool) -> str:
        """Returns the message for a failed start, with the likely fix. `ended`: the process exited."""

    @classmethod
    def connect(cls, config: TelescopeConfig, url: str, secret: str, index: int) -> EngineBackend:
        """Returns the client of a running server. It opens no connection before the first call."""

    async def health(self, *, within: float = 10.0) -> bool:
        """Returns whether the server responds and can sample. Raises nothing if it does not."""

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """Returns the L - 1 logprobs of a text at temperature 1. All NaN when the weights give no finite numbers."""

    async def pause(self, *, drop_caches: bool = False) -> None:
        """Stops sampling. Running requests freeze and continue after `resume`, without caches if `drop_caches`."""

    async def resume(self) -> None: ...

    async def init_weight_transfer(self, info: InitInfo) -> None:
        """Connects the server's workers to the trainer's communicator. Returns when they have joined."""

    async def transfer_mode(self) -> str | None:
        """Returns why weights come in place, None if they come in the background. Ends an unfinished update."""

    async def begin_background(self, update: UpdateInfo) -> None:
        """Starts to receive an update while requests run. Returns at once."""

    async def start_update(self) -> None: ...

    async def update_weights(self, update: UpdateInfo) -> None:
        """Receives weights. Returns when all workers have loaded them, or have received a whole background update."""

    async def finish_update(self, version: int) -> None:
        """Ends the update. Tokens of later steps have policy `version`, and use no cache of earlier weights."""

    async def load_adapter(self, folder: Path) -> None:
        """Loads a LoRA adapter, replacing the previous one. Running requests use it too. Call it inside a pause."""

    async def fingerprints(self, initial: UpdateInfo | None = None) -> list[dict[str, Any]]:
        """Returns each worker's fingerprints of the tensors of its last update, for `weights.probe.compare`.

        `initial` describes the weights that the engine has loaded by itself, as an update, in case there was no update
        yet.
        """

    async def close(self) -> None:
        """Closes the connections. Requests in flight fail with `InfrastructureError`."""


@dataclass(frozen=True, slots=True)
class TraceTarget:
    """Destination of a server's traces, with its secret."""

    url: str
    secret: str


@dataclass(frozen=True, slots=True)
class Address:
    """The address and secret of server `index`, and the destination of its request traces."""

    index: int
    host: str
    port: int
    secret: str
    traces: TraceTarget | None = None


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """Arguments of a process, and additions to its environment."""

    arguments: list[str]
    environment: dict[str, str]


def backend_of(config: TelescopeConfig) -> type[EngineBackend]:
    """Returns the engine of a run. vLLM is the only one."""
    from telescope.inference.client import EngineClient

    return EngineClient


def error_message(body: bytes) -> str:
    """Returns the readable part of a server's error response."""
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:500].decode("utf-8", "replace")
    if isinstance(decoded, dict):
        decoded = decoded.get("error", decoded.get("detail", decoded))
    return str(decoded.get("message", decoded) if isinstance(decoded, dict) else decoded)
