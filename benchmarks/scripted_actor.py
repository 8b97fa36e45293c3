"""A rollout worker whose engines are scripted: they run in the worker's own process and answer after a while."""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

import numpy as np
from measure import own_process

from telescope.cluster.rollout_group import RolloutActor
from telescope.inference.base import GenerateRequest, Generation

HEAVY = ("torch", "transformers", "vllm", "pandas", "datasets", "pyarrow", "scipy")
"""Packages that a rollout worker of the demo's environment has no use for."""


class ScriptedEngine:
    """Answers each request with `num_tokens` tokens after 0 to `2 * seconds`, as its seed decides."""

    def __init__(self, num_tokens: int, vocabulary: int, seconds: float) -> None:
        self.loaded_version = 0
        numbers = np.random.default_rng(0)
        self._ids = numbers.integers(1000, vocabulary, num_tokens, dtype=np.int32)
        self._logprobs, self._seconds = numbers.normal(size=num_tokens).astype(np.float32), seconds

    async def generate(self, request: GenerateRequest) -> Generation:
        version = self.loaded_version
        ids = np.roll(self._ids, request.seed or 0)
        await asyncio.sleep(random.Random(request.seed).uniform(0.0, 2 * self._seconds) if self._seconds else 0)
        return Generation(ids, self._logprobs.copy(), "stop", [(version, 0, len(ids))])

    async def abort(self, request_ids: list[str]) -> None:
        return


class ScriptedActor(RolloutActor):
    """The address of a scripted server is `scripted:NUM_TOKENS:VOCABULARY:SECONDS`."""

    def connect(self, servers: list[tuple[str, str]], first_version: int) -> None:
        if not servers[0][0].startswith("scripted:"):
            super().connect(servers, first_version)
            return
        _, num_tokens, vocabulary, seconds = servers[0][0].split(":")
        self._engines[:] = [ScriptedEngine(int(num_tokens), int(vocabulary), float(seconds)) for _ in servers]

    def process(self) -> dict[str, Any]:
        """Returns what it uses, and what it should not have imported."""
        return {**own_process(), "heavy": sorted(sys.modules.keys() & set(HEAVY))}
