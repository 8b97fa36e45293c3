"""The buffer of rendered and tokenized prompts, filled ahead of use.

Owns the buffer and the run's position in the prompt sequence. Prompts leave in the order of their numbers; a requeued
prompt comes first again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from telescope.config import TelescopeConfig
from telescope.environments.worker_pool.messages import PreparedPrompt
from telescope.errors import EnvironmentFailure, RunError
from telescope.orchestrator.budget import ErrorBudget
from telescope.orchestrator.prompt_sampler import PromptSampler, SampledPrompt, SamplerPosition
from telescope.orchestrator.status import RunStatus
from telescope.orchestrator.supervision import ChangeNotifier

logger = logging.getLogger(__name__)

PREPARE_AT_ONCE = 8
"""Prompts rendered concurrently: enough to keep every environment worker busy."""

MAX_FRUITLESS_DRAWS = 10_000
"""Consecutive unusable prompts after which the run stops."""


class PromptSource(Protocol):
    """Renders prompts; implemented by the environment pool."""

    async def prepare(self, env_key: str, index: int) -> PreparedPrompt: ...


class PromptBuffer:
    """Buffers up to `prompt_prefetch_buffer_size` prompts; `fill` keeps it full. `max_context` is in tokens."""

    def __init__(
        self,
        config: TelescopeConfig,
        source: PromptSource,
        environment_keys: list[str],
        draws: PromptSampler,
        held_out_uids: frozenset[str],
        start: SamplerPosition,
        *,
        max_context: int,
        budget: ErrorBudget,
        changes: ChangeNotifier,
        status: RunStatus,
    ) -> None:
        self._config = config
        self._source = source
        self._keys = environment_keys
        self._draws = draws
        self._held_out_uids = held_out_uids
        self._max_context = max_context
        self._budget = budget
        self._changes = changes
        self._status = status
        self._size = config.prompt_prefetch_buffer_size if config.enable_prompt_prefetch else 1
        self._ready: deque[tuple[SampledPrompt, PreparedPrompt]] = deque()
        self._next_draw = start.next_draw
        self._ask_first = deque(sorted(start.unfinished))
        self._preparing: list[int] = []

    def __len__(self) -> int:
        return len(self._ready)

    def take(self) -> tuple[SampledPrompt, PreparedPrompt]:
        """Removes and returns the next prompt; the buffer must not be empty."""
        return self._ready.popleft()

    def give_back(self, draw: SampledPrompt, prompt: PreparedPrompt) -> None:
        """Requeues this prompt before all others."""
        self._ready.appendleft((draw, prompt))

    def position(self, open_draws: Iterable[int]) -> SamplerPosition:
        """Returns the position of the run, given the prompts that are opened and not settled."""
        buffered = {draw.n for draw, _ in self._ready}
        unfinished = {*open_draws, *buffered, *self._preparing, *self._ask_first}
        return SamplerPosition(self._next_draw, tuple(sorted(unfinished)))

    async def fill(self) -> None:
        """Keeps the buffer full of tokenized prompts, in order. Never returns.

        Raises RunError when no prompt is usable, or an environment exhausts its error budget.
        """
        num_fruitless = 0
        while True:
            await self._changes.wait_until(
                lambda: len(self._ready) < self._size, "prompts", "free space in the prompt buffer"
            )
            num_wanted = min(PREPARE_AT_ONCE, self._size - len(self._ready))
            self._preparing = [self._next_number() for _ in range(num_wanted)]
            draws = [self._draws.draw(n) for n in self._preparing]
            self._status.set_part("prompts", f"preparing prompt {draws[0].n}")
            prepared = await asyncio.gather(*(self._prepare(draw) for draw in draws))
            self._preparing = []
            num_fruitless = 0 if any(prepared) else num_fruitless + num_wanted
            if num_fruitless >= MAX_FRUITLESS_DRAWS:
                raise RunError(
                    f"{num_fruitless} consecutive prompts cannot be trained on: every item is held out for an eval "
                    "(evals: separate_eval_samples, num_samples) or too long (max_model_len, seq_len). The run's log "
                    "lists those that are too long."
                )
            self._ready.extend(
                (draw, prompt) for draw, prompt in zip(draws, prepared, strict=True) if prompt is not None
            )
            self._changes.notify()

    def _next_number(self) -> int:
        """Returns the number of the next prompt; unfinished ones of an earlier attempt come first."""
        if self._ask_first:
            return self._ask_first.popleft()
        self._next_draw += 1
        return self._next_draw - 1

    async def _prepare(self, draw: SampledPrompt) -> PreparedPrompt | None:
        """Renders and tokenizes one prompt. Returns None when it is held out, too long, or its environment failed."""
        name = self._config.environments[draw.environment].name
        try:
            prompt = await self._source.prepare(self._keys[draw.environment], draw.index)
        except EnvironmentFailure as error:
            logger.warning("prompt %d (%s, item %d) cannot be rendered: %s", draw.n, name, draw.index, error)
            self._budget.prompt_failed(name, draw.index, str(error))
            return None
        if prompt.sample_uid in self._held_out_uids:
            self._budget.prompt_made(name)
            return None
        if len(prompt.token_ids) >= self._max_context:
            logger.warning(
                "prompt %d (%s, item %d) has %d tokens and is skipped: max_model_len and seq_len allow %d",
                draw.n, name, draw.index, len(prompt.token_ids), self._max_context,
            )  # fmt: skip
            what = f"a prompt leaves no space for an answer in {self._max_context} tokens (max_model_len, seq_len)"
            self._budget.prompt_failed(name, draw.index, what)
            return None
        self._budget.prompt_made(name)
        return prompt
