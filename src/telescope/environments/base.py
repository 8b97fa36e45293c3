"""Base classes of environments. An environment is a dataset of prompts and a way to score the answers.

This module has the classes that users subclass; `records` has what they exchange with Telescope. It imports nothing
heavy: writing and testing an environment needs neither torch nor Ray nor vLLM. `registry` finds environments,
`rollout.environments` runs them.

Invariants:
- All rollouts of a process share an environment object. The state of a multi-turn rollout is in its `RolloutState`.
- `get_sample(index)` returns an equal sample in every process and at every call; random datasets are seeded.
- Scoring methods may be plain or `async`. Telescope calls both outside the driver process.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from telescope.environments.arguments import known_arguments, load_arguments, refuse_near_misses, set_attributes
from telescope.environments.records import (
    ENV_NAME_KEY,
    ChatMessage,
    EvalMetricsResult,
    GoldCheck,
    RewardResult,
    RolloutState,
    Sample,
    conversation,
    eval_metrics_of,
)
from telescope.environments.records import Messages as Messages  # this and what follows is for users of this module
from telescope.environments.records import TrajectoryStep as TrajectoryStep
from telescope.environments.records import shares as shares
from telescope.errors import UserError

if TYPE_CHECKING:
    from telescope.environments.context import RolloutContext
    from telescope.environments.judge import Judge

THINKING_PREFIX = "<think>"
"""Text that `add_thinking_prefix` puts at the start of an answer."""

MAX_TURNS_REACHED = "max_turns_reached"
"""Reason of `MultiTurnEnvironment.is_done`."""


class _Default(int):
    """A number that is distinguished from an equal one by its identity."""


DEFAULT_TURNS: int = _Default(10)
"""Default of the argument `max_turns`, instead of which an attribute of the class counts."""

GOLD = "gold pasted"
"""The cheat that gives only the sample's answer. It is no cheat if answers have that form."""

logger = logging.getLogger(__name__)


class Dataset(ABC):
    """Samples that are loaded on first use. Base class of environments and evals."""

    # Class-level defaults, so that a subclass works even if its __init__ does not call super().
    _name: str = ""
    _load_arguments: dict[str, Any] | None = None
    _samples: list[Sample] | None = None
    _named_samples: list[Sample] | None = None

    @property
    def name(self) -> str:
        """Returns the display name: the registry's name unless the subclass overrides it."""
        return self._name or type(self).__name__

    @abstractmethod
    def load_dataset(self, num_samples: int = -1, **kwargs: Any) -> list[Sample] | None:
        """Returns all samples, or the first `num_samples` if not negative.

        It may return the samples, set `self._samples`, or both.
        """

    def __len__(self) -> int:
        return len(self._loaded())

    def get_sample(self, index: int) -> Sample:
        """Returns the sample at `index`, an equal one in every process and at every call.

        It is a copy, because code of a rollout that appends to its prompt would change the prompts of all others. The
        values of `metadata` are not copied.
        """
        sample = copy.copy(self._loaded()[index])
        sample.prompt, sample.metadata = copy.deepcopy(sample.prompt), dict(sample.metadata)
        return sample

    def _loaded(self) -> list[Sample]:
        if self._samples is None:
            arguments = self._load_arguments or {}
            try:
                inspect.signature(self.load_dataset).bind(**arguments)
            except (TypeError, ValueError) as error:
                raise UserError(
                    f"load_dataset of {self.name!r}: {error}. Write `def load_dataset(self, num_samples=-1)`, set "
                    "further parameters in its kwargs, or give them defaults."
                ) from None
            returned = self.load_dataset(**arguments)
            if inspect.iscoroutine(returned):
                returned.close()
                raise UserError(f"load_dataset of {self.name!r} is async: write `def load_dataset`.")
            if returned is not None:
                self._samples = list(returned)
            if self._samples is None:
                raise UserError(f"load_dataset of {self.name!r} returned no samples and did not set self._samples.")
        if self._named_samples is not self._samples:
            for sample in self._samples:
                if not isinstance(getattr(sample, "metadata", None), Mapping):
                    fix = "Return Sample(prompt=..., answer=...), with a dict as metadata if there is any."
                    raise UserError(f"load_dataset of {self.name!r} returned {sample!r:.80}, which is no Sample. {fix}")
                sample.metadata = {**sample.metadata, ENV_NAME_KEY: self._environment_name()}
            self._named_samples = self._samples
        return self._samples

    def _environment_name(self) -> str:
        """Returns the value of `_env_name` in the samples' metadata."""
        return self.name


class Environment(Dataset):
    """A dataset and a reward. Subclass `SingleTurnEnvironment` or `MultiTurnEnvironment` instead of this class.

    Class attributes that a subclass may set: `reward_min` and `reward_max` (expected range of the reward, for charts),
    `metrics_ranges` (`{"correct": {"min": 0.0, "max": 1.0}}`, for charts), `tags_options` (the values of each tag),
    `uses_chat_template` (False: the prompt goes to the model as plain text), `keeps_eos_token` (True: the completion
    that is scored still ends with the end token, if the model wrote one).
    """

    is_multi_turn: bool = False
    reward_min: float | None = None
    reward_max: float | None = None
    metrics_ranges: ClassVar[dict[str, dict[str, float]]] = {}
    tags_options: ClassVar[dict[str, list[str]]] = {}
    eos_token: str = ""
    """End token that scoring methods receive; the tokenizer's, unless the keyword argument sets another."""
    add_thinking_prefix: bool = False
    uses_chat_template: bool = True
    keeps_eos_token: bool = False
    judge: Judge | None = None
    """A model that scores answers, from the keyword argument `judge`."""
    rollout_timeout_seconds: float = 3600.0
    """Time limit of an overridden `rollout`, generation included."""
    call_timeout_seconds: float = math.inf
    """Time limit of a call of its methods, in a rollout worker."""
    endpoint_socket: str = ""
    """Unix socket of the endpoint for agents in local sandboxes, in a rollout worker whose environments have agents."""
    resources_per: ClassVar[Literal["host", "process"]] = "host"

    _notices: tuple[str, ...] = ()

    def __init__(
        self,
        eos_token: str | None = None,
        add_thinking_prefix: bool | None = False,
        judge: Judge | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Receives the remaining keywords. Those that `load_dataset` does not name become attributes.

        Raises `UserError` for a misspelled keyword.
        """
        if eos_token is not None:
            self.eos_token = eos_token
        if add_thinking_prefix is not None:
            self.add_thinking_prefix = add_thinking_prefix
        if judge is not None:
            from telescope.environments.judge import Judge

            self.judge = Judge.of(judge)
        refuse_near_misses(kwargs, known_arguments(type(self), Environment), type(self).__name__)
        self._load_arguments = load_arguments(type(self), kwargs, Environment)
        set_attributes(self, {key: value for key, value in kwargs.items() if key not in self._load_arguments})

    async def rollout(self, sample: Sample, context: RolloutContext) -> RewardResult:
        """Runs one sample from its prompt to its score. By default it runs the turn loop and `compute_reward`.

        Override it to write an agent, which gets completions of the policy from `context`.
        """
        return await context.take_turns()

    def notice(self, text: str) -> None:
        """Prints and records `text` before training.

        Use it for facts that the user of a run must know. Call it from the constructor or `load_dataset`; later it only
        goes to the log.
        """
        logger.warning("%s", text)
        self._notices = (*self._notices, text)

    def check_gold(self, sample: Sample) -> GoldCheck | None:
        """Returns how the reward reads the sample's reference answer, and whether a completion can equal it.

        Called for some samples before a run. None: the environment has no reference answers.
        """
        return None

    def solution(self, sample: Sample) -> list[str]:
        """Returns answers, one per turn, that earn the full reward (`telescope envs check`). Empty if unknown."""
        return []

    def cheats(self, sample: Sample) -> dict[str, str]:
        """Returns answers that must earn nothing, by name (`telescope envs check`). Each is given in every turn."""
        messages: list[ChatMessage] = []
        if isinstance(self, MultiTurnEnvironment):
            messages = self.get_initial_prompt(sample)
        elif isinstance(self, SingleTurnEnvironment):
            messages = self.build_messages(sample.prompt)
        prompt = "\n\n".join(str(message.get("content") or "") for message in messages)
        return {"empty answer": "", "prompt echoed": prompt} | ({GOLD: str(sample.answer)} if sample.answer else {})

    async def check_resources(self) -> None:
        """Checks the resources. Awaited once before a run, in its own process. Raises `UserError` if one is missing."""
        if self.judge is not None:
            await self.judge.check()

    async def prepare_resources(self) -> None:
        """Prepares resources. Awaited before the first completion is scored.

        Start a pool of sandboxes here, or open connections. An environment that overrides this runs in one process per
        host, so a host has its resources once. With `resources_per = "process"` every process runs it and has its own
        resources.
        """

    async def close_resources(self) -> None:
        """Closes resources. Awaited for some seconds when the process ends normally; not called after a crash."""
        if self.judge is not None:
            await self.judge.close()


class SingleTurnEnvironment(Environment):
    """One prompt, one completion, one reward.

    The user's message is `instruction_prompt`, a blank line and the question; `system_prompt` is the system message.
    Either may be None, or an attribute of the class. With `add_thinking_prefix` the model continues after an opening
    `<think>`, which is part of the prompt and not of the completion that is scored.
    """

    arguments_of_registry: ClassVar[frozenset[str]] = frozenset({"tools"})
    """Arguments that `make_environment` takes: with tools it makes a `ToolEnvironment` of the class."""
    system_prompt: str | None = None
    instruction_prompt: str | None = None

    def __init__(self, system_prompt: str | None = None, instruction_prompt: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if system_prompt is not None:
            self.system_prompt = system_prompt
        if instruction_prompt is not None:
            self.instruction_prompt = instruction_prompt

    @abstractmethod
    def compute_reward(
        self, completion: str, sample: Sample, eos_token: str = ""
    ) -> RewardResult | Awaitable[RewardResult]:
        """Scores `completion`, the text after the prompt. May be `async`."""

    def compute_eval_metrics(
        self, completion: str, sample: Sample, eos_token: str = ""
    ) -> EvalMetricsResult | Awaitable[EvalMetricsResult]:
        """Returns the metrics of an evaluation, by default the reward and its `sample_metrics`."""
        return _as_eval_metrics(self.compute_reward(completion, sample, eos_token))

    def build_messages(self, question: str | Sequence[ChatMessage]) -> list[ChatMessage]:
        """Returns the conversation before the completion.

        A `str` question follows the instruction after a blank line. A list of messages is used unchanged, with the
        system prompt in front unless it has its own.
        """
        if isinstance(question, str) and self.instruction_prompt:
            question = f"{self.instruction_prompt}\n\n{question}"
        return _with_system_prompt(question, self.system_prompt)

    def format_prompt(
        self,
        question: str | list[ChatMessage],
        tokenizer: Any,
        add_thinking_prefix: bool | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Returns the text that the model continues.

        `tokenizer` is any object with transformers' `apply_chat_template`, which also receives `chat_template_kwargs`.
        `add_thinking_prefix` None means the environment's setting. If `uses_chat_template` is False, the messages are
        joined by blank lines.
        """
        messages = self.build_messages(question)
        if self.uses_chat_template:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **(chat_template_kwargs or {})
            )
        else:
            text = "\n\n".join(str(message["content"]) for message in messages)
        opens = self.add_thinking_prefix if add_thinking_prefix is None else add_thinking_prefix
        return with_thinking_prefix(text) if opens else text


class MultiTurnEnvironment(Environment):
    """A conversation: the model answers and the environment responds until it is done. Then the whole is scored.

    Each answer becomes the last step of `state.trajectory`. Then `env_response` and `is_done` are called and, unless
    done, `get_next_prompt_messages` returns the next prompt. So `env_response` sees every answer, including the last
    one, and may judge it. All methods may be plain or `async`.

    Class attributes that a subclass may set: `max_turns`, `system_prompt`, `checks_done_first` (True: `is_done` is also
    called before `env_response`, and an answer that ends the rollout gets no response, which saves an expensive last
    call),
    `continues_after_truncation` (False: an answer that was cut off ends the rollout, after `env_response`). With
    `add_thinking_prefix` every prompt ends with `<think>`, which becomes the start of the answer.
    """

    is_multi_turn = True
    max_turns: int = int(DEFAULT_TURNS)
    system_prompt: str | None = None
    template_tools: list[dict[str, Any]] | None = None
    """Schemas of tools that the chat template shows to the model, once it has a prompt (`ToolEnvironment`)."""
    checks_done_first: ClassVar[bool] = False
    continues_after_truncation: bool = False

    def __init__(self, max_turns: int = DEFAULT_TURNS, system_prompt: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if max_turns is not None and max_turns is not DEFAULT_TURNS:
            self.max_turns = max_turns
        if system_prompt is not None:
            self.system_prompt = system_prompt

    @property
    def role_of_replies(self) -> str:
        """Returns the role of the environment's messages. A custom environment may set `reply_role` or `tool_role`."""
        return str(getattr(self, "reply_role", None) or getattr(self, "tool_role", None) or "user")

    @property
    def form_of_a_call(self) -> str:
        """Returns a tool call as the prompt shows it, if there are tools."""
        return ""

    def create_initial_state(self, sample: Sample) -> RolloutState:
        """Returns the state of a new rollout. Override it to fill `custom`."""
        return RolloutState(sample=sample, env_name=self.name)

    def get_initial_prompt(self, sample: Sample, tokenizer: Any = None) -> list[ChatMessage]:
        """Returns the first conversation. It must be the same at every call, since all rollouts of a group share it."""
        return _with_system_prompt(sample.prompt, self.system_prompt)

    @abstractmethod
    def env_response(
        self, messages: list[ChatMessage], state: RolloutState
    ) -> list[ChatMessage] | Awaitable[list[ChatMessage]]:
        """Returns the environment's response to `messages`, which end with the model's answer.

        It is called after every answer. An empty list does not end the rollout.
        """

    def is_done(self, state: RolloutState) -> tuple[bool, str | None]:
        """Returns whether the rollout ends here, and the reason to record. Called after `env_response`.

        By default it ends after `max_turns` answers. If that is 0 or less, only the context limits it.
        """
        if 0 < self.max_turns <= state.num_turns:
            return True, MAX_TURNS_REACHED
        return False, None

    def get_next_prompt_messages(
        self, state: RolloutState, env_response_messages: list[ChatMessage]
    ) -> list[ChatMessage]:
        """Returns the next turn's conversation: by default everything so far and the environment's response."""
        return [*conversation(state), *env_response_messages]

    @abstractmethod
    def compute_reward(self, state: RolloutState, eos_token: str = "") -> RewardResult | Awaitable[RewardResult]:
        """Scores the finished rollout."""

    def compute_eval_metrics(
        self, state: RolloutState, eos_token: str = ""
    ) -> EvalMetricsResult | Awaitable[EvalMetricsResult]:
        """Returns the metrics of an evaluation, by default the reward and its `sample_metrics`."""
        return _as_eval_metrics(self.compute_reward(state, eos_token))

    def end_rollout(self, state: RolloutState) -> Awaitable[None] | None:
        """Releases resources in `state`. Called once when a rollout was scored, failed or cancelled."""
        return None


def wrapped_environment(owner: Any) -> Environment | None:
    """Returns the environment itself, or the environment that an eval wraps, if any."""
    return owner if isinstance(owner, Environment) else owner.env


def is_agent(environment: Any) -> bool:
    """Returns whether an environment, or an environment class, overrides `rollout`."""
    return getattr(environment.rollout, "__func__", environment.rollout) is not Environment.rollout


def multi_turn_environment(owner: Any) -> MultiTurnEnvironment:
    """Returns the multi-turn environment itself, or the one that an eval wraps."""
    found = wrapped_environment(owner)
    assert isinstance(found, MultiTurnEnvironment)
    return found


def with_thinking_prefix(text: str) -> str:
    """Appends `<think>` to the prompt unless the template has written it."""
    return text if text.rstrip().endswith(THINKING_PREFIX) else text + THINKING_PREFIX


def _with_system_prompt(prompt: str | Sequence[ChatMessage], system_prompt: str | None) -> list[ChatMessage]:
    """Returns the prompt as messages, with the system prompt first if missing. Raises `MalformedResultError`."""
    from telescope.environments.serialization import serialize_messages  # it imports numpy

    messages: list[ChatMessage] = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, str):
        messages = serialize_messages(prompt, "load_dataset", "a text or a list of messages as a prompt")
    if system_prompt and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def _as_eval_metrics(
    result: RewardResult | Awaitable[RewardResult],
) -> EvalMetricsResult | Awaitable[EvalMetricsResult]:
    async def later(pending: Awaitable[RewardResult]) -> EvalMetricsResult:
        return eval_metrics_of(await pending)

    return eval_metrics_of(result) if isinstance(result, RewardResult) else later(result)


BaseEnvironment = Environment
"""Former name of `Environment`."""
