"""Numbers from an engine's readings: windows, costs of steps, idleness, and ratios."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from telescope.inference.vllm.step_meter import StepMeter, StepReading, read_meter


def sample(clock: float, steps: int, tokens: int, *, running: int = 4, beginning: int = 0, cores: float = 1.0) -> Any:
    """At `clock`, of an engine that was busy for nine tenths of the time."""
    from loaded_engine import Sample

    reading = StepReading(clock, 0.9 * clock, steps, tokens, running, beginning)
    return Sample(reading, {"engine": cores * clock, "server": 0.25 * clock, "driver": 0.0})


def test_the_work_of_a_window_is_the_difference_of_its_ends() -> None:
    from loaded_engine import work

    window = [sample(10, 100, 400), sample(11, 150, 600, running=2), sample(12, 200, 820, running=3, beginning=25)]
    found = work(window)
    assert (found["seconds"], found["steps"], found["tokens_per_second"]) == (2, 100, 210)
    assert (found["tokens_a_step"], found["ms_a_step"]) == (4.2, 20)
    assert (found["running"], found["beginning_share"]) == (3, 0.25)
    assert found["idle_share"] == pytest.approx(0.1)
    assert (found["engine_cores"], found["server_cores"], found["driver_cores"]) == (1.0, 0.25, 0.0)


def test_a_window_is_bounded_by_work_not_by_time() -> None:
    from engine_throughput import Span

    fast = [sample(at, 10 * at, 7000 + 100 * at) for at in range(8)]
    slow = [sample(at, 5 * at, 9000 + 50 * at) for at in range(15)]
    for samples in (fast, slow):
        window = Span(200, 700).of(samples)
        begin = samples[0].reading.tokens
        assert (window[0].reading.tokens - begin, window[-1].reading.tokens - begin) == (200, 700)


def test_an_engine_without_a_step_is_idle(tmp_path: Path) -> None:
    from loaded_engine import is_quiet

    def reading() -> StepReading:
        found = read_meter(tmp_path / "steps")
        assert found is not None
        return found

    meter = StepMeter(tmp_path / "steps")
    assert is_quiet(reading(), reading())
    before = reading()
    meter.scheduled()
    assert not is_quiet(before, reading()), "a step is under way"
    before = reading()
    meter.finished(1, running=1)
    assert not is_quiet(before, reading()), "a step has finished"
    assert is_quiet(reading(), reading()), "what is left in the batch when all was aborted is no work"


async def test_an_engine_still_busy_with_the_last_load_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import loaded_engine

    class Busy(loaded_engine.Server):
        def __init__(self) -> None:
            self.steps = 0

        def reading(self) -> StepReading:
            self.steps += 1
            return StepReading(0.0, float(self.steps), self.steps, self.steps, 7)

    monkeypatch.setattr(loaded_engine, "QUIET_SECONDS", 0.001)
    with pytest.raises(TimeoutError, match="7 requests of the last load still run"):
        await Busy().until_idle(timeout=0.01)


async def test_a_cancelled_generator_closes_its_connections() -> None:
    from loaded_engine import under_generator

    received, closed = asyncio.Queue[bytes](), asyncio.Queue[bytes]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
        body = await reader.readexactly(int(length.partition(b":")[2]))
        received.put_nowait(body)
        if body == b"first":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            return await answer(reader, writer)
        closed.put_nowait(await reader.read())
        writer.close()

    class At:
        secret = "secret"
        url = ""

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        At.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        waiting = iter([b"first", b"second", b"third", b"fourth"])
        load = asyncio.create_task(under_generator(At, waiting, 2))  # type: ignore[arg-type]
        async with asyncio.timeout(10):
            bodies = [await received.get() for _ in range(3)]
            load.cancel()
            assert [await closed.get(), await closed.get()] == [b"", b""]
        await asyncio.wait([load])
    assert sorted(bodies) == [b"first", b"second", b"third"]
    assert list(waiting) == [b"fourth"]


def test_loads_are_compared_with_their_neighbors() -> None:
    from engine_throughput import compared

    def load(name: str, pair: int, speed: float, a_step: float) -> dict[str, Any]:
        steps_per_second = speed / a_step
        return {
            "load": name,
            "pair": pair,
            "tokens_per_second": speed,
            "tokens_a_step": a_step,
            "ms_a_step": 1000 / steps_per_second,
        }

    loads = []
    for pair, machine in enumerate((1.0, 0.7, 1.2, 0.8, 1.1, 0.9)):  # differs more from pair to pair than the two do
        loads += [load("orchestrator", pair, 980 * machine, 9.9), load("bare", pair, 1000 * machine, 10.0)]
    found = compared(loads)
    assert found["ratio"] == pytest.approx(0.98)
    assert found["aim_is"] == "met"
    parts = found["estimates"]
    assert parts["tokens_a_step"]["ratio"] == pytest.approx(0.99)
    assert parts["steps_per_second"]["ratio"] == pytest.approx(0.98 / 0.99)
    assert found["tokens_per_second"] == {"orchestrator": 980 * 0.95, "bare": 950.0}


async def test_a_prefix_cache_that_was_not_emptied_is_an_error() -> None:
    from engine_throughput import empty_prefix_cache

    class Client:
        def __init__(self, answer: bytes) -> None:
            self.answer = answer

        async def _control(self, method: str, route: str) -> bytes:
            assert (method, route) == ("POST", "/reset_prefix_cache")
            return self.answer

    await empty_prefix_cache(Client(b'{"success":true}'))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="still in the engine"):
        await empty_prefix_cache(Client(b'{"success":false}'))  # type: ignore[arg-type]


def test_a_load_that_runs_out_of_requests_is_an_error() -> None:
    from engine_throughput import check_tail

    check_tail(True, 640)
    with pytest.raises(RuntimeError, match="all 640 requests were sent"):
        check_tail(False, 640)


def test_requests_are_compared_without_their_ids() -> None:
    from engine_throughput import counted_requests

    one, two = b'{"request_id": "a", "seed": 1}', b'{"request_id": "b", "seed": 2}'
    again = b'{"request_id": "c", "seed": 2}'
    assert counted_requests([one, two]) == counted_requests([again, one])
    assert counted_requests([two]) <= counted_requests([one, again])
    assert not counted_requests([two, again]) <= counted_requests([one, two]), (
        "a request that is asked for twice is another load"
    )
