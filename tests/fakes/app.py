"""ASGI application with vLLM's routes over a fake engine.

Owns the answers of the routes, and faults on demand; `engine` is the engine, `server` the server. Routes and
JSON follow vLLM 0.32 or 0.26 (`FakeEngineSettings.vllm_version`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from inspect import isawaitable
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import msgspec
import numpy as np
from starlette.types import Receive, Scope, Send
from tests.fakes.engine import AnswerFunction, FakeEngine, FakeEngineSettings, FakeRequest

from telescope.inference.base import HEALTH_ROUTE, METRICS_ROUTE
from telescope.inference.vllm import adapter as wire
from telescope.inference.vllm.policy_version import read_body, wait_for_disconnect
from telescope.inference.vllm.support import parse_version, reports_version_spans

WorkerFunction = Callable[[str, list[Any]], list[Any]]


class FakeEngineApp:
    """ASGI application with vLLM's routes over a `FakeEngine`, with faults on demand."""

    def __init__(
        self, settings: FakeEngineSettings, answer: AnswerFunction | None = None, worker: WorkerFunction | None = None
    ) -> None:
        self.settings = settings
        self.engine = FakeEngine(settings, answer)
        self.num_requests = 0
        self.fail_next = 0
        self.hang_next = 0
        self._writer = AnswerWriter(settings)
        self._worker = worker
        self._routes: dict[tuple[str, str], Callable[..., Any]] = {
            ("POST", wire.PAUSE_ROUTE): self._pause, ("POST", wire.RESUME_ROUTE): self._resume,
            ("GET", wire.IS_PAUSED_ROUTE): lambda *_: (200, {"is_paused": self.engine.paused}),
            ("POST", wire.ABORT_ROUTE): self._abort, ("GET", HEALTH_ROUTE): lambda *_: (200, {}),
            ("GET", METRICS_ROUTE): self._metrics,
            ("GET", "/version"): lambda *_: (200, {"version": settings.vllm_version}),
            ("POST", wire.INIT_TRANSFER_ROUTE): self._init_transfer,
            ("POST", wire.START_UPDATE_ROUTE): self._start_update,
            ("POST", wire.UPDATE_WEIGHTS_ROUTE): self._update_weights,
            ("POST", wire.FINISH_UPDATE_ROUTE): self._finish_update,
            ("POST", wire.COLLECTIVE_RPC_ROUTE): self._collective_rpc,
        }  # fmt: skip

    @property
    def state(self) -> SimpleNamespace:
        """Application state that the policy version middleware reads."""
        states = {
            r.request_id: SimpleNamespace(
                external_req_id=wire.engine_request_id(r.request_id),
                detokenizer=SimpleNamespace(num_output_tokens=lambda r=r: r.num_tokens),
            )
            for r in self.engine.requests.values()
        }
        processor = SimpleNamespace(request_states=states)
        return SimpleNamespace(engine_client=SimpleNamespace(output_processor=processor))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        assert scope["type"] == "http", scope["type"]
        method, path = scope["method"], scope["path"]
        if path == wire.GENERATE_ROUTE and method == "POST":
            await self._generate(receive, send)
            return
        handler = self._routes.get((method, path))
        if handler is None:
            await _send_json(send, 404, {"detail": "Not Found"})
            return
        raw = await read_body(receive)
        try:
            body = msgspec.json.decode(raw) if raw else {}
        except msgspec.DecodeError as error:
            await _send_json(send, 400, {"detail": f"JSON decode error: {error}"})
            return
        query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode()).items()}
        if path == wire.UPDATE_WEIGHTS_ROUTE:
            await asyncio.sleep(self.settings.update_seconds)
        result = handler(body, query)
        status, answer = await result if isawaitable(result) else result
        await _send_json(send, status, answer)

    # --- generate ---------------------------------------------------------------------------------------------------

    async def _generate(self, receive: Receive, send: Send) -> None:
        raw = await read_body(receive)
        self.num_requests += 1
        settings = self.settings
        if self.fail_next > 0 or (settings.error_every and self.num_requests % settings.error_every == 0):
            self.fail_next = max(0, self.fail_next - 1)
            await _send_error(send, 500, "EngineCore encountered an issue.", "InternalServerError")
            return
        left = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            if self.hang_next > 0:
                self.hang_next -= 1
                await left
                return
            try:
                body = msgspec.json.decode(raw)
                complaint = self._complaint(body)
            except (msgspec.DecodeError, KeyError, TypeError) as error:
                body, complaint = {}, f"malformed request: {error!r}"
            if complaint is not None:
                await _send_error(send, 400, complaint, "BadRequestError")
                return
            sampling, prompt = body["sampling_params"], body["token_ids"]
            if sampling.get("prompt_logprobs") is not None:
                await _send_json(send, 200, self._prompt_answer(prompt))
                return
            request = self.engine.submit(
                body["request_id"], prompt, sampling.get("max_tokens", settings.max_model_len), sampling.get("seed"),
                body.get("priority", 0), body.get("cache_salt"),
            )  # fmt: skip
            left.add_done_callback(lambda _: self.engine.abort([request.request_id]))
            reason = await request.done
            await _send_json(send, 200, self._writer.write(request, reason))
        finally:
            left.cancel()

    def _complaint(self, body: dict[str, Any]) -> str | None:
        prompt = body["token_ids"]
        if not prompt or any(token < 0 for token in prompt):
            return "token_ids must be a non-empty list of non-negative integers"
        if len(prompt) >= self.settings.max_model_len:
            return f"This model's maximum context length is {self.settings.max_model_len} tokens."
        if body["sampling_params"].get("temperature", 1.0) < 0:
            return "temperature must be non-negative"
        if body.get("priority", 0) and self.settings.scheduling_policy != "priority":
            return "Got priority but Priority scheduling is not enabled."
        if body["request_id"] in self.engine.requests:
            return f"request id {body['request_id']} is in use"
        return None

    def _prompt_answer(self, prompt: list[int]) -> dict[str, Any]:
        shift = self.engine.num_updates * 0.001  # so that a probe sees whether weights changed
        entries: list[dict[str, Any] | None] = [None]
        for token in prompt[1:]:
            entries.append({str(token): {"logprob": -(token % 50) / 10 - shift, "rank": 1, "decoded_token": None}})
        choice = {"index": 0, "finish_reason": "length", "token_ids": [prompt[-1]], "logprobs": None}
        return {"request_id": "probe", "choices": [choice], "prompt_logprobs": entries}

    # --- control ----------------------------------------------------------------------------------------------------

    def _pause(self, body: Any, query: dict[str, str]) -> tuple[int, Any]:
        mode = query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            return 400, {"error": f"Invalid pause mode: {mode}"}
        self.engine.pause(mode)
        return 200, {"status": "paused"}

    def _resume(self, body: Any, query: dict[str, str]) -> tuple[int, Any]:
        self.engine.resume()
        return 200, {"status": "resumed"}

    def _abort(self, body: Any, query: dict[str, str]) -> tuple[int, Any]:
        ids = body.get("request_ids")
        named = [str(i).removeprefix(wire.REQUEST_ID_PREFIX) for i in ids] if ids else None
        return 200, {"status": "aborted", "aborted": self.engine.abort(named)}

    def _metrics(self, body: Any, query: dict[str, str]) -> tuple[int, Any]:
        engine = self.engine
        lines = (
            "# TYPE vllm:num_requests_running gauge",
            f'vllm:num_requests_running{{engine="0"}} {float(engine.num_running)}',
            f'vllm:num_requests_waiting{{engine="0"}} {float(engine.num_waiting)}',
            f'vllm:request_success_total{{engine="0",finished_reason="stop"}} {float(engine.num_finished)}',
            f'vllm:request_success_total{{engine="0",finished_reason="abort"}} {float(engine.num_aborted)}',
        )
        return 200, "\n".join(lines).encode() + b"\n"

    def _init_transfer(self, body: Any, query: dict[str, str]) -> tuple[int, Any]:
        self.engine.transfer_info.append(body["init_info"])
        return 200, {"message": "Weight transfer initialized"}

    def _start_update(self, body: Any, query: dict[str, str]) -> tuple[int, Any]:
        if self.engine.update_active:
            return 500, _error("start_weight_update called while a weight update is already active.")
        self.engine.update_active = True
        return 200, {"message": "Weight update started"}

    def _update_weights(self, body: Any, query: dict[str, str]) -> tuple[int, Any]:
        if not self.engine.update_active:
            return 500, _error("start_weight_update must be called before update_weights.")
        return 200, {"message": "Weights updated"}

    def _finish_update(self, body: Any, query: dict[str, str]) -> tuple[int, Any]:
        if not self.engine.update_active:
            return 500, _error("finish_weight_update called without a matching start_weight_update.")
        self.engine.finish_update(body.get("weight_version"))
        return 200, {"message": "Weight update finished"}

    def _collective_rpc(self, body: Any, query: dict[str, str]) -> tuple[int, Any]:
        return 200, {"results": self._worker(body["method"], body.get("args", [])) if self._worker else [{}]}


def _error(message: str, kind: str = "InternalServerError", code: int = 500) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


async def _send_error(send: Send, status: int, message: str, kind: str) -> None:
    await _send_json(send, status, _error(message, kind, status))


async def _send_json(send: Send, status: int, content: Any) -> None:
    body = content if isinstance(content, bytes) else msgspec.json.encode(content)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class AnswerWriter:
    """Renders answers in vLLM's format. Logprobs are arbitrary but fixed for (token, position)."""

    def __init__(self, settings: FakeEngineSettings) -> None:
        self._with_spans = reports_version_spans(parse_version(settings.vllm_version))
        self._end_token = settings.end_token
        self._vocabulary = settings.vocabulary

    def write(self, request: FakeRequest, reason: str) -> bytes:
        """Encodes the answer with the tokens that `request` has."""
        ids = self._tokens(request)
        count = len(ids)
        content = msgspec.Raw(f"[{','.join(map(self._entry, ids, _logprobs(ids)))}]".encode())
        choice: dict[str, Any] = {
            "index": 0, "finish_reason": reason, "token_ids": ids, "routed_experts": None,
            "logprobs": {"content": content},
        }  # fmt: skip
        if self._with_spans:
            ends = [start for _, start in request.versions[1:]] + [count]
            spans = zip(request.versions, ends, strict=False)
            listed = [{"version": label, "start": start, "end": end} for (label, start), end in spans]
            choice |= {"stop_reason": None, "sampling_mask": None, "weight_versions": listed}
        tokens = {"prompt_tokens": len(request.prompt), "completion_tokens": count, "prompt_tokens_details": None}
        answer = {
            "request_id": wire.engine_request_id(request.request_id), "model": "fake", "created": int(time.time()),
            "usage": {**tokens, "total_tokens": len(request.prompt) + count}, "prompt_logprobs": None,
            "kv_transfer_params": None, "ec_transfer_params": None, "choices": [choice],
        }  # fmt: skip
        return msgspec.json.encode(answer)

    def _tokens(self, request: FakeRequest) -> list[int]:
        if request.answer is not None:
            return request.answer[: request.num_tokens]
        ids = random.Random(request.seed).choices(range(1, self._vocabulary), k=request.total)
        if request.finish_reason == "stop" and self._end_token is not None:
            ids[-1] = self._end_token
        return ids[: request.num_tokens]

    def _entry(self, token: int, logprob: float) -> str:
        name = f'"token_id":{token},' if self._with_spans else f'"token":"token_id:{token}","bytes":null,'
        own = f'{name}"logprob":{logprob},"rank":1'
        return f'{{{own},"top_logprobs":[{{{own}}}]}}'


def _logprobs(ids: Sequence[int]) -> list[float]:
    mixed_N = (np.array(ids, dtype=np.int64) * 7919 + np.arange(len(ids)) * 104_729) % 4_000
    # A float32 written as float64 has as many digits as vLLM's logprobs.
    logprobs: list[float] = (-mixed_N / 1_000).astype(np.float32).tolist()
    return logprobs
