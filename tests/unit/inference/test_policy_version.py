"""Salts, waiting and spans, against a simple ASGI application without a clock."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.asgi import respond, send_request

from telescope.inference.vllm import adapter as wire
from telescope.inference.vllm.policy_version import REQUIRE_UPDATE_VARIABLE, SALTED_ROUTES, PolicyVersionMiddleware


class Engine:
    """An application that remembers what reached it; `block` keeps generate requests inside it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.block = asyncio.Event()
        self.block.set()
        self.status = 200
        self.counts: dict[str, int] = {}
        self.adapters = {wire.ADAPTER_NAME: SimpleNamespace(load_inplace=True)}

    @property
    def state(self) -> Any:
        states = {
            name: SimpleNamespace(
                external_req_id=name, detokenizer=SimpleNamespace(num_output_tokens=lambda count=count: count)
            )
            for name, count in self.counts.items()
        }
        return SimpleNamespace(
            engine_client=SimpleNamespace(output_processor=SimpleNamespace(request_states=states)),
            openai_serving_models=SimpleNamespace(lora_requests=self.adapters),
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        length = [v for k, v in scope["headers"] if k == b"content-length"]
        assert not length or int(length[0]) == len(body)
        self.seen.append((scope["path"], json.loads(body) if body else {}))
        if scope["path"] in SALTED_ROUTES:
            await self.block.wait()
        await respond(send, b"{}", status=self.status)

    @property
    def salts(self) -> list[str]:
        return [body["cache_salt"] for path, body in self.seen if path in SALTED_ROUTES]


class Caller:
    """Sends requests to the middleware; each returns its status, headers and body."""

    def __init__(self, engine: Engine, *, note_spans: bool = False) -> None:
        self.engine = engine
        self.middleware = PolicyVersionMiddleware(engine, note_spans=note_spans)

    async def post(self, path: str, body: Any = None, *, leave: asyncio.Event | None = None) -> tuple[int, dict, Any]:
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = [(b"content-length", str(len(raw)).encode())]
        response = await send_request(self.middleware, path, raw, leave=leave, headers=headers, app=self.engine)
        return response.status, response.headers, json.loads(response.body) if response.messages else None

    async def generate(self, name: str = "r", **body: Any) -> tuple[int, dict, Any]:
        return await self.post(wire.GENERATE_ROUTE, {"request_id": name, "token_ids": [1], **body})

    async def swap(self, version: int) -> None:
        await self.post(wire.PAUSE_ROUTE)
        await self.post(wire.FINISH_UPDATE_ROUTE, {"weight_version": str(version)})
        await self.post(wire.RESUME_ROUTE)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def caller() -> Caller:
    return Caller(Engine())


@pytest.mark.parametrize("route", sorted(SALTED_ROUTES))
async def test_every_route_that_samples_has_a_salt_of_its_own_after_every_update(caller, route: str) -> None:
    for version in (None, 1, 2, 1, 1):  # a salt does not repeat even when a version does
        if version is not None:
            await caller.swap(version)
        await caller.post(route, {"cache_salt": "mine", "request_id": "r", "token_ids": [1, 2]})
    caller.engine.status = 500
    await caller.post(wire.FINISH_UPDATE_ROUTE, {"weight_version": "1"})
    caller.engine.status = 200
    await caller.generate()
    assert len({"mine", *caller.engine.salts}) == 1 + 5 + 1, "an update that failed changes it too"


async def test_a_request_during_a_pause_waits_for_the_new_version(caller) -> None:
    await caller.post(wire.PAUSE_ROUTE)
    waiting = asyncio.create_task(caller.generate())
    await settle()
    assert caller.engine.salts == []
    await caller.post(wire.FINISH_UPDATE_ROUTE, {"weight_version": "1"})
    await settle()
    assert caller.engine.salts == []
    await caller.post(wire.RESUME_ROUTE)
    assert (await waiting)[0] == 200
    assert caller.engine.salts == [caller.middleware.salt]


async def test_a_second_pause_after_resume_admits_or_delays_the_request(caller) -> None:
    await caller.post(wire.PAUSE_ROUTE)
    waiting = asyncio.create_task(caller.generate())
    await settle()
    await caller.post(wire.RESUME_ROUTE)
    await caller.post(wire.PAUSE_ROUTE)
    await caller.post(wire.FINISH_UPDATE_ROUTE, {"weight_version": "1"})
    await settle()
    before = caller.engine.salts
    await caller.post(wire.RESUME_ROUTE)
    await waiting
    assert caller.engine.salts[0] == (before[0] if before else caller.middleware.salt)
    assert len(caller.engine.salts) == 1


async def test_aborting_a_waiting_request_answers_it_without_admitting_it(caller) -> None:
    await caller.post(wire.PAUSE_ROUTE)
    waiting = asyncio.create_task(caller.generate("gone"))
    await settle()
    await caller.post(wire.ABORT_ROUTE, json.loads(wire.encode_abort(["gone"])))
    status, _, body = await waiting
    assert status == 200
    assert wire.read_generate(json.dumps(body).encode()).finish_reason == "abort"
    await caller.post(wire.RESUME_ROUTE)
    await settle()
    assert caller.engine.salts == []
    assert wire.ABORT_ROUTE in [path for path, _ in caller.engine.seen]


async def test_a_caller_that_disconnects_while_waiting_is_dropped(caller) -> None:
    await caller.post(wire.PAUSE_ROUTE)
    leave = asyncio.Event()
    body = {"request_id": "r", "token_ids": [1]}
    waiting = asyncio.create_task(caller.post(wire.GENERATE_ROUTE, body, leave=leave))
    await settle()
    leave.set()
    assert (await waiting)[0] == 0
    await caller.post(wire.RESUME_ROUTE)
    await settle()
    assert caller.engine.salts == []


async def test_requests_continue_after_a_failed_pause(caller) -> None:
    caller.engine.status = 500
    await caller.post(wire.PAUSE_ROUTE)
    caller.engine.status = 200
    assert (await asyncio.wait_for(caller.generate(), 5))[0] == 200


async def test_spans_are_noted_at_each_update_inside_the_engine() -> None:
    caller = Caller(Engine(), note_spans=True)
    caller.engine.block.clear()
    early = asyncio.create_task(caller.generate("early"))
    await settle()
    caller.engine.counts = {"generate-tokens-early": 5}
    await caller.swap(1)
    late = asyncio.create_task(caller.generate("late"))
    await settle()
    caller.engine.counts = {"generate-tokens-early": 9, "generate-tokens-late": 2}
    await caller.swap(2)
    caller.engine.block.set()
    name = wire.VERSION_SPANS_HEADER.encode()
    assert (await early)[1][name] == b'[["default",0],["1",5],["2",9]]'
    assert (await late)[1][name] == b'[["1",0],["2",2]]'
    assert caller.middleware._spans == {}


async def test_a_restarted_server_samples_nothing_before_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRE_UPDATE_VARIABLE, "1")
    caller = Caller(Engine())
    assert (await caller.generate())[0] == 503
    caller.engine.status = 500
    await caller.swap(3)
    assert (await caller.generate())[0] == 503
    caller.engine.status = 200
    await caller.swap(3)
    assert (await caller.generate())[0] == 200
    assert len(caller.engine.salts) == 1


async def test_a_body_that_is_not_json_reaches_vllm_unchanged() -> None:
    engine = Engine()
    reached: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append((await receive())["body"])
        await respond(send, b"{}", status=400)

    caller = Caller(engine)
    caller.middleware = PolicyVersionMiddleware(app, note_spans=False)
    assert (await caller.post(wire.GENERATE_ROUTE, b"{not json"))[0] == 400
    assert reached == [b"{not json"]


async def test_requests_name_the_adapter_once_one_is_loaded() -> None:
    engine = Engine()
    caller = Caller(engine)
    await caller.generate("before")
    engine.status = 400
    await caller.post(wire.LOAD_ADAPTER_ROUTE, {"lora_name": wire.ADAPTER_NAME})
    engine.status = 200
    await caller.generate("after a failure")
    assert engine.adapters[wire.ADAPTER_NAME].load_inplace
    await caller.post(wire.LOAD_ADAPTER_ROUTE, {"lora_name": wire.ADAPTER_NAME})
    await caller.generate("after", model="base")
    models = [body.get("model") for path, body in engine.seen if path == wire.GENERATE_ROUTE]
    assert models == [None, None, wire.ADAPTER_NAME]
    assert not engine.adapters[wire.ADAPTER_NAME].load_inplace  # or vLLM would read its files at every step
