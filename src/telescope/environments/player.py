"""Playing an environment inside a worker process: dataset item to prompt, completion to score.

Owns the loaded environments and the translation between users' objects and plain values, including the complaint when
a user's object is not what it should be. Does not own processes, deadlines or messages (`worker`, `pool`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import json
import math
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from telescope.environments.base import EvalMetricsResult, RewardResult, Sample, sample_uid
from telescope.environments.blame import describe
from telescope.environments.records import EnvironmentInfo, EnvironmentSpec
from telescope.environments.rendering import Renderer
from telescope.errors import UserError

DIGEST_ITEMS = 64
"""Dataset items that are compared between processes: enough to notice another order, cheap for a long dataset."""


class MalformedResultError(TypeError):
    """User code returned something that its interface does not allow."""


@dataclass(slots=True)
class Pending:
    """A completion that has been handed to user code. `result` may be awaitable."""

    result: Any
    text: str
    for_eval: bool


class Player:
    """The environments of one process, by position."""

    def __init__(
        self,
        specs: Sequence[EnvironmentSpec],
        renderer: Renderer | None,
        path: Sequence[str],
        *,
        on_stage: Callable[[str, str], None] = lambda stage, doing: None,
    ) -> None:
        """Imports and makes the environments. `on_stage` is told before user code is entered to load something: the
        stage (`making`, `dataset` or `resources`) and the same in words.

        Raises `UserError` that names the environment and the place when its code raises or exits.
        """
        self.renderer = renderer
        self.specs = list(specs)
        self.on_stage = on_stage
        self.environments = [self._make(spec, path) for spec in specs]

    @contextlib.contextmanager
    def _loading(self, spec: EnvironmentSpec, stage: str, doing: str) -> Iterator[None]:
        """Around user code that loads something: whatever it raises is for its author to mend."""
        kind = "eval" if spec.factory.startswith("telescope.evals.") else "environment"
        self.on_stage(stage, f"{doing} the {kind} {spec.name!r}")
        try:
            yield
        except UserError:
            raise
        except BaseException as error:
            traceback.print_exc()
            raise UserError(f"{doing.capitalize()} the {kind} {spec.name!r} failed: {describe(error)}") from error

    def _make(self, spec: EnvironmentSpec, path: Sequence[str]) -> Any:
        module, _, function = spec.factory.partition(":")
        with self._loading(spec, "making", "importing and making"):
            environment = getattr(importlib.import_module(module), function)(
                spec.name, environments_path=path, **spec.kwargs
            )
        if environment.is_multi_turn:
            raise UserError(f"The environment {spec.name!r} has several turns; this version plays single turns only.")
        environment.eos_token = self.renderer.eos_token if self.renderer else ""
        return environment

    async def prepare_resources(self) -> None:
        for spec, environment in zip(self.specs, self.environments, strict=True):
            with self._loading(spec, "resources", "preparing the resources of"):
                await environment.prepare_resources()

    def describe(self, position: int) -> EnvironmentInfo:
        """Load the dataset, try the first prompt, and say what is there.

        Raises `UserError` when the dataset is empty or its first prompt cannot be rendered.
        """
        spec, environment = self.specs[position], self.environments[position]
        with self._loading(spec, "dataset", "loading the dataset of"):
            count = len(environment)
            shown = sorted({round(i * (count - 1) / max(DIGEST_ITEMS - 1, 1)) for i in range(DIGEST_ITEMS)})
            identities = ",".join(sample_uid(environment.get_sample(i)) for i in shown) if count else ""
        if count == 0:
            raise UserError(
                f"The dataset of environment {spec.name!r} is empty (kwargs: {spec.kwargs or 'none'}). Check its "
                "dataset, split and num_samples."
            )
        if self.renderer is not None:
            try:
                self.prepare(position, 0)
            except UserError:
                raise
            except Exception as error:
                raise UserError(
                    f"The first prompt of environment {spec.name!r} cannot be rendered: {type(error).__name__}: {error}"
                ) from error
        return EnvironmentInfo(
            name=str(environment.name),
            num_samples=count,
            is_multi_turn=bool(environment.is_multi_turn),
            reward_min=spec.reward_min if spec.reward_min is not None else environment.reward_min,
            reward_max=spec.reward_max if spec.reward_max is not None else environment.reward_max,
            metrics_ranges={key: dict(value) for key, value in environment.metrics_ranges.items()},
            tags_options={key: list(value) for key, value in environment.tags_options.items()},
            dataset_digest=hashlib.sha256(identities.encode()).hexdigest()[:16],
        )

    def identities(self, position: int, start: int, stop: int) -> list[str]:
        """`sample_uid` of the items from `start` up to `stop`."""
        environment = self.environments[position]
        return [sample_uid(environment.get_sample(i)) for i in range(start, stop)]

    def prepare(self, position: int, index: int) -> tuple[dict[str, Any], list[int]]:
        """Fields of `PreparedPrompt`, and the token ids."""
        assert self.renderer is not None, "a pool without a renderer prepares no prompts"
        environment = self.environments[position]
        sample: Sample = environment.get_sample(index)
        text = self.renderer.prompt_text(environment, sample.prompt)
        ids = self.renderer.encode(text, from_template=environment.uses_chat_template)
        messages = environment.build_messages(sample.prompt)
        fields = {"text": text, "messages": _plain(messages, "messages"), "sample_uid": sample_uid(sample)}
        return fields, ids

    def hand_over(
        self, position: int, index: int, token_ids: Sequence[int], stop_reason: str, for_eval: bool
    ) -> Pending:
        """Decode a completion and call the environment's scoring method; the result may be awaitable.

        Of an answer that the model ended itself (`stop_reason` is `stop`) the end token is cut off.
        """
        environment = self.environments[position]
        assert self.renderer is not None, "a pool without a renderer decodes no completions"
        cut = stop_reason == "stop" and not environment.keeps_eos_token
        text = self.renderer.decode(token_ids, cut_end_token=cut)
        sample = environment.get_sample(index)
        method = environment.compute_eval_metrics if for_eval else environment.compute_reward
        return Pending(method(text, sample, eos_token=environment.eos_token), text, for_eval)


def is_awaitable(result: Any) -> bool:
    return inspect.isawaitable(result)


async def settle(result: Awaitable[Any]) -> Any:
    """A coroutine for any awaitable, so that it can be made a task."""
    return await result


def plain_score(result: Any, for_eval: bool) -> dict[str, Any]:
    """A user's result as the fields of `RewardRecord`. Raises `MalformedResultError` naming the field and value."""
    expected = EvalMetricsResult if for_eval else RewardResult
    if not isinstance(result, expected):
        raise MalformedResultError(f"returned {_shown(result)}, not a {expected.__name__}")
    if isinstance(result, EvalMetricsResult):
        metrics = _numbers(result.metrics, "metrics")
        total = metrics.get("reward")
    else:
        metrics = _numbers(result.sample_metrics, "sample_metrics")
        total = _number(result.total_reward, "total_reward")
    golden = {
        _text(key): None if value is None else _text(value)
        for key, value in _mapping(result.golden_answers, "golden_answers").items()
    }
    turns = _plain(list(result.info_turns), "info_turns")
    tags = {_text(key): _text(value) for key, value in _mapping(result.sample_tags, "sample_tags").items()}
    return {
        "total_reward": total,
        "sample_metrics": metrics,
        "golden_answers": golden,
        "info_turns": turns,
        "sample_tags": tags,
    }


def _numbers(values: Any, field: str) -> dict[str, float]:
    return {_text(key): _number(value, f"{field}[{key!r}]") for key, value in _mapping(values, field).items()}


def _number(value: Any, field: str) -> float:
    if isinstance(value, str):
        raise MalformedResultError(f"{field} is {_shown(value)}, not a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise MalformedResultError(f"{field} is {_shown(value)}, not a number") from None
    if not math.isfinite(number):
        raise MalformedResultError(f"{field} is {number}, not a finite number")
    return number


def _mapping(value: Any, field: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise MalformedResultError(f"{field} is {_shown(value)}, not a dict")
    return value


def _text(value: Any) -> str:
    """A string that can be written as UTF-8; lone surrogates become question marks."""
    return str(value).encode("utf-8", "replace").decode("utf-8")


def _plain(value: Any, field: str) -> Any:
    """The value as JSON types; what JSON does not know becomes its text."""
    try:
        return json.loads(json.dumps(value, default=_text, ensure_ascii=False).encode("utf-8", "replace"))
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedResultError(f"{field} cannot be written as JSON: {error}") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:80]}{'...' if len(text) > 80 else ''}"
