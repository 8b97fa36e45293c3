"""Loads an environment, describes it, and renders its prompts.

Owns the environment and its resources (sandbox pools, connections). `prepare_resources` and `close_resources` run one
at a time in a process, and again after a failure. `rollout.user_thread` owns the threads and deadlines of user code,
`rollout.environments` the rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import jinja2
from pydantic import AllowInfNan, Strict, StrictBool

from telescope.environments.arguments import refuse_wrong_type
from telescope.environments.base import (
    ChatMessage,
    Environment,
    MultiTurnEnvironment,
    Sample,
    multi_turn_environment,
    with_thinking_prefix,
    wrapped_environment,
)
from telescope.environments.golds import report_golds
from telescope.environments.records import assistant_message
from telescope.environments.serialization import as_json, sample_uid, serialize_messages
from telescope.environments.types import (
    FINGERPRINT_DIGITS,
    EnvironmentInfo,
    EnvironmentSpec,
    PreparedPrompt,
    digest_positions,
)
from telescope.environments.user_code import describe_error, needs_stack, without_exit
from telescope.errors import UnreachableError, UserError
from telescope.rollout.rendering import Renderer, lost_message, without_breaks

MAX_TRIED_ITEMS = 64
"""Items whose messages are tried with the chat template before a run."""
_NUMBER: Any = Annotated[float, Strict(), AllowInfNan(False)]
DECLARED: dict[str, Any] = {
    "metrics_ranges": dict[str, dict[str, _NUMBER | StrictBool]],  # `invert` is true or false
    "tags_options": dict[str, list[Any]],
    "reward_min": _NUMBER | None,
    "reward_max": _NUMBER | None,
}
"""Types of the attributes that a class declares for charts."""


class LoadedEnvironment:
    """An environment of this process: `environment` is what the `spec` creates, an environment or an eval.

    `inner` is the environment itself, also if an eval wraps it. None for an eval without one.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        renderer: Renderer | None,
        path: Sequence[str],
        *,
        on_stage: Callable[[str, str], None] = lambda stage, doing: None,
    ) -> None:
        """Imports and creates the environment.

        `on_stage(stage, description)` is called before user code loads something; the stage is `making`, `dataset` or
        `resources`. Raises `UserError` with the environment and the line when user code raises or exits.
        """
        self.spec = spec
        self.renderer = renderer
        self.on_stage = on_stage
        module, _, function = spec.factory.partition(":")
        with self._loading("making", "importing and making"):
            make = getattr(importlib.import_module(module), function)
            self.environment: Any = make(spec.name, environments_path=path, **spec.kwargs)
        if renderer is not None and not self.environment.eos_token:
            self.environment.eos_token = renderer.eos_token
        self.inner = wrapped_environment(self.environment)
        self._owner = self.environment if self.inner is None else self.inner  # `or` would call `len`: loads the dataset
        prepare = getattr(type(self._owner), "prepare_resources", None)
        self._has_resources = prepare not in (None, Environment.prepare_resources)
        self.shares_resources = self._has_resources and getattr(self._owner, "resources_per", "host") == "host"
        """Whether one process runs all of it, because its resources exist once per host."""
        self._is_prepared = not self._has_resources
        self._preparing: asyncio.Future[Any] | None = None

    @contextlib.contextmanager
    def _loading(self, stage: str, doing: str) -> Iterator[None]:
        """Turns any error of user code during loading into a `UserError`."""
        kind = "eval" if self.spec.factory.startswith("telescope.evals.") else "environment"
        self.on_stage(stage, f"{doing} the {kind} {self.spec.name!r}")
        try:
            yield
        except UserError:
            raise
        except BaseException as error:
            if needs_stack(error):
                traceback.print_exc()
            what = f"{doing.capitalize()} the {kind} {self.spec.name!r} failed: {describe_error(error)}"
            if isinstance(error, ConnectionError):  # the package datasets raises it without the hub
                what += ". Connect this machine, or download the dataset beforehand (`hf download --repo-type dataset`)"
            raise UserError(what) from error

    async def prepare_own_resources(self) -> None:
        """Prepares the resources that every process has for itself."""
        if self._has_resources and not self.shares_resources:
            with self._loading("resources", "preparing the resources of"):
                await self.prepare_resources()

    async def prepare_resources(self) -> None:
        """Prepares the resources. Raises what the environment's `prepare_resources` raises."""
        if self._is_prepared:
            return
        if self._preparing is None:
            self._preparing = asyncio.create_task(self._prepare_resources())
        # Shielded: a caller whose deadline passes must not cancel the preparation for the others.
        await asyncio.shield(self._preparing)

    async def _prepare_resources(self) -> None:
        try:
            await without_exit(self._owner.prepare_resources())
            self._is_prepared = True
        finally:
            self._preparing = None

    async def close(self) -> None:
        """Closes prepared resources. Prints errors, because the process is about to exit."""
        if not (self._has_resources and self._is_prepared):
            return
        self._is_prepared = False
        try:
            await without_exit(self._owner.close_resources())
        except Exception:
            traceback.print_exc()

    def describe(self, *, checks_golds: bool = False, checks_template: bool = True) -> EnvironmentInfo:
        """Loads the dataset, renders the first prompt, and describes the environment.

        Raises `UserError` when the dataset is empty or its first prompt cannot be rendered. With `checks_golds` also
        when no completion can equal most of its answers, with `checks_template` also when a message never reaches the
        model.
        """
        spec, environment, found = self.spec, self.environment, self.inner
        with self._loading("dataset", "loading the dataset of"):
            count = len(environment)
            uids = [sample_uid(environment.get_sample(i)) for i in digest_positions(count)]
        if count == 0:
            raise UserError(
                f"The dataset of environment {spec.name!r} is empty (kwargs: {spec.kwargs or 'none'}). Check its "
                "dataset, split and num_samples."
            )
        if checks_golds:
            with self._loading("dataset", "checking the answers of"):
                report = report_golds(spec.name, environment)
            if found is not None:
                if report is not None:
                    found.notice(report)
                with self._loading("dataset", "checking the resources of"):
                    try:
                        asyncio.run(found.check_resources())
                    except UserError as error:  # another machine may have the resources
                        raise UnreachableError(f"The environment {spec.name!r}: {error}") from error
        if self.renderer is not None:
            with self._loading("dataset", "rendering the first prompt of"):
                try:
                    self.prepare(0)
                except jinja2.TemplateError as error:
                    raise UserError(
                        f"The chat template refuses the first prompt of environment {spec.name!r}: {error}. Set "
                        "chat_template, or change what it sends (system_prompt, messages of the dataset)."
                    ) from error
            if checks_template:
                self._check_template(self.renderer)
            if environment.is_multi_turn:
                self._check_replies(self.renderer)
        for field, annotation in DECLARED.items():
            called, fix = f"The environment {spec.name!r}", "Correct it in its class."
            refuse_wrong_type(annotation, field, getattr(environment, field), called=called, fix=fix)
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
            shares_resources=self.shares_resources,
            ends_rollouts=isinstance(found, MultiTurnEnvironment)
            and type(found).end_rollout is not MultiTurnEnvironment.end_rollout,
            notices=[] if found is None else list(found._notices),
            stops={} if self.renderer is None else asdict(self.renderer.stops),
        )

    def _check_replies(self, renderer: Renderer) -> None:
        """Raises `UserError` when the template rejects the role of the environment's replies."""
        turn, tools = self._turn_to_try()
        try:
            renderer.chat_text([{"role": "user", "content": "Choose a number."}, *turn, *turn], tools)
        except Exception as error:
            raise UserError(
                f"The environment {self.spec.name!r} replies with the role {turn[1]['role']!r}, which the chat "
                f"template of {renderer.spec.tokenizer_path!r} rejects: {error}. Set chat_template, or the "
                "environment's tool_role."
            ) from error

    def _turn_to_try(self) -> tuple[list[ChatMessage], list[dict[str, Any]] | None]:
        """Returns an answer with the environment's reply, and the tools that the template shows."""
        found = multi_turn_environment(self.environment)
        tools = found.template_tools
        answer = assistant_message(found.form_of_a_call if tools else "One.")
        reply = {"role": found.role_of_replies, "content": "Again."}
        if found.role_of_replies == "tool":
            reply["name"] = "tool"
        return [answer, reply], tools

    def _check_template(self, renderer: Renderer) -> None:
        """Raises `UserError` for a message that the template leaves out, and for a last one of the assistant.

        Tries each order of roles among the prompts of some items, followed by two turns in a multi-turn environment.
        """
        environment = self.environment
        if not (environment.is_multi_turn or self._renders_messages):
            return
        tried: set[tuple[str, ...]] = set()
        positions = digest_positions(len(environment))
        for index in positions[:: max(1, len(positions) // MAX_TRIED_ITEMS)]:
            lost: str | None = None
            roles: tuple[str, ...] = ()
            with contextlib.suppress(Exception):  # a broken prompt is skipped later, when it is used
                messages = self.first_messages(environment.get_sample(index))
                roles = tuple(message["role"] for message in messages)
                if roles not in tried:
                    tried.add(roles)
                    lost = self._lost_message(renderer, messages)
            if roles[-1:] == ("assistant",):
                raise UserError(
                    f"The prompt of item {index} of the environment {self.spec.name!r} ends with a message of the "
                    "assistant. The chat template would end it there, and the model begin another one. End the prompt "
                    "with the user's message, and set add_thinking_prefix if the answer is to begin with <think>."
                )
            if lost is not None:
                raise UserError(
                    f"The chat template of {renderer.spec.tokenizer_path!r} leaves out {lost}, which the environment "
                    f"{self.spec.name!r} sends: the model would never read it. Set chat_template, or change what it "
                    "sends (system_prompt, tool_role)."
                )

    def _lost_message(self, renderer: Renderer, messages: list[ChatMessage]) -> str | None:
        if not self.environment.is_multi_turn:
            return lost_message(renderer, messages)
        turn, tools = self._turn_to_try()
        try:
            return lost_message(renderer, [*messages, *turn, *turn], tools)
        except Exception:  # the template does not accept such turns after these messages
            return lost_message(renderer, messages, tools)

    def prepare(self, index: int) -> PreparedPrompt:
        """Renders and tokenizes the prompt of an item."""
        assert self.renderer is not None, "without a renderer there are no prompts"
        environment = self.environment
        sample: Sample = environment.get_sample(index)
        if environment.is_multi_turn:
            messages = self.first_messages(sample)
            found = multi_turn_environment(environment)
            text = self.renderer.chat_text(messages, found.template_tools)
            if found.add_thinking_prefix:
                text = with_thinking_prefix(text)
            ids = self.renderer.encode(text, from_template=True)
        else:
            text = self.renderer.prompt_text(environment, sample.prompt)
            ids = self.renderer.encode(text, from_template=environment.uses_chat_template)
            messages = [{"role": "prompt", "content": without_breaks(text)}]
            if self._renders_messages:
                messages = self.first_messages(sample)
        return PreparedPrompt(ids, without_breaks(text), messages, sample_uid(sample))

    @property
    def _renders_messages(self) -> bool:
        """Returns whether a single-turn environment's prompts show its messages. A custom `format_prompt` may not."""
        is_own = not type(self.environment).format_prompt.__module__.startswith("telescope.")
        return self.environment.uses_chat_template and not is_own

    def first_messages(self, sample: Sample) -> list[ChatMessage]:
        if not self.environment.is_multi_turn:
            return as_json(self.environment.build_messages(sample.prompt), "messages")
        assert self.renderer is not None
        prompt = multi_turn_environment(self.environment).get_initial_prompt(sample, self.renderer.tokenizer)
        return serialize_messages(prompt, "get_initial_prompt")
