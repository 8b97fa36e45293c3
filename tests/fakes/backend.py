"""The fake engine without HTTP: the second implementation of `EngineBackend`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tests.fakes.engine import AnswerFunction, FakeEngine, FakeEngineSettings

from telescope.config import TelescopeConfig
from telescope.errors import InfrastructureError
from telescope.inference.auth import SECRET_VARIABLE
from telescope.inference.base import Address, EngineBackend, GenerateRequest, Generation, LaunchCommand
from telescope.inference.vllm.policy_version import REQUIRE_UPDATE_VARIABLE
from telescope.weights.plan import InitInfo, UpdateInfo, make_update

EXITED = "exited"
NO_WEIGHTS = make_update([], version=0, dtype="float32")
"""An update of no tensors, which the fake engines accept."""


class FakeBackend:
    """One fake engine as a server. Its updates only count versions."""

    name: ClassVar[str] = "the fake engine"

    def __init__(
        self, index: int = 0, settings: FakeEngineSettings | None = None, answer: AnswerFunction | None = None
    ) -> None:
        self.base_url = f"fake://{index}"
        self.server_index = index
        self.loaded_version = self.initial_version = 0
        self.engine = FakeEngine(settings or FakeEngineSettings(), answer)
        self.engine.label = "0"

    def restart(self) -> None:
        """Ends all requests, as an exit does. The new process has the weights of `loaded_version`."""
        for request in list(self.engine.requests.values()):
            if request.timer is not None:
                request.timer.cancel()
            if not request.done.done():
                request.done.set_result(EXITED)
        self.engine = FakeEngine(self.engine.settings, self.engine._answer)
        self.engine.label = str(self.loaded_version)

    # --- the process ------------------------------------------------------------------------------------------------

    @staticmethod
    def launch(
        config: TelescopeConfig, address: Address, *, model: str, directory: Path, earlier_log: Sequence[str] | None
    ) -> LaunchCommand:
        arguments = [sys.executable, "-m", "tests.fakes.server", "--host", address.host, "--port", str(address.port)]
        must_update = {} if earlier_log is None else {REQUIRE_UPDATE_VARIABLE: "1"}
        return LaunchCommand(arguments, {SECRET_VARIABLE: address.secret, **must_update})

    @staticmethod
    def hang_timeout(config: TelescopeConfig) -> float:
        return 10.0

    @staticmethod
    def progress(log: Sequence[str], last: str = "starting") -> str:
        return log[-1] if log else last

    @staticmethod
    def start_failure(name: str, what: str, log: Sequence[str], log_path: Path, *, ended: bool) -> str:
        return f"{name} {what}"

    @classmethod
    def connect(cls, config: TelescopeConfig, url: str, secret: str, index: int) -> EngineBackend:
        return cls(index)

    # --- a running server -------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> Generation:
        engine, ids = self.engine, request.request_id
        assert ids not in engine.salts, "a request id is never used twice"
        running = engine.submit(ids, request.prompt_token_ids, request.max_tokens, request.seed, request.priority, None)
        try:
            reason = await running.done
        finally:
            engine.abort([ids])
        if reason == EXITED:
            raise InfrastructureError(f"server {self.server_index} exited")
        count = running.num_tokens
        starts = [*running.versions, ("", count)]
        spans = [
            (int(label), min(start, count), min(end, count))
            for (label, start), (_, end) in itertools.pairwise(starts)
            if min(start, count) < min(end, count)
        ]
        tokens = np.array((running.answer or [1] * count)[:count], dtype=np.int32)
        return Generation(tokens, np.full(count, -0.5, np.float32), reason, spans)

    async def abort(self, request_ids: list[str]) -> None:
        self.engine.abort(request_ids)

    async def health(self, *, within: float = 10.0) -> bool:
        return True

    async def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)

    async def pause(self, *, drop_caches: bool = False) -> None:
        self.engine.pause("keep")

    async def resume(self) -> None:
        self.engine.resume()

    async def init_weight_transfer(self, info: InitInfo) -> None:
        return

    async def transfer_mode(self) -> str | None:
        return "no weights are loaded"

    async def begin_background(self, update: UpdateInfo) -> None:
        return

    async def start_update(self) -> None:
        return

    async def update_weights(self, update: UpdateInfo) -> None:
        return

    async def finish_update(self, version: int) -> None:
        self.engine.finish_update(str(version))
        self.loaded_version = version

    async def load_adapter(self, folder: Path) -> None:
        return

    async def fingerprints(self, initial: UpdateInfo | None = None) -> list[dict[str, Any]]:
        return []

    async def close(self) -> None:
        return
