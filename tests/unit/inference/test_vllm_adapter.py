"""The wire format, against answers recorded from vLLM 0.26.0 and 0.32.0 (`answers/`)."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.errors import InfrastructureError, UserError
from telescope.inference.base import GenerateRequest, Generation, error_message
from telescope.inference.vllm import adapter as wire
from telescope.inference.vllm import support

ANSWERS = Path(__file__).parent / "answers"
VERSIONS = ("0.26", "0.32")


def recorded(version: str, name: str) -> tuple[bytes, str | None, dict[str, Any]]:
    answer = json.loads((ANSWERS / version / f"{name}.json").read_text())
    return json.dumps(answer["body"]).encode(), answer["spans_header"], answer["body"]


def parse_generate(body: bytes, spans_header: str | None = None, initial_version: int = 0) -> Generation:
    return wire.resolve_versions(wire.read_generate(body, spans_header=spans_header), initial_version=initial_version)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["stop", "length", "abort"])
def test_recorded_answers_of_both_versions_are_read(version: str, name: str) -> None:
    body, header, decoded = recorded(version, name)
    parsed = parse_generate(body, spans_header=header, initial_version=6)
    choice = decoded["choices"][0]
    assert parsed.finish_reason == name
    assert parsed.token_ids_N.tolist() == choice["token_ids"]
    assert parsed.token_ids_N.dtype == np.int32
    expected = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert parsed.logprobs_N.tolist() == np.float32(expected).tolist()
    assert parsed.version_spans == ([(6, 0, len(expected))] if expected else [])


@pytest.mark.parametrize("version", VERSIONS)
def test_an_answer_across_a_weight_update_has_two_versions(version: str) -> None:
    body, header, decoded = recorded(version, "two_versions")
    parsed = parse_generate(body, spans_header=header, initial_version=6)
    num_tokens = len(decoded["choices"][0]["token_ids"])
    (first, start, middle), (second, same, end) = parsed.version_spans
    assert second == first + 1
    assert (start, same, end) == (0, middle, num_tokens)


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_prompt_logprobs_are_those_of_the_prompt(version: str) -> None:
    body, _, decoded = recorded(version, "prompt_logprobs")
    values = wire.parse_prompt_logprobs(body, [20, 21, 22, 23])
    assert values == [decoded["prompt_logprobs"][i][str(20 + i)]["logprob"] for i in (1, 2, 3)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("name", "words"), [("bad_request", "out of vocabulary"), ("server_error", "no_such_method")])
def test_recorded_errors_show_the_servers_own_words(version: str, name: str, words: str) -> None:
    body, _, _ = recorded(version, name)
    assert words in error_message(body)


def test_request_carries_what_reproducibility_needs() -> None:
    request = GenerateRequest("r1", [1, 2], 7, 0.7, top_p=0.9, seed=11, priority=-3)
    body = json.loads(wire.encode_generate(request))
    assert (body["token_ids"], body["priority"]) == ([1, 2], -3)
    assert "cache_salt" not in body
    expected = {"temperature": 0.7, "top_p": 0.9, "seed": 11, "logprobs": 0, "detokenize": False}
    assert {name: body["sampling_params"][name] for name in expected} == expected
    assert "priority" not in json.loads(wire.encode_generate(request, with_priority=False)), "as on servers of fcfs"


def test_the_end_token_ends_an_answer_unless_a_length_is_asked_for() -> None:
    asked = GenerateRequest("r1", [1], 7, 1.0, ignore_eos=True, stop_token_ids=[9], stop=["x"])
    requests = [GenerateRequest("r1", [1], 7, 1.0), asked]
    sampling = [json.loads(wire.encode_generate(request))["sampling_params"] for request in requests]
    assert [options.get("ignore_eos") for options in sampling] == [None, True]
    assert [options.get("stop_token_ids") for options in sampling] == [None, [9]]
    assert [(options.get("stop"), options["detokenize"]) for options in sampling] == [(None, False), (["x"], True)]


def test_routes_are_asked_for_from_the_first_token_without_them() -> None:
    requests = [GenerateRequest("r1", [1, 2, 3], 7, 1.0, routes_start=start) for start in (0, 2)]
    sampling = [json.loads(wire.encode_generate(request))["sampling_params"] for request in requests]
    assert [options.get("routed_experts_prompt_start") for options in sampling] == [None, 2]


def test_abort_names_requests_as_the_engine_knows_them_and_never_none() -> None:
    assert json.loads(wire.encode_abort(["a"])) == {"request_ids": ["generate-tokens-a"]}
    with pytest.raises(AssertionError):  # vLLM would abort everything
        wire.encode_abort([])


def answer(num_tokens: int, spans: list[tuple[str, int, int]] | None, **choice: Any) -> bytes:
    listed = None if spans is None else [{"version": v, "start": s, "end": e} for v, s, e in spans]
    content = [{"token_id": 1, "logprob": -0.5} for _ in range(num_tokens)]
    base = {"token_ids": [1] * num_tokens, "finish_reason": "stop", "weight_versions": listed}
    return msgspec.json.encode({"choices": [{**base, "logprobs": {"content": content}, **choice}]})


@pytest.mark.parametrize(("body", "complaint"), [
    (b"<html>", "not a generate answer"),
    (b'{"choices": []}', "not a generate answer"),
    (answer(3, [("1", 0, 3)], logprobs=None), "0 logprobs for 3 tokens"),
    (answer(3, [("1", 0, 3)], finish_reason="error"), "'error'"),
    (answer(3, None), "does not report which weights"),
    (answer(3, [("blue", 0, 3)]), "'blue'"),
    (answer(3, [("1", 1, 3)]), "do not cover"),
])  # fmt: skip
def test_malformed_answers_are_failures_of_the_engine(body: bytes, complaint: str) -> None:
    with pytest.raises(InfrastructureError, match=complaint):
        parse_generate(body)


@given(st.lists(st.integers(0, 50), max_size=6), st.integers(0, 60))
def test_spans_from_the_header_cover_all_tokens_once(cuts: list[int], num_tokens: int) -> None:
    starts = [0, *sorted(cuts)]
    header = json.dumps([(str(version), start) for version, start in enumerate(starts)])
    parsed = parse_generate(answer(num_tokens, None), spans_header=header)
    covered = [t for _, start, end in parsed.version_spans for t in range(start, end)]
    assert covered == list(range(num_tokens))
    for version, start, end in parsed.version_spans:
        assert end > start
        for token in range(start, end):
            # The last update that came at or before this token.
            assert version == max(v for v, s in enumerate(starts) if s <= token)


def test_label_of_the_first_weights_is_the_initial_version() -> None:
    assert parse_generate(answer(2, [("default", 0, 2)]), initial_version=40).version_spans == [(40, 0, 2)]


def test_versions_outside_the_supported_ones_are_refused_with_the_fix() -> None:
    versions = ("0.26.0", "0.32.0+cpu", "0.29.1rc2")
    assert [support.check_supported(version) for version in versions] == [(0, 26), (0, 32), (0, 29)]
    for version in ("0.25.3", "0.33.0", "1.0.0", None, "dev"):
        with pytest.raises(UserError, match="install"):
            support.check_supported(version)
