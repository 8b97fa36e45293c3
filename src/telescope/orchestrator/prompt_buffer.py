"""Buffers rendered and tokenized prompts ahead of use.

Owns the buffer and the run's position in the prompt sequence. Prompts leave in the order of their numbers, except that
a requeued prompt comes first.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass

from telescope.config import TelescopeConfig
from telescope.environments.types import PreparedPrompt
from telescope.errors import EnvironmentFailure, RunError, UserError
from telescope.orchestrator.budget import ErrorBudget
from telescope.orchestrator.prompt_sampler import PromptSampler, SampledPrompt, SamplerPosition
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.supervision import ChangeNotifier
from telescope.rollout.pool import RolloutPool
from telescope.utils.text import single_line

logger = logging.getLogger(__name__)

PREPARE_AT_ONCE = 8  # prompts rendered concurrently: enough to keep every environment worker busy

NUM_MEASURED = 128
"""Prompts of each environment that are measured before the start. They estimate a share of 30 % to within 4 points."""

MAX_UNUSABLE_PROMPTS = 10_000  # consecutive unusable prompts after which the run stops


@dataclass(eq=False)
class PromptBuffer:
    """Buffers up to `prompt_prefetch_buffer_size` prompts; `fill` keeps it full. `max_context` is in tokens."""

    config: TelescopeConfig
    source: RolloutPool
    environment_keys: list[str]
    sampler: PromptSampler
    held_out_uids: frozenset[str]
    start: SamplerPosition
    _: KW_ONLY
    max_context: int
    budget: ErrorBudget
    notifier: ChangeNotifier
    status: RunStatus

    def __post_init__(self) -> None:
        self._size = self.config.prompt_prefetch_buffer_size if self.config.enable_prompt_prefetch else 1
        self._ready: deque[tuple[SampledPrompt, PreparedPrompt]] = deque()
        self._next_draw = self.start.next_draw
        self._unfinished = deque(sorted(self.start.unfinished))
        self._preparing: list[int] = []

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def next_key(self) -> str:
        """Key of the next prompt's environment. The buffer must not be empty."""
        return self.environment_keys[self._ready[0][0].environment]

    def take(self) -> tuple[SampledPrompt, PreparedPrompt]:
        """Removes and returns the next prompt. The buffer must not be empty."""
        return self._ready.popleft()

    def requeue(self, sampled: SampledPrompt, prompt: PreparedPrompt) -> None:
        """Puts a prompt back before all others."""
        self._ready.appendleft((sampled, prompt))

    def position(self, open_prompts: Iterable[int]) -> SamplerPosition:
        """Returns the position of the run. `open_prompts` have no outcome yet."""
        buffered = {sampled.n for sampled, _ in self._ready}
        unfinished = {*open_prompts, *buffered, *self._preparing, *self._unfinished}
        return SamplerPosition(self._next_draw, tuple(sorted(unfinished)))

    async def fill(self) -> None:
        """Keeps the buffer full of tokenized prompts, in order. Raises RunError when none or too few are usable."""
        num_unusable = 0
        while True:
            await self.notifier.wait_until(
                lambda: len(self._ready) < self._size, "prompts", "free space in the prompt buffer"
            )
            num_wanted = min(PREPARE_AT_ONCE, self._size - len(self._ready))
            self._preparing = [self._next_number() for _ in range(num_wanted)]
            sampled_prompts = [self.sampler.prompt(n) for n in self._preparing]
            self.status.components["prompts"] = f"preparing prompt {sampled_prompts[0].n}"
            prepared = await asyncio.gather(*(self._prepare(sampled) for sampled in sampled_prompts))
            self._preparing = []
            num_unusable = 0 if any(prepared) else num_unusable + num_wanted
            if num_unusable >= MAX_UNUSABLE_PROMPTS:
                raise RunError(
                    f"{num_unusable} consecutive prompts cannot be trained on: every item is held out for an eval "
                    f"(evals: separate_eval_samples, num_samples) or too long ({context_field(self.config)}). The "
                    "run's log lists those that are too long."
                )
            self._ready.extend(
                (sampled, prompt)
                for sampled, prompt in zip(sampled_prompts, prepared, strict=True)
                if prompt is not None
            )
            self.notifier.notify()

    def _next_number(self) -> int:
        """Returns the number of the next prompt. Unfinished prompts of an earlier attempt come first."""
        if self._unfinished:
            return self._unfinished.popleft()
        self._next_draw += 1
        return self._next_draw - 1

    async def _prepare(self, sampled: SampledPrompt) -> PreparedPrompt | None:
        """Renders and tokenizes one prompt. Returns None when it is held out, too long, or its environment failed."""
        name = self.environment_keys[sampled.environment]
        try:
            prompt = await self.source.prepare(name, sampled.index)
        except EnvironmentFailure as error:
            logger.warning("prompt %d (%s, item %d) cannot be rendered: %s", sampled.n, name, sampled.index, error)
            self.budget.failed("prompts", name, sampled.index, str(error))
            return None
        self.budget.succeeded("prompts", name)
        if prompt.sample_uid in self.held_out_uids:
            return None
        if len(prompt.token_ids) >= self.max_context:
            logger.info(
                "prompt %d (%s, item %d) has %d tokens and is left out: %s allows %d",
                sampled.n, name, sampled.index, len(prompt.token_ids), context_field(self.config), self.max_context,
            )  # fmt: skip
            self.status.num_long_prompts += 1
            return None
        return prompt


async def measure_prompts(config: TelescopeConfig, source: RolloutPool, keys: list[str], max_context: int) -> list[str]:
    """Returns sentences about prompts that cannot be rendered or leave no space for a completion, so are left out.

    Measures items spread over the dataset. Raises `UserError` for an environment whose prompts are all too long.
    """
    news = []
    for key in keys:
        size = (await source.describe(key)).num_samples
        items = range(0, size, max(-(-size // NUM_MEASURED), 1))
        found = await asyncio.gather(*(_length(source, key, item) for item in items))
        lengths = [length for length in found if isinstance(length, int)]
        if failures := [failure for failure in found if isinstance(failure, EnvironmentFailure)]:
            first = single_line(str(failures[0]))
            all_of = f"{len(failures)} of {len(found)} measured prompts of {key}"
            news.append(f"{all_of} cannot be rendered and are left out. The first one: {first}")
        num_long = sum(length >= max_context for length in lengths)
        if not num_long:
            continue
        measured = "the" if len(items) == size else f"{len(lengths)} measured"
        what = (
            f"{num_long / len(lengths):.0%} of {measured} prompts of {key} leave no space for an answer: "
            f"{context_field(config)} allows {max_context} tokens, and the longest has {max(lengths)}"
        )
        if num_long == len(lengths):
            raise UserError(f"{what}. Raise {context_field(config)}, or choose shorter prompts.")
        news.append(f"{what}. They are left out; raise {context_field(config)} to train on them")
    return news


async def _length(source: RolloutPool, key: str, item: int) -> int | EnvironmentFailure:
    """Returns the number of tokens of a prompt, or its failure, which does not count against the budget here."""
    try:
        return len((await source.prepare(key, item)).token_ids)
    except EnvironmentFailure as failure:
        return failure


def context_field(config: TelescopeConfig) -> str:
    """Returns the name of the field, or both, that limits prompt and completion (`SamplingSettings.max_context`)."""
    if config.overlong_samples == "truncate" or config.max_model_len < config.seq_len:
        return "max_model_len"
    return "seq_len" if config.seq_len < config.max_model_len else "max_model_len (and seq_len)"
