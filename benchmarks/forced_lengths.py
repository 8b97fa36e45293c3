"""Forces the lengths of answers: each request asks for as many tokens as its seed determines.

    python benchmarks/forced_lengths.py 1000 3500 train --config ...

runs `telescope` with the given arguments and log-normal lengths of that mean and 99th percentile. Models with random
weights write noise that ends at random, and lengths determine the load. Only `max_tokens` and `ignore_eos` of sampling
requests differ from a normal run.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

from telescope.cli.main import main as telescope
from telescope.cluster import rollout_group
from telescope.cluster.rollout_group import RolloutActor
from telescope.inference.base import GenerateRequest, Generation
from telescope.inference.client import EngineClient
from telescope.utils.process import run_and_exit

Z99 = 2.3263478740408408
"""99th percentile of the standard normal distribution."""


@dataclass(frozen=True)
class Lengths:
    """A log-normal distribution of answer lengths in tokens."""

    mean: float
    p99: float

    def __post_init__(self) -> None:
        if not 1 < self.p99 / self.mean < math.exp(Z99**2 / 2):
            raise ValueError(f"no log-normal distribution has the mean {self.mean:g} and the p99 {self.p99:g}")

    @property
    def sigma(self) -> float:
        """From mean = exp(mu + sigma^2 / 2) and p99 = exp(mu + z sigma), the smaller of the two solutions."""
        return Z99 - math.sqrt(Z99**2 - 2 * math.log(self.p99 / self.mean))

    def of(self, seed: int) -> int:
        """Returns the length of the answer to a request with this seed."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        return max(1, round(random.Random(seed).lognormvariate(mu, self.sigma)))

    def force(self, request: GenerateRequest) -> GenerateRequest:
        """Returns the request with its forced length, at most its own `max_tokens`."""
        assert request.seed is not None
        return replace(request, max_tokens=min(request.max_tokens, self.of(request.seed)), ignore_eos=True)


@contextmanager
def forced(lengths: Lengths) -> Iterator[None]:
    """Makes every `EngineClient` of this process ask for these lengths."""
    generate = EngineClient.generate

    async def generate_forced(self: EngineClient, request: GenerateRequest) -> Generation:
        return await generate(self, lengths.force(request))

    with patch.object(EngineClient, "generate", generate_forced):
        yield


def actor_with(lengths: Lengths) -> type[RolloutActor]:
    """Returns the class of rollout workers whose processes ask for these lengths."""

    class Forced(RolloutActor):
        def connect(self, servers: list[tuple[str, str]], first_version: int) -> None:
            self._forced = forced(lengths)
            self._forced.__enter__()
            super().connect(servers, first_version)

    return Forced


def main(argv: list[str]) -> int:
    mean, p99, *arguments = argv
    with patch.object(rollout_group, "RolloutActor", actor_with(Lengths(float(mean), float(p99)))):
        return telescope(arguments)


if __name__ == "__main__":
    run_and_exit(lambda: main(sys.argv[1:]))
