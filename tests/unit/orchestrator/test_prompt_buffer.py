"""The buffer of prompts: how far ahead it works, in which order prompts leave, and which never enter."""

import asyncio
import re
from typing import Any

import pytest
from tests.unit.orchestrator.fakes import config_of

from telescope.environments.types import EnvironmentInfo, PreparedPrompt
from telescope.errors import EnvironmentFailure, RunError, UserError
from telescope.orchestrator.budget import MIN_FAILURES, ErrorBudget
from telescope.orchestrator.prompt_buffer import NUM_MEASURED, PREPARE_AT_ONCE, PromptBuffer, measure_prompts
from telescope.orchestrator.prompt_sampler import PromptSampler, SamplerPosition
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.supervision import ChangeNotifier

NUM_ITEMS = 40


FIRST_POSITION = SamplerPosition()


class Source:
    """Renders item i as [i] * (i + 1) by default."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.num_at_once = self.most_at_once = 0
        self.broken: set[int] = set()
        self.num_items = NUM_ITEMS

    async def describe(self, env_key: str) -> EnvironmentInfo:
        return EnvironmentInfo(env_key, self.num_items, is_multi_turn=False)

    async def prepare(self, env_key: str, index: int) -> PreparedPrompt:
        self.num_asked += 1
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        await asyncio.sleep(0)
        self.num_at_once -= 1
        if index in self.broken:
            raise EnvironmentFailure("no such item")
        return PreparedPrompt([index] * (index + 1), f"item {index}", [], f"uid {index}")


class Filling:
    def __init__(
        self,
        *,
        start: SamplerPosition = FIRST_POSITION,
        held_out: frozenset[str] = frozenset(),
        context: int = 1000,
        budget: float = 1.0,
        **fields: Any,
    ) -> None:
        self.source = Source()
        self.config = config_of(environment_error_budget=budget, **fields)
        status = self.status = RunStatus("test", 1)
        self.changes = ChangeNotifier(status)
        self.sampler = PromptSampler(self.config.seed, [NUM_ITEMS], [1.0], [0])
        self.buffer = PromptBuffer(
            self.config, self.source, ["arithmetic"], self.sampler, held_out, start,
            max_context=context, budget=ErrorBudget(budget), notifier=self.changes, status=status,
        )  # fmt: skip
        self.task = asyncio.create_task(self.buffer.fill())

    async def settled(self) -> None:
        before = -1
        while before != self.source.num_asked or self.source.num_at_once:
            before = self.source.num_asked
            for _ in range(20):
                await asyncio.sleep(0)

    async def take(self, count: int) -> list[int]:
        numbers = []
        for _ in range(count):
            await self.settled()
            numbers.append(self.buffer.take()[0].n)
            self.changes.notify()
        await self.settled()
        return numbers

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def test_the_buffer_holds_its_configured_size_and_no_more() -> None:
    filling = Filling(prompt_prefetch_buffer_size=20)
    await filling.settled()
    assert len(filling.buffer) == 20
    assert filling.source.most_at_once == PREPARE_AT_ONCE
    await filling.take(3)
    assert (len(filling.buffer), filling.source.num_asked) == (20, 23)
    await filling.end()


async def test_without_prefetch_one_prompt_at_a_time_is_prepared() -> None:
    filling = Filling(prompt_prefetch_buffer_size=20, enable_prompt_prefetch=False)
    await filling.settled()
    assert (len(filling.buffer), filling.source.num_asked, filling.source.most_at_once) == (1, 1, 1)
    assert await filling.take(4) == [0, 1, 2, 3]
    assert filling.source.most_at_once == 1
    await filling.end()


@pytest.mark.parametrize("size", [1, 5, 24])
async def test_prompts_leave_in_the_order_of_their_numbers(size: int) -> None:
    filling = Filling(prompt_prefetch_buffer_size=size)
    assert await filling.take(30) == list(range(30))
    await filling.end()


async def test_unfinished_prompts_of_an_earlier_attempt_come_first_and_so_does_a_requeued_one() -> None:
    filling = Filling(start=SamplerPosition(10, (7, 3)), prompt_prefetch_buffer_size=3)
    await filling.settled()
    assert filling.buffer.position([]) == SamplerPosition(11, (3, 7, 10))
    filling.buffer.requeue(*filling.buffer.take())
    assert await filling.take(4) == [3, 7, 10, 11]
    await filling.end()


async def test_held_out_long_or_broken_prompts_never_enter() -> None:
    filling = Filling(held_out=frozenset({"uid 2", "uid 5"}), context=31, prompt_prefetch_buffer_size=4)
    filling.source.broken = {8}
    items = [filling.sampler.prompt(n).index for n in await filling.take(20)]
    assert not {2, 5, 8} & set(items)
    assert max(items) < 30, "item i has i + 1 tokens, and an answer needs one"
    await filling.end()


async def test_prompts_that_mostly_fail_end_the_run_before_any_sample() -> None:
    filling = Filling(budget=0.2, prompt_prefetch_buffer_size=NUM_ITEMS)
    filling.source.broken = set(range(NUM_ITEMS))
    with pytest.raises(RunError, match=r"failed 16 of its last 16 prompts.*16 x no such item, last with item"):
        await asyncio.wait_for(filling.task, 60)


async def test_prompts_that_are_too_long_are_left_out_whatever_their_share() -> None:
    filling = Filling(budget=0.0, context=5, prompt_prefetch_buffer_size=NUM_ITEMS)
    items = [filling.sampler.prompt(n).index for n in await filling.take(60)]
    assert set(items) == {0, 1, 2, 3}, "item i has i + 1 tokens, and an answer needs one"
    assert filling.status.num_long_prompts > 36 > MIN_FAILURES
    await filling.end()


@pytest.mark.parametrize(("fields", "context", "line"), [
    ({"max_model_len": 29, "seq_len": 60}, 29, "30% of the prompts of arithmetic leave no space for an answer: "
     "max_model_len allows 29 tokens, and the longest has 40. They are left out; raise max_model_len"),
    ({"max_model_len": 60, "seq_len": 40}, 40, "2% of the prompts of arithmetic leave no space for an answer: "
     "seq_len allows 40 tokens, and the longest has 40. They are left out; raise seq_len"),
    ({"max_model_len": 60, "seq_len": 60}, 60, None),
])  # fmt: skip
async def test_the_share_of_long_prompts_is_said_before_the_start(fields: Any, context: int, line: str | None) -> None:
    config = config_of(**fields, max_tokens=8)
    news = await measure_prompts(config, Source(), ["arithmetic"], context)  # type: ignore[arg-type]
    assert [one.startswith(line) for one in news if line] == [True] * (line is not None)
    assert len(news) == (line is not None)


async def test_prompts_of_a_large_dataset_are_measured_in_part_and_broken_ones_are_no_lengths() -> None:
    source = Source()
    source.num_items, source.broken = 12_000, set(range(100))
    broken, line = await measure_prompts(config_of(), source, ["arithmetic"], 6_000)  # type: ignore[arg-type]
    assert broken.endswith("prompts of arithmetic cannot be rendered and are left out. The first one: no such item")
    assert re.match(r"51% of 126 measured prompts of arithmetic leave no space", line)
    assert source.num_asked <= NUM_MEASURED


async def test_an_environment_whose_prompts_are_all_too_long_is_refused_before_the_start() -> None:
    with pytest.raises(UserError, match=r"100% of the prompts of arithmetic leave no space .* Raise max_model_len"):
        await measure_prompts(config_of(), Source(), ["arithmetic"], 1)  # type: ignore[arg-type]


async def test_held_out_prompts_are_no_failures_unless_every_item_is_held_out() -> None:
    filling = Filling(budget=0.0, held_out=frozenset(f"uid {i}" for i in range(20)), prompt_prefetch_buffer_size=4)
    await filling.take(10)
    assert not filling.task.done()
    await filling.end()
    filling = Filling(held_out=frozenset(f"uid {i}" for i in range(NUM_ITEMS)))
    with pytest.raises(RunError, match="every item is held out for an eval"):
        await asyncio.wait_for(filling.task, 60)
