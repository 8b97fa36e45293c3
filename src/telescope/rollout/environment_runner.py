"""Loads environments, describes them, and renders their prompts.

Owns the loaded environments and their resources (sandbox pools, connections). `prepare_resources` and `close_resources`
run one at a time in a process, and again after a failure. `rollout.user_thread` owns the threads and deadlines of user
code, `rollout.environments` the rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from telescope.environments.base import (
    ChatMessage,
    Environment,
    MultiTurnEnvironment,
    Sample,
    assistant_message,
    multi_turn_environment,
    sample_uid,
    with_thinking_prefix,
    wrapped_environment,
)
from telescope.environments.golds import report_golds
from telescope.environments.parsers import opening_tag
from telescope.environments.serialization import as_json, serialize_messages
from telescope.environments.types import (
    FINGERPRINT_DIGITS,
    EnvironmentInfo,
    EnvironmentSpec,
    PreparedPrompt,
    digest_positions,
)
from telescope.environments.user_code import describe_error, without_exit
from telescope.errors import UnreachableError, UserError
from telescope.rollout.rendering import Renderer, lost_message, without_breaks

MAX_TRIED_ITEMS = 64
"""Items whose messages are tried with the chat template before a run."""


class EnvironmentRunner:
    """The environments of one process, by position."""

    def __init__(
        self,
        specs: Sequence[EnvironmentSpec],
        renderer: Renderer | None,
        path: Sequence[str],
        *,
        on_stage: Callable[[str, str], None] = lambda stage, doing: None,
    ) -> None:
        """Imports and creates the environments.

        `on_stage(stage, description)` is called before user code loads something; the stage is `making`, `dataset` or
        `resources`. Raises `UserError` with the environment and the line when user code raises or exits.
        """
        self.renderer = renderer
        self.specs = list(specs)
        self.on_stage = on_stage
        self.environments = [self._make(spec, path) for spec in specs]
        self.resources = [Resources(environment) for environment in self.environments]
        self._opened: dict[tuple[int, int], str] = {}
        """The tag that opens reasoning at the end of an item's prompt, or `""`, for single-turn environments."""

    @contextlib.contextmanager
    def _loading(self, spec: EnvironmentSpec, stage: str, doing: str) -> Iterator[None]:
        """Turns any error of user code during loading into a `UserError`."""
        kind = "eval" if spec.factory.startswith("telescope.evals.") else "environment"
        self.on_stage(stage, f"{doing} the {kind} {spec.name!r}")
        try:
            yield
        except UserError:
            raise
        except BaseException as error:
            traceback.print_exc()
            what = f"{doing.capitalize()} the {kind} {spec.name!r} failed: {describe_error(error)}"
            if isinstance(error, ConnectionError):  # the package datasets raises it without the hub
                what += ". Connect this machine, or download the dataset beforehand (`hf download --repo-type dataset`)"
            raise UserError(what) from error

    def _make(self, spec: EnvironmentSpec, path: Sequence[str]) -> Any:
        module, _, function = spec.factory.partition(":")
        with self._loading(spec, "making", "importing and making"):
            environment = getattr(importlib.import_module(module), function)(
                spec.name, environments_path=path, **spec.kwargs
            )
        if self.renderer is not None and not environment.eos_token:
            environment.eos_token = self.renderer.eos_token
        return environment

    async def prepare_own_resources(self) -> None:
        """Prepares the resources that every process has for itself."""
        for position, spec in enumerate(self.specs):
            if self.resources[position].overridden and not self.resources[position].per_host:
                with self._loading(spec, "resources", "preparing the resources of"):
                    await self.resources[position].ready()

    async def close(self) -> None:
        for resources in self.resources:
            await resources.close()

    def describe(self, position: int, *, checks_golds: bool = False, checks_template: bool = True) -> EnvironmentInfo:
        """Loads the dataset, renders the first prompt, and describes the environment.

        Raises `UserError` when the dataset is empty or its first prompt cannot be rendered. With `checks_golds` also
        when no completion can equal most of its answers, with `checks_template` also when a message never reaches the
        model.
        """
        spec, environment = self.specs[position], self.environments[position]
        found = wrapped_environment(environment)
        with self._loading(spec, "dataset", "loading the dataset of"):
            count = len(environment)
            uids = [sample_uid(environment.get_sample(i)) for i in digest_positions(count)]
        if count == 0:
            raise UserError(
                f"The dataset of environment {spec.name!r} is empty (kwargs: {spec.kwargs or 'none'}). Check its "
                "dataset, split and num_samples."
            )
        if checks_golds:
            with self._loading(spec, "dataset", "checking the answers of"):
                report = report_golds(spec.name, environment)
            if found is not None:
                if report is not None:
                    found.notice(report)
                with self._loading(spec, "dataset", "checking the resources of"):
                    try:
                        asyncio.run(found.check_resources())
                    except UserError as error:  # another machine may have the resources
                        raise UnreachableError(f"The environment {spec.name!r}: {error}") from error
        if self.renderer is not None:
            try:
                self.prepare(position, 0)
            except UserError:
                raise
            except BaseException as error:
                raise UserError(
                    f"The first prompt of environment {spec.name!r} cannot be rendered: {describe_error(error)}"
                ) from error
            if checks_template:
                self._check_template(self.renderer, spec, environment)
            if environment.is_multi_turn:
                self._check_replies(self.renderer, spec, environment)
        return EnvironmentInfo(
            name=str(environment.name),
            num_samples=count,
            is_multi_turn=bool(environment.is_multi_turn),
            reward_min=spec.reward_min if spec.reward_min is not None else environment.reward_min,
            reward_max=spec.reward_max if spec.reward_max is not None else environment.reward_max,
            metrics_ranges={key: dict(value) for key, value in environment.metrics_ranges.items()},
            tags_options={key: list(value) for key, value in environment.tags_options.items()},
            dataset_digest=hashlib.sha256(",".join(uids).encode()).hexdigest()[:16],
            fingerprints="".join(uid[:FINGERPRINT_DIGITS] for uid in uids),
            shares_resources=self.resources[position].overridden and self.resources[position].per_host,
            ends_rollouts=isinstance(found, MultiTurnEnvironment)
            and type(found).end_rollout is not MultiTurnEnvironment.end_rollout,
            notices=[] if found is None else list(found._notices),
            stops={} if self.renderer is None else asdict(self.renderer.stops),
        )

    def _check_replies(self, renderer: Renderer, spec: EnvironmentSpec, environment: Any) -> None:
        """Raises `UserError` when the template rejects the role of the environment's replies."""
        found = multi_turn_environment(environment)
        role, tools = found.role_of_replies, found.template_tools
        answer = assistant_message(found.form_of_a_call if tools else "One.")
        turn = [answer, {"role": role, "content": "Another."}]
        try:
            renderer.chat_text([{"role": "user", "content": "Choose a number."}, *turn, *turn], tools)
        except Exception as error:
            raise UserError(
                f"The environment {spec.name!r} replies with the role {role!r}, which the chat template of "
                f"{renderer.spec.tokenizer_path!r} rejects: {error}. Set chat_template, or the environment's "
                "tool_role."
            ) from error

    def _check_template(self, renderer: Renderer, spec: EnvironmentSpec, environment: Any) -> None:
        """Raises `UserError` for a message of the environment that the template leaves out.

        Tries each order of roles among the prompts of some items, followed by two turns in a multi-turn environment.
        """
        if not (environment.is_multi_turn or _renders_messages(environment)):
            return
        tried: set[tuple[str, ...]] = set()
        positions = digest_positions(len(environment))
        for index in positions[:: max(1, len(positions) // MAX_TRIED_ITEMS)]:
            lost: str | None = None
            with contextlib.suppress(Exception):  # a broken prompt is skipped later, when it is used
                messages = self.first_messages(environment, environment.get_sample(index))
                roles = tuple(message["role"] for message in messages)
                if roles not in tried:
                    tried.add(roles)
                    lost = self._lost_message(renderer, environment, messages)
            if lost is not None:
                raise UserError(
                    f"The chat template of {renderer.spec.tokenizer_path!r} leaves out {lost}, which the environment "
                    f"{spec.name!r} sends: the model would never read it. Set chat_template, or change what it sends "
                    "(system_prompt, tool_role)."
                )

    def _lost_message(self, renderer: Renderer, environment: Any, messages: list[ChatMessage]) -> str | None:
        if not environment.is_multi_turn:
            return lost_message(renderer, messages)
        found = multi_turn_environment(environment)
        tools = found.template_tools
        answer = assistant_message(found.form_of_a_call if tools else "One.")
        reply = {"role": found.role_of_replies, "name": "tool", "content": "Again."}
        try:
            return lost_message(renderer, [*messages, answer, reply, answer, reply], tools)
        except Exception:  # the template does not accept such turns after these messages
            return lost_message(renderer, messages, tools)

    def prepare(self, position: int, index: int) -> PreparedPrompt:
        """Renders and tokenizes the prompt of an item."""
        assert self.renderer is not None, "a pool without a renderer prepares no prompts"
        environment = self.environments[position]
        sample: Sample = environment.get_sample(index)
        if environment.is_multi_turn:
            messages = self.first_messages(environment, sample)
            found = multi_turn_environment(environment)
            text = self.renderer.chat_text(messages, found.template_tools)
            if found.add_thinking_prefix:
                text = with_thinking_prefix(text)
            ids = self.renderer.encode(text, from_template=True)
        else:
            text = self._prompt_text(position, index)
            ids = self.renderer.encode(text, from_template=environment.uses_chat_template)
            messages = [{"role": "prompt", "content": without_breaks(text)}]
            if _renders_messages(environment):
                messages = self.first_messages(environment, sample)
        return PreparedPrompt(ids, without_breaks(text), messages, sample_uid(sample))

    def _prompt_text(self, position: int, index: int) -> str:
        assert self.renderer is not None
        environment = self.environments[position]
        text = self.renderer.prompt_text(environment, environment.get_sample(index).prompt)
        self._opened[position, index] = opening_tag(text)
        return text

    def first_messages(self, environment: Any, sample: Sample) -> list[ChatMessage]:
        if not environment.is_multi_turn:
            return as_json(environment.build_messages(sample.prompt), "messages")
        assert self.renderer is not None
        prompt = multi_turn_environment(environment).get_initial_prompt(sample, self.renderer.tokenizer)
        return serialize_messages(prompt, "get_initial_prompt")

    def opened(self, position: int, index: int) -> str:
        """Returns the tag that opens reasoning at the end of a single-turn item's prompt, or an empty text."""
        if (position, index) not in self._opened:  # another process rendered the prompt
            self._prompt_text(position, index)
        return self._opened[position, index]


class Resources:
    """The resources of one environment, or of the environment that an eval wraps."""

    def __init__(self, environment: Any) -> None:
        wrapped = wrapped_environment(environment)
        self._owner = environment if wrapped is None else wrapped  # `or` would call `len`, which loads the dataset
        mine = getattr(type(self._owner), "prepare_resources", None)
        self.overridden = mine is not None and mine is not Environment.prepare_resources
        """Whether the environment has resources to prepare."""
        self.per_host = getattr(self._owner, "resources_per", "host") == "host"
        self._prepared = not self.overridden
        self._preparing: asyncio.Future[Any] | None = None

    async def ready(self) -> None:
        """Prepares the resources. Raises what `prepare_resources` raises."""
        if self._prepared:
            return
        if self._preparing is None:
            self._preparing = asyncio.create_task(self._prepare())
        # Shielded: a caller whose deadline passes must not cancel the preparation for the others.
        await asyncio.shield(self._preparing)

    async def _prepare(self) -> None:
        try:
            await without_exit(self._owner.prepare_resources())
            self._prepared = True
        finally:
            self._preparing = None

    async def close(self) -> None:
        """Closes prepared resources. Prints errors, because the process is about to exit."""
        if not (self.overridden and self._prepared):
            return
        self._prepared = False
        try:
            await without_exit(self._owner.close_resources())
        except Exception:
            traceback.print_exc()


def _renders_messages(environment: Any) -> bool:
    """Returns whether a single-turn environment's prompts show its messages. A custom `format_prompt` may not."""
    is_own = not type(environment).format_prompt.__module__.startswith("telescope.")
    return environment.uses_chat_template and not is_own
