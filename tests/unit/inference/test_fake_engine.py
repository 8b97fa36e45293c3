"""The fake engine behaves as documented; other tests depend on it."""

from __future__ import annotations

import asyncio
import statistics

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.app import AnswerWriter
from tests.fakes.engine import FakeEngine, FakeEngineSettings, FakeRequest

from telescope.inference.base import Generation
from telescope.inference.vllm import adapter as wire


async def sample(engine: FakeEngine, name: str, *, seed: int | None = 1, max_tokens: int = 10_000) -> FakeRequest:
    request = engine.submit(name, [1, 2, 3], max_tokens, seed, 0, None)
    await request.done
    return request


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0"])
@given(seed=st.integers(0, 2**31), length=st.integers(1, 200), cut=st.integers(1, 220))
@settings(max_examples=25, deadline=None)
def test_answers_are_of_vllms_form_and_follow_from_the_seed(version: str, seed: int, length: int, cut: int) -> None:
    async def answer() -> Generation:
        options = FakeEngineSettings(mean_tokens=length, vllm_version=version)
        engine = FakeEngine(options)
        request = await sample(engine, "r", seed=seed, max_tokens=cut)
        body = AnswerWriter(options).write(request, request.done.result())
        return wire.resolve_versions(wire.read_generate(body, spans_header="default:0"))

    first, second = asyncio.run(answer()), asyncio.run(answer())
    assert first.token_ids_N.tolist() == second.token_ids_N.tolist()
    assert first.logprobs_N.tolist() == second.logprobs_N.tolist()
    assert len(first.token_ids_N) == min(length, cut)
    assert first.finish_reason == ("stop" if length <= cut else "length")
    assert (first.token_ids_N[-1] == 0) == (first.finish_reason == "stop")
    assert first.version_spans == [(0, 0, min(length, cut))]


async def test_different_seeds_give_different_answers() -> None:
    engine = FakeEngine(FakeEngineSettings(mean_tokens=64))
    writer = AnswerWriter(engine.settings)
    bodies = {writer.write(await sample(engine, "r", seed=seed), "stop") for seed in range(20)}
    assert len(bodies) == 20


async def test_log_normal_lengths_have_the_stated_mean() -> None:
    engine = FakeEngine(FakeEngineSettings(mean_tokens=200, length_sigma=0.7))
    lengths = [(await sample(engine, f"r{seed}", seed=seed)).total for seed in range(1500)]
    assert statistics.mean(lengths) == pytest.approx(200, rel=0.1)
    assert statistics.pstdev(lengths) > 80


async def test_scripted_answers_are_sampled_as_given() -> None:
    engine = FakeEngine(FakeEngineSettings(), answer=lambda request: [*request.prompt, 0])
    request = await sample(engine, "r")
    parsed = wire.resolve_versions(wire.read_generate(AnswerWriter(engine.settings).write(request, "stop")))
    assert parsed.token_ids_N.tolist() == [1, 2, 3, 0]
    assert parsed.finish_reason == "stop"


async def test_only_max_running_run_and_the_lowest_priority_value_goes_first() -> None:
    engine = FakeEngine(FakeEngineSettings(max_running=1, tokens_per_second=100_000))
    ended: list[str] = []
    requests: list[FakeRequest] = []
    for name, priority in [("first", 9), ("late", 5), ("early", -1), ("middle", 0)]:
        request = engine.submit(name, [1], 10, 1, priority, None)
        request.done.add_done_callback(lambda _, name=name: ended.append(name))
        requests.append(request)
    assert (engine.num_running, engine.num_waiting) == (1, 3)
    await asyncio.gather(*(request.done for request in requests))
    assert ended == ["first", "early", "middle", "late"]
    assert (engine.num_running, engine.num_waiting) == (0, 0)


@given(st.lists(st.sampled_from(["submit", "abort", "pause", "resume", "update", "wait"]), max_size=40))
@settings(max_examples=40, deadline=None)
def test_no_order_of_events_loses_a_request_or_a_slot(events: list[str]) -> None:
    async def play() -> None:
        engine = FakeEngine(FakeEngineSettings(mean_tokens=20, tokens_per_second=5_000, max_running=3))
        requests: list[FakeRequest] = []
        version = 0
        for event in events:
            if event == "submit":
                requests.append(engine.submit(f"r{len(requests)}", [1], 100, len(requests), 0, None))
            elif event == "abort" and requests:
                engine.abort([requests[-1].request_id])
            elif event == "pause":
                engine.pause("keep")
            elif event == "resume":
                engine.resume()
            elif event == "update":
                version += 1
                engine.pause("keep")
                engine.finish_update(str(version))
                engine.resume()
            else:
                await asyncio.sleep(0.001)
        engine.resume()
        reasons = [await asyncio.wait_for(r.done, 5) for r in requests]
        assert engine.requests == {}
        assert (engine.num_running, engine.num_waiting) == (0, 0)
        assert engine.num_finished == reasons.count("stop")
        assert engine.num_aborted == reasons.count("abort")
        for request, reason in zip(requests, reasons, strict=True):
            assert_versions_cover(request, reason)

    asyncio.run(play())


def assert_versions_cover(request: FakeRequest, reason: str) -> None:
    starts = [start for _, start in request.versions]
    assert starts == sorted(starts)
    if request.num_tokens:
        assert starts[0] == 0
        assert starts[-1] <= request.num_tokens
    if reason == "stop":
        assert request.num_tokens == request.total


def test_settings_survive_the_command_line() -> None:
    options = FakeEngineSettings(mean_tokens=5, error_every=3)
    assert msgspec.json.decode(msgspec.json.encode(options), type=FakeEngineSettings) == options
