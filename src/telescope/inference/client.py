"""Telescope's view of vLLM: the client of one server, and how servers are started.

Owns deadlines and the classification of failures. Does not own request slots, retries or versions. Formats are in
`adapter`, the transport is aiohttp.

Invariants:
- A server that is gone, exiting, responding with 5xx or past its deadline is an `InfrastructureError`.
- A 4xx response is a bug of ours (`EngineRequestError`, with the server's message): retrying would hide it.
- After `abort(ids)` returns, `generate` of each id ends within `abort_grace` seconds with finish reason `abort`. If the
  server does not end it, closing the connection does, which aborts it in the engine too.
"""

from __future__ import annotations

import asyncio
import json
import math
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import msgspec
import numpy as np

from telescope.config import TelescopeConfig
from telescope.errors import InfrastructureError
from telescope.inference.base import HEALTH_ROUTE, Address, GenerateRequest, Generation, LaunchCommand, error_message
from telescope.inference.vllm import adapter as wire
from telescope.inference.vllm.launch import hang_timeout, start_command
from telescope.inference.vllm.start_log import FIRST_STAGE, start_failure, start_stage
from telescope.weights.plan import InitInfo, UpdateInfo

KEEP_ALIVE_SECONDS = 60.0
"""Idle time after which a connection is not reused. The server keeps it much longer (`launch`), so no request meets a
connection that the server is closing."""

ABORT_GRACE_SECONDS = 5.0
CONTROL_TIMEOUT_SECONDS = 60.0
CONNECT_TIMEOUT_SECONDS = 30.0
MAX_HEADER_BYTES = 2**17
"""A request that ran during many weight syncs has many version spans in a header."""


class EngineRequestError(RuntimeError):
    """The engine refused a request (4xx). The message is the server's own explanation."""


@dataclass(eq=False)
class EngineClient:
    """`EngineBackend` of one vLLM server. Use it from one event loop.

    `secret` is sent with every request. `with_priority`: the server runs the `priority` policy. `initial_version` is
    the policy version of the weights that the server starts with. `num_workers` is the server's tensor-parallel size.
    All times are in seconds.
    """

    base_url: str
    secret: InitVar[str]
    server_index: int = 0
    _: KW_ONLY
    request_timeout: float = 1800.0
    update_timeout: float = 600.0
    abort_grace: float = ABORT_GRACE_SECONDS
    with_priority: bool = True
    initial_version: int = 0
    num_workers: int = 1

    name: ClassVar[str] = "vLLM"

    def __post_init__(self, secret: str) -> None:
        self.base_url = self.base_url.rstrip("/")
        self.loaded_version = self.initial_version
        """Version of the newest finished update. A request sent now is sampled by it or a newer one."""
        self._headers = {
            "Authorization": f"Bearer {secret}",
            "Content-Type": "application/json",
            "Accept": f"{wire.PACKED_TYPE}, application/json",
        }
        self._in_flight: dict[str, asyncio.Timeout] = {}
        self._aborted: set[str] = set()
        self._closed = False
        raise_file_limit()

    @classmethod
    def connect(cls, config: TelescopeConfig, url: str, secret: str, index: int) -> EngineClient:
        return cls(
            url,
            secret,
            index,
            request_timeout=config.request_timeout_seconds,
            update_timeout=config.weight_sync_timeout_seconds,
            with_priority=config.vllm_scheduling_policy == "priority",
            num_workers=config.inference_tensor_parallel_size,
        )

    @staticmethod
    def launch(
        config: TelescopeConfig, address: Address, *, model: str, directory: Path, earlier_log: Sequence[str] | None
    ) -> LaunchCommand:
        return start_command(config, address, model=model, directory=directory, earlier_log=earlier_log)

    @staticmethod
    def hang_timeout(config: TelescopeConfig) -> float:
        return hang_timeout(config)

    @staticmethod
    def progress(log: Sequence[str], last: str = FIRST_STAGE) -> str:
        return start_stage(log, last)

    @staticmethod
    def start_failure(name: str, what: str, log: Sequence[str], log_path: Path, *, ended: bool) -> str:
        return start_failure(name, what, log, log_path, ended=ended)

    # --- sampling ---------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Generation:
        """Samples one turn: N tokens with their logprobs and versions.

        Raises `InfrastructureError` when the server fails, exits or exceeds `request_timeout`, and `EngineRequestError`
        when it refuses the request. Cancelling the caller closes the connection, which aborts the request in the
        engine.
        """
        request_id = request.request_id
        if request_id in self._in_flight:
            raise EngineRequestError(f"request id {request_id} is already in flight on server {self.server_index}")
        body = wire.encode_generate(request, with_priority=self.with_priority)
        try:
            async with asyncio.timeout(self.request_timeout) as deadline:
                self._in_flight[request_id] = deadline
                headers, answer = await self._exchange(
                    self._generating, "POST", wire.GENERATE_ROUTE, body, f"request {request_id}"
                )
        except TimeoutError as error:
            if request_id in self._aborted:
                empty = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32)
                return Generation(*empty, "abort", [])
            raise InfrastructureError(
                f"{self._name}: request {request_id} ({len(request.prompt_token_ids)} prompt tokens, max_tokens "
                f"{request.max_tokens}) had no answer within {self.request_timeout:.0f} s"
            ) from error
        finally:
            self._in_flight.pop(request_id, None)
            self._aborted.discard(request_id)
        if headers.get("Content-Type") == wire.PACKED_TYPE:
            labelled = wire.unpack_answer(answer)
        else:
            labelled = wire.read_generate(answer, spans_header=headers.get(wire.VERSION_SPANS_HEADER))
        return wire.resolve_versions(labelled, initial_version=self.initial_version)

    async def abort(self, request_ids: list[str]) -> None:
        if not request_ids:
            return
        now = asyncio.get_running_loop().time()
        for request_id in request_ids:
            deadline = self._in_flight.get(request_id)
            if deadline is None:
                continue
            self._aborted.add(request_id)
            when = deadline.when()
            if when is None or when > now + self.abort_grace:
                deadline.reschedule(now + self.abort_grace)
        await self._control("POST", wire.ABORT_ROUTE, wire.encode_abort(request_ids))

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        body = wire.encode_prompt_logprobs(token_ids, f"probe-{time.monotonic_ns()}")
        try:
            answer = await self._control("POST", wire.GENERATE_ROUTE, body)
        except EngineRequestError as error:
            if wire.NOT_FINITE in str(error):
                return [math.nan] * (len(token_ids) - 1)
            raise
        return wire.parse_prompt_logprobs(answer, token_ids)

    # --- weights ----------------------------------------------------------------------------------------------------

    async def init_weight_transfer(self, info: InitInfo) -> None:
        await self._update(wire.INIT_TRANSFER_ROUTE, {"init_info": asdict(info)})

    async def transfer_mode(self) -> str | None:
        modes = await self.call_worker("telescope_transfer_mode")
        reasons = [mode.get("reason") or "no reason given" for mode in modes if not mode.get("background")]
        return None if modes and not reasons else "; ".join(dict.fromkeys(reasons))

    async def begin_background(self, update: UpdateInfo) -> None:
        await self.call_worker("telescope_begin_background", [json.dumps(update.to_dict())])

    async def fingerprints(self, initial: UpdateInfo | None = None) -> list[dict[str, Any]]:
        return await self.call_worker("telescope_fingerprints", [json.dumps(initial.to_dict())] if initial else None)

    async def pause(self, *, drop_caches: bool = False) -> None:
        # `drop_caches` (`inflight_kv: recompute`) drops every KV block, those of frozen requests included, so that they
        # are computed again under the next weights. vLLM does so by default, so the flag is always sent.
        route = f"{wire.PAUSE_ROUTE}?mode=keep&clear_cache={'true' if drop_caches else 'false'}"
        await self._control("POST", route)

    async def resume(self) -> None:
        await self._control("POST", wire.RESUME_ROUTE)

    async def start_update(self) -> None:
        await self._update(wire.START_UPDATE_ROUTE)

    async def update_weights(self, update: UpdateInfo) -> None:
        await self._update(wire.UPDATE_WEIGHTS_ROUTE, {"update_info": update.to_dict()})

    async def finish_update(self, version: int) -> None:
        await self._update(wire.FINISH_UPDATE_ROUTE, {"weight_version": str(version)})
        self.loaded_version = version

    async def load_adapter(self, folder: Path) -> None:
        body = {"lora_name": wire.ADAPTER_NAME, "lora_path": str(folder), "load_inplace": True}
        try:
            await self._control("POST", wire.LOAD_ADAPTER_ROUTE, body, within=self.update_timeout)
        except EngineRequestError as error:
            # The server cannot see the folder, or vLLM cannot load the adapter.
            raise InfrastructureError(str(error)) from error

    async def call_worker(self, method: str, args: list[str] | None = None) -> list[Any]:
        """Runs a method of the worker extension on every worker. Returns one result per worker.

        vLLM passes dicts and lists through and turns every other result into a string.
        """
        body = {"method": method, "args": args or []}
        answer = await self._control("POST", wire.COLLECTIVE_RPC_ROUTE, body, within=self.update_timeout)
        return list(msgspec.json.decode(answer)["results"]) if answer else []

    async def _update(self, route: str, body: dict[str, Any] | None = None) -> None:
        """Calls a route of an update. Also raises `InfrastructureError` if only some of the workers fail."""
        await self._control("POST", route, body, within=self.update_timeout)
        if self.num_workers == 1:
            return
        answers = await self.call_worker("telescope_failure")
        failures = [f"worker {rank}: {each['failure']}" for rank, each in enumerate(answers) if each.get("failure")]
        if failures:
            raise InfrastructureError(f"inference server {self.server_index} ({self.base_url}): {'; '.join(failures)}")

    # --- state ------------------------------------------------------------------------------------------------------

    async def health(self, *, within: float = 10.0) -> bool:
        try:
            await self._control("GET", HEALTH_ROUTE, within=within)
            await self._control("GET", wire.IS_PAUSED_ROUTE, within=within)
        except InfrastructureError:
            return False
        return True

    async def close(self) -> None:
        self._closed = True
        if "_generating" in self.__dict__:
            await self._generating.close()

    # --- HTTP -------------------------------------------------------------------------------------------------------

    @cached_property
    def _generating(self) -> aiohttp.ClientSession:
        return self._session(keepalive_timeout=KEEP_ALIVE_SECONDS)

    def _session(self, **connections: Any) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            headers=self._headers,
            skip_auto_headers=("Accept-Encoding", "User-Agent"),
            connector=aiohttp.TCPConnector(limit=0, **connections),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_SECONDS),
            max_field_size=MAX_HEADER_BYTES,
        )

    @property
    def _name(self) -> str:
        return f"inference server {self.server_index} ({self.base_url})"

    async def _control(
        self, method: str, route: str, body: dict[str, Any] | bytes | None = None, *, within: float | None = None
    ) -> bytes:
        data = msgspec.json.encode(body) if isinstance(body, dict) else body
        seconds = within or CONTROL_TIMEOUT_SECONDS
        try:
            # A new connection: the server closes connections after some errors, and a sync must not fail on one
            # that is closing. Generation keeps its connections.
            async with asyncio.timeout(seconds), self._session(force_close=True) as session:
                return (await self._exchange(session, method, route, data, f"{method} {route}"))[1]
        except TimeoutError as error:
            raise InfrastructureError(f"{self._name}: {method} {route} had no answer within {seconds:.0f} s") from error

    async def _exchange(
        self, session: aiohttp.ClientSession, method: str, route: str, data: bytes | None, what: str
    ) -> tuple[Mapping[str, str], bytes]:
        """Returns headers and body of a successful response. Raises for an error response."""
        try:
            if self._closed:
                raise ConnectionError("the client is closed")
            async with session.request(method, self.base_url + route, data=data) as answer:
                status, headers, body = answer.status, answer.headers, await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            raise InfrastructureError(f"{self._name}: {what}: {type(error).__name__}: {error}") from error
        if status < 400:
            return headers, body
        message = f"{self._name}: {what}: HTTP {status}: {error_message(body)}"
        raise InfrastructureError(message) if status >= 500 else EngineRequestError(message)


def raise_file_limit() -> None:
    """Raises the limit of open sockets to the maximum. Each request in flight needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
