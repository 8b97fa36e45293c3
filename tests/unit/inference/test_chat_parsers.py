"""Chat parsers are checked only when a configuration names one."""

import subprocess
from typing import Any

import pytest
from tests.unit.orchestrator.fakes import config_of

from telescope.errors import ConfigError
from telescope.inference.vllm.support import check_chat_parsers


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the process that imports vLLM does."""
    behavior: dict[str, Any] = {"returncode": 0, "stderr": "", "calls": 0}
    behavior["stdout"] = 'a line of its log\n[["hermes", "mistral"], ["qwen3"]]\n'

    def run(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        behavior["calls"] += 1
        if behavior.get("hangs"):
            raise subprocess.TimeoutExpired("python", options["timeout"])
        return subprocess.CompletedProcess((), behavior["returncode"], behavior["stdout"], behavior["stderr"])

    monkeypatch.setattr(subprocess, "run", run)
    return behavior


def test_nothing_is_asked_when_no_parser_is_named(answer: dict[str, Any]) -> None:
    check_chat_parsers(config_of())
    assert answer["calls"] == 0


def test_parsers_that_vllm_has_are_accepted(answer: dict[str, Any]) -> None:
    check_chat_parsers(config_of(vllm_tool_call_parser="mistral", vllm_reasoning_parser="qwen3"))
    assert answer["calls"] == 1


def test_a_refusal_names_field_value_nearest_name_and_all_names(answer: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_chat_parsers(config_of(vllm_tool_call_parser="hermez", vllm_reasoning_parser="hermes"))
    first, second = str(caught.value).splitlines()
    assert first == (
        "vllm_tool_call_parser is 'hermez', which the installed vLLM does not have. Did you mean 'hermes'? It has: "
        "hermes, mistral"
    )
    assert second == "vllm_reasoning_parser is 'hermes', which the installed vLLM does not have. It has: qwen3"


def test_a_vllm_that_cannot_list_its_parsers_is_an_error(answer: dict[str, Any]) -> None:
    answer |= {"returncode": 1, "stderr": "ModuleNotFoundError: No module named 'vllm.tool_parsers'"}
    with pytest.raises(
        ConfigError, match=r"vllm_tool_call_parser: vLLM could not list its parsers(.|\n)*No module named"
    ):
        check_chat_parsers(config_of(vllm_tool_call_parser="hermes"))


def test_a_vllm_that_hangs_has_a_deadline(answer: dict[str, Any]) -> None:
    answer["hangs"] = True
    with pytest.raises(ConfigError, match=r"vllm_reasoning_parser: vLLM did not list its parsers within 300 s"):
        check_chat_parsers(config_of(vllm_reasoning_parser="qwen3"))
