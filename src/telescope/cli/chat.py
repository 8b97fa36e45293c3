"""Implements `telescope chat`, a conversation with a model that vLLM serves on this machine.

Arguments, input and printing only. `inference.server` runs vLLM, and `inference.chat` holds the conversation.
"""

from __future__ import annotations

import argparse
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from telescope.cli.main import CommandParser, number
from telescope.cluster.reaper import Reaper
from telescope.config.machine import LOOPBACK
from telescope.errors import InfrastructureError, RunError, UserError
from telescope.utils.text import CONTROL

if TYPE_CHECKING:
    from telescope.config import TelescopeConfig
    from telescope.inference.chat import Conversation
    from telescope.orchestrator.eval_targets import EvalTarget

STATUS_SECONDS = 0.5
LEAST_TOP_P = 0.001  # vLLM refuses 0

EPILOG = """examples:
  telescope chat runs/first                     the newest checkpoint of a run
  telescope chat runs/first --step 50 --system "Answer in one word."
  telescope chat models/tiny-countdown --temperature 0
  telescope chat Qwen/Qwen2.5-0.5B-Instruct --max-model-len 4096 --prompt "What is 7 * 6?"

Context, chat template, thinking, dtype and sampling of a run's checkpoint are those of the run. Other fields of
inference are flags too, as for `telescope eval`: --enable_thinking true, --gpu_memory_utilization 0.5."""

COMMANDS = "/reset begins a new conversation, /exit ends (so does Ctrl-D). Ctrl-C stops an answer."


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="telescope chat",
        takes_fields=True,
        description="Serve a checkpoint, a model folder or a hub model with vLLM on this machine, and talk to it.",
        epilog=EPILOG,
    )
    where = "run directory (its newest checkpoint, else its final model), step_N folder, model folder, or hub name"
    parser.add_argument("path", help=where)
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint of a run (default: the newest)")
    parser.add_argument("--prompt", metavar="TEXT", help="ask this, print the answer, and exit")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    of_run = "default: that of the run, else 1"
    parser.add_argument("--temperature", type=number(float, 0, 2), metavar="T", help=of_run)
    parser.add_argument("--top-p", type=number(float, LEAST_TOP_P, 1), metavar="P", help=of_run)
    parser.add_argument("--max-tokens", type=number(int, 1), metavar="N", help="longest answer")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Runs the command. Returns the exit code; raises `UserError` for bad input, before anything is started."""
    from telescope.inference.chat import ChatSettings, Conversation, connect

    target = find_target(arguments.path, arguments.step)
    config = build_config(target, arguments.fields)
    if (arguments.max_tokens or 0) >= config.max_model_len:
        raise UserError(
            f"--max-tokens is {arguments.max_tokens}, and the context of prompt and answer is max_model_len, "
            f"{config.max_model_len} tokens. Lower --max-tokens, or raise --max_model_len"
        )
    stops = find_stops(config, target)
    with serving(config, target) as (url, key):
        settings = ChatSettings(
            config.temperature if arguments.temperature is None else arguments.temperature,
            (config.top_p or 1.0) if arguments.top_p is None else arguments.top_p,
            arguments.max_tokens,
            stops,
        )
        conversation = Conversation(connect(url, key), config.model, settings, arguments.system)
        if arguments.prompt is not None:
            _answer(conversation, arguments.prompt)
        else:
            _talk(conversation)
    return 0


def find_target(path: str, step: int | None = None) -> EvalTarget:
    """Returns the model at a path or with a name on the hub. Raises `UserError` if there is none."""
    from telescope.config.eval_config import EvalCommand
    from telescope.orchestrator.eval_targets import find_targets

    target = find_targets(EvalCommand(), [path], None if step is None else [step])[-1]
    if step not in (None, target.step):
        raise UserError(f"--step is {step}, but {path} is one model, not a run with checkpoints. Leave --step out")
    return target


def build_config(target: EvalTarget, fields: Sequence[str] = ()) -> TelescopeConfig:
    """Returns the config of the server. Raises `ConfigError`."""
    from telescope.config.eval_config import build_eval_config, load_eval_request

    request = load_eval_request(None, list(fields))
    return build_eval_config(request, target.run_config(), [], target.model_files_folder())


def find_stops(config: TelescopeConfig, target: EvalTarget) -> dict[str, Any]:
    """Returns the conditions that end a completion in training, as parameters of vLLM's chat API."""
    from telescope.rollout.rendering import Renderer, RendererSpec

    stops = Renderer(RendererSpec.from_config(config, target.model_files_folder())).stops
    return {"stop_token_ids": list(stops.token_ids)} | ({"stop": list(stops.texts)} if stops.texts else {})


@contextmanager
def serving(config: TelescopeConfig, target: EvalTarget) -> Iterator[tuple[str, str]]:
    """Serves a model while the context is open. Yields URL and key. Raises `RunError` if vLLM does not start."""
    from telescope.inference.base import Address, backend_of
    from telescope.inference.server import InferenceServer, SupervisionLimits

    _say(f"reading {target.path}" if target.is_native else f"model: {target.description}")
    with Reaper() as reaper:
        folder = target.model_folder(reaper.directory, config.engine_dtype)
        with socket.create_server((LOOPBACK, 0)) as free:
            port = free.getsockname()[1]
        address = Address(0, LOOPBACK, port, secrets.token_urlsafe(32))
        limits = SupervisionLimits(start_timeout=config.inference_start_timeout_seconds, max_restarts=0)
        server = InferenceServer(config, address, str(folder), reaper.directory, limits=limits)
        started = threading.Event()

        def show_start() -> None:
            backend, began, shown = backend_of(config), time.monotonic(), ""
            stage = backend.progress([])
            while not started.wait(STATUS_SECONDS):
                stage = backend.progress(server.status().last_log_lines, stage)
                if stage != shown:
                    shown = stage
                    _say(f"starting {backend.name}: {stage} ({time.monotonic() - began:.0f} s)")

        progress = threading.Thread(target=show_start, name="progress of the start", daemon=True)
        progress.start()
        try:
            try:
                server.start()
            finally:
                started.set()
            yield server.url, address.secret
        finally:
            server.stop()


def _talk(conversation: Conversation) -> None:
    """Reads questions and commands until /exit or the end of the input."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  # line editing and history of `input`

        _say(f"{conversation.model}. {COMMANDS}")
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            return
        if line == "/exit":
            return
        if line == "/reset":
            conversation.reset()
            _say("a new conversation")
        elif line.startswith("/"):
            _say(f"There is no command {line}. {COMMANDS}")
        elif line:
            try:
                _answer(conversation, line)
            except UserError as error:
                _say(str(error))


def _answer(conversation: Conversation, question: str) -> None:
    """Prints a completion as it arrives, until Ctrl-C. Raises `RunError` if the server no longer responds."""
    pieces = conversation.ask(question)
    try:
        for piece in pieces:
            print(CONTROL.sub("", piece), end="", flush=True)  # a completion must not control the terminal
        if conversation.finish_reason == "length":
            print(" [cut: --max-tokens or the context is used up]", end="")
    except InfrastructureError as error:
        raise RunError(f"The conversation has ended: {error}") from error
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
        print(" [stopped]", end="")
    print(flush=True)


def _say(text: str) -> None:
    """Prints to stderr, because standard output is for completions only."""
    print(text, file=sys.stderr, flush=True)
