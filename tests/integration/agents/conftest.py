"""Rollouts of agents over the real environments, tokenizer and endpoint, with a scripted policy."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tests.integration.environments.conftest import save_byte_tokenizer
from tests.unit.rollout.fakes import FakeLanes, settings

from telescope.environments.base import Environment, Sample
from telescope.environments.registry import complete_class
from telescope.environments.types import EnvironmentSpec
from telescope.inference.base import GenerateRequest, Generation
from telescope.rollout.check import ScriptedEngine
from telescope.rollout.environments import LoadedEnvironments
from telescope.rollout.loaded_environment import LoadedEnvironment
from telescope.rollout.rendering import Renderer, RendererSpec
from telescope.rollout.sample import Rollout, RolloutTask
from telescope.rollout.trajectory import Trajectory


def make(name: str, *, environments_path: Any, cls: type[Environment], **kwargs: Any) -> Environment:
    """Makes an environment of a class of a test."""
    cls = complete_class(cls, name)
    environment = cls(**kwargs)
    environment._name = name
    return environment


class Agent(Environment):
    """The base of agents in these tests: a dataset of one question."""

    def load_dataset(self, num_samples: int = -1) -> list[Sample]:
        return [Sample("What is 2 + 2?", "4")]


class Policy(ScriptedEngine):
    """A scripted engine: `given` are texts, or a function from the prompt's text to one. Errors are raised."""

    def __init__(self, renderer: Renderer, given: Iterable[Any] | Callable[[str], Any]) -> None:
        super().__init__(renderer)
        texts = iter(() if callable(given) else given)
        self.next_answer = given if callable(given) else lambda _: next(texts)
        self.prompts: list[str] = []
        self.requests: list[GenerateRequest] = []
        self.before: Callable[[], Any] | None = None
        """Awaited before each answer."""

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        self.prompts.append(self.renderer.decode(request.prompt_token_ids, cut_end_token=False))
        answer = self.next_answer(self.prompts[-1])
        if self.before is not None:
            await self.before()
        if isinstance(answer, BaseException):
            raise answer
        self.answers = [answer]
        generation = await super().generate(request)
        generation.logprobs_N -= np.arange(1, len(generation.token_ids_N) + 1, dtype=np.float32) / 100
        return generation


@dataclass
class Bench:
    """Environments of one agent, and its policy. `run` runs one sample to its end."""

    environments: LoadedEnvironments
    policy: Policy
    slots: FakeLanes = field(default_factory=FakeLanes)

    @property
    def environment(self) -> Any:
        (loaded,) = self.environments.by_key.values()
        return loaded.environment

    def rollout(self, **changes: Any) -> Rollout:
        prompt = self.environments.by_key["agent"].prepare(0)
        return Rollout(
            RolloutTask("5-0", 5, 0, "agent", "agent", 0, prompt.token_ids, (7, 5, 0)),
            slot_key=5, slots=self.slots, engine_of=lambda server: self.policy, environments=self.environments,
            settings=settings(**{"max_context": 4096, "max_tokens": 512, **changes}),
        )  # fmt: skip

    async def run(self, **changes: Any) -> Trajectory:
        return await self.rollout(**changes).run()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest_asyncio.fixture
async def bench(tokenizer_folder: str) -> Any:
    """Makes a bench of an agent's class and the policy's answers; it is closed at the end of the test."""
    made: list[Bench] = []

    async def make_bench(cls: type[Environment], answers: Any, **kwargs: Any) -> Bench:
        renderer = Renderer(RendererSpec(tokenizer_folder))
        spec = EnvironmentSpec("agent", {"cls": cls, **kwargs}, factory=f"{__name__}:make")
        environments = LoadedEnvironments([LoadedEnvironment(spec, renderer, [])], timeout_seconds=20.0)
        await environments.start()
        made.append(Bench(environments, Policy(renderer, answers)))
        return made[-1]

    yield make_bench
    for each in made:
        await each.environments.close()
