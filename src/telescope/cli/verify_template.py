"""Implements `telescope verify --template`, which shows what the model reads and what is trained, without an engine."""

from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.text import Text

from telescope.config import TelescopeConfig
from telescope.environments.base import multi_turn_environment
from telescope.errors import UserError
from telescope.evals.entries import environment_keys
from telescope.rollout.loaded_environment import LoadedEnvironment
from telescope.rollout.rendering import Dialogue, Renderer, RendererSpec

TRAINED, UNTRAINED = "bold green", "dim"
ANSWERS = ("<think>\nThe first thought.\n</think>\n\nThe first answer.", "The last answer.")
REPLY = "The reply of the environment."


def print_template(config: TelescopeConfig, console: Console) -> None:
    """Prints a conversation of each environment with its trained tokens. Raises `UserError` if it loses a message."""
    renderer = Renderer(RendererSpec.from_config(config))
    console.print(Text(f"What ends an answer: {renderer.stops.description or 'only its length'}"))
    console.print(Text("Trained tokens are marked [[ ]]. The answers are a fixed probe text, not the model's words.\n"))
    keys = environment_keys(config)
    training = [spec for spec in keys.specs if spec.key in keys.training]
    for loaded in [LoadedEnvironment(spec, renderer, list(config.environments_path)) for spec in training]:
        console.rule(Text(loaded.spec.identity), align="left")
        try:
            loaded.describe()
        except UserError:
            with suppress(Exception):  # the error of the description explains that of the conversation
                _print_conversation(loaded, renderer, config, console)
            raise
        _print_conversation(loaded, renderer, config, console)


def _print_conversation(
    loaded: LoadedEnvironment, renderer: Renderer, config: TelescopeConfig, console: Console
) -> None:
    environment, prompt = loaded.environment, loaded.prepare(0)
    ends = [*renderer.stops.token_ids[:1]]

    def show(token_ids: list[int], style: str) -> None:
        text = renderer.decode(token_ids, cut_end_token=False)
        console.print(Text(f"[[{text}]]" if style == TRAINED else text, style=style), end="", soft_wrap=True)

    show(prompt.token_ids, UNTRAINED)
    if not environment.is_multi_turn:
        show([*renderer.encode_continuation(ANSWERS[0]), *ends], TRAINED)
        console.print("\n")
        return
    found: Any = multi_turn_environment(environment)
    dialogue = Dialogue(
        renderer,
        interleaved=config.interleaved_rollouts,
        thinking_prefix=found.add_thinking_prefix,
        tools=found.template_tools,
    )
    messages = prompt.messages
    dialogue.begin(messages)
    for answer in ANSWERS:
        sampled = [*renderer.encode_continuation(answer), *ends]
        show(sampled, TRAINED)
        reply = {"role": found.role_of_replies, "name": "tool", "content": REPLY}
        messages = [*messages, {"role": "assistant", "content": dialogue.opening + answer}, reply]
        extension = dialogue.extend(answer, sampled, messages, ended=bool(ends))
        if extension.restarts:
            why = extension.divergence or "interleaved_rollouts: false"
            console.print(Text(f"\n--- fork ({why}): the next prompt is rendered again and begins another sample"))
        elif extension.divergence:
            console.print(Text(f"\n--- the template writes this history differently ({extension.divergence})"))
        show(extension.token_ids, UNTRAINED)
    console.print("\n")
