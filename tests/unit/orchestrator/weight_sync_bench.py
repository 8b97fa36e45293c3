"""A weight sync over a trainer and engines that only log their calls."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tests.fakes.backend import FakeBackend
from tests.unit.orchestrator.fakes import config_of

from telescope.errors import InfrastructureError
from telescope.orchestrator.weight_sync import SyncReport, WeightSync
from telescope.utils.timeline import Span
from telescope.weights.plan import InitInfo, TensorMeta, UpdateInfo, to_hex

LOGPROBS = [-1.0, -2.0, -0.5]
STAGES = ["init", "pause", "start", "receive", "finish", "resume"]
BACKGROUND_STAGES = ["init", "begin", "start", "receive", "pause", "finish", "resume"]
"""`receive` then only checks that everything has arrived."""
PRINTS = {"embed": to_hex(0xAA), "lm_head": to_hex(0xBB)}


class FakeTrainer:
    """The trainer's ranks. A call without the lock of its queue fails the test."""

    def __init__(self, calls: list[Any]) -> None:
        self.queue = asyncio.Lock()
        self.version = 0
        self.num_restarts = 0
        self.num_replacements = 0
        self.connecting: asyncio.Event | None = None
        self.calls = calls
        self.send_error: BaseException | None = None
        self.engine_errors: dict[int, str] = {}
        self.sent: list[tuple[int, list[int], bool]] = []
        self.corrupted: list[str | None] = []
        self.spans: list[Span] = []

    @property
    def weights_identity(self) -> tuple[int, int]:
        return self.num_restarts, self.version

    def _called(self, *call: Any) -> None:
        assert self.queue.locked(), f"{call} was made beside the queue of rank commands"
        self.calls.append(call)

    async def weight_metadata(self) -> list[TensorMeta]:
        self._called("metadata")
        return [TensorMeta("embed", (4, 2)), TensorMeta("lm_head", (4, 2))]

    async def listen_for_engine(self, engine: int, num_workers: int) -> InitInfo:
        self._called("listen", engine)
        return InitInfo("127.0.0.1", 1, "token", num_workers + 1, "gloo", 1.0)

    async def connect_engine(self, engine: int) -> None:
        self._called("connect", engine)
        if self.connecting is not None:
            await self.connecting.wait()

    async def abort_engine(self, engine: int, reason: str) -> None:
        self._called("abort", engine)

    async def send_weights(
        self, update: UpdateInfo, engines: list[int], *, fingerprints: bool, corrupt: str | None = None
    ) -> list[Any]:
        self._called("send", tuple(engines))
        self.corrupted.append(corrupt)
        self.sent.append((update.version, engines, fingerprints))
        if self.send_error is not None:
            raise self.send_error
        await asyncio.sleep(0)
        prints = dict(PRINTS) if fingerprints else {}
        seconds = dict.fromkeys(engines, 0.25)
        return [
            SimpleNamespace(
                fingerprints=prints, errors=dict(self.engine_errors), engine_seconds=seconds, spans=self.spans
            )
        ]

    async def sequence_logprobs(self, token_ids: list[int]) -> list[float]:
        self._called("logprobs")
        return LOGPROBS


class FakeClient(FakeBackend):
    """One engine. It fails at the stage `fails_at`; `loaded` are the fingerprints that its worker reports."""

    def __init__(self, index: int, calls: list[Any]) -> None:
        super().__init__(index)
        self.calls = calls
        self.fails_at: str | None = None
        self.hangs_at: str | None = None
        self.logprobs = list(LOGPROBS)
        whole = {"exact": True, "rows": [0, 4], "columns": [0, 2]}
        self.loaded: dict[str, Any] = {
            "shapes": {name: [4, 2] for name in PRINTS},
            "tensors": {name: [{"place": name, "fingerprint": value, **whole}] for name, value in PRINTS.items()},
        }
        self.paused = False
        self.background = False

    async def _at(self, stage: str, *what: Any) -> None:
        self.calls.append((stage, self.server_index, *what))
        await asyncio.sleep(0)
        if stage == self.hangs_at:
            await asyncio.Event().wait()
        if stage == self.fails_at:
            raise InfrastructureError(f"server {self.server_index} broke at {stage}")

    async def init_weight_transfer(self, info: InitInfo) -> None:
        await self._at("init")

    async def pause(self, *, drop_caches: bool = False) -> None:
        await self._at("pause", "keep", drop_caches)
        self.paused = True

    async def start_update(self) -> None:
        await self._at("start")

    async def update_weights(self, update: UpdateInfo) -> None:
        assert self.paused or update.background
        await self._at("receive")

    async def finish_update(self, version: int) -> None:
        await self._at("finish", version)

    async def resume(self) -> None:
        await self._at("resume")
        self.paused = False

    async def transfer_mode(self) -> str | None:
        await self._at("mode")
        return None if self.background else "its layers are packed"

    async def begin_background(self, update: UpdateInfo) -> None:
        assert not self.paused and update.background
        await self._at("begin")

    async def fingerprints(self, initial: UpdateInfo | None = None) -> list[dict[str, Any]]:
        await self._at("fingerprints", *([initial] if initial else []))
        return [self.loaded]

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        await self._at("engine logprobs")
        return self.logprobs


@dataclass
class Bench:
    """A weight sync over fakes. `calls` are all calls in order."""

    num_servers: int = 2
    fields: dict[str, Any] = field(default_factory=dict)
    calls: list[Any] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)
    reports: list[SyncReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trainer = FakeTrainer(self.calls)
        self.clients = [FakeClient(index, self.calls) for index in range(self.num_servers)]
        self.up = list(range(self.num_servers))
        trainer: Any = self.trainer
        self.weights = WeightSync(
            config_of(**self.fields), trainer, self.clients, engines_up=lambda: list(self.up), on_failure=self.failed,
            on_report=self.reports.append, probe_token_ids=[1, 2, 3, 4],
        )  # fmt: skip

    def failed(self, server: int, error: InfrastructureError) -> None:
        self.failures.append((server, str(error)))
        if server in self.up:
            self.up.remove(server)

    async def step(self) -> dict[str, float]:
        self.trainer.version += 1
        async with asyncio.timeout(5):
            return await self.weights.sync()

    def of(self, server: int) -> list[str]:
        """Names of the control calls that one engine got, in order."""
        return [call[0] for call in self.calls if len(call) > 1 and call[1] == server and call[0] in BACKGROUND_STAGES]
