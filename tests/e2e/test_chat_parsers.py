"""The OpenAI-compatible API of a real server, with the parsers that a configuration names."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.scripted_model import make_scripted_model

from telescope.config import load_config
from telescope.inference.base import Address
from telescope.inference.server import InferenceServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SECRET = "s" * 32
THOUGHT = "two and three, so I add them"
CALL = '{"name": "add", "arguments": {"a": 2, "b": 3}}'
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {name: {"type": "integer"} for name in ("a", "b")}},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceServer]:
    """One server, as a run starts it, over a model that thinks and calls a tool whatever it is asked."""
    folder = tmp_path_factory.mktemp("parsers")
    model = folder / "model"
    make_scripted_model(model, ["<think>", THOUGHT, "</think>", "<tool_call>", CALL, "</tool_call>"])
    flags = [
        *("--model", str(model), "--environments", "[{name: calculator_agent}]", "--device", "cpu"),
        *("--inference_dtype", "float32", "--inference_kv_cache_gib", "1", "--max_num_seqs", "2"),
        *("--max_model_len", "1024", "--max_tokens", "64", "--enable_thinking"),
        *("--vllm_tool_call_parser", "hermes", "--vllm_reasoning_parser", "qwen3"),
    ]
    made = InferenceServer(load_config(None, flags).config, Address(0, "127.0.0.1", 18530, SECRET), str(model), folder)
    made.start()
    try:
        yield made
    finally:
        made.stop()


def choice_of(server: InferenceServer, **options: Any) -> dict[str, Any]:
    """The first choice of one answer."""
    models = _call(server, "/v1/models")["data"]
    messages = [{"role": "user", "content": "what is 2 + 3?"}]
    body = {"model": models[0]["id"], "messages": messages, "temperature": 0.0, "max_tokens": 32, **options}
    return dict(_call(server, "/v1/chat/completions", body)["choices"][0])


def _call(server: InferenceServer, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    request = urllib.request.Request(
        server.url + route,
        None if body is None else json.dumps(body).encode(),
        {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return dict(json.loads(response.read()))


def test_the_launched_process_has_the_parsers_of_the_config(server: InferenceServer) -> None:
    command = Path(f"/proc/{server.status().pid}/cmdline").read_bytes().decode().split("\0")
    assert command[command.index("--tool-call-parser") + 1] == "hermes"
    assert command[command.index("--reasoning-parser") + 1] == "qwen3"
    assert "--enable-auto-tool-choice" in command


def test_tool_calls_and_thoughts_come_parsed(server: InferenceServer) -> None:
    choice = choice_of(server, tools=[ADD])
    message = choice["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}
    # Its name in the versions that are supported; `reasoning_content` in older ones.
    assert message["reasoning"] == THOUGHT
    assert not message["content"]
    assert choice["finish_reason"] == "tool_calls"


def test_thoughts_are_parsed_without_tools_too(server: InferenceServer) -> None:
    message = choice_of(server)["message"]
    assert message["reasoning"] == THOUGHT
    assert CALL in message["content"]
    assert "<think>" not in message["content"]
    assert THOUGHT not in message["content"]
