"""Answers of the fake engine in vLLM's own JSON, 0.32's or 0.26's.

Entries are rendered once, in chunks, and joined, so that thousands of answers of 1,000 tokens cost little and a
benchmark measures the driver.
"""

from __future__ import annotations

import time
from array import array

import msgspec

from telescope.inference.vllm import adapter as wire
from telescope.inference.vllm.support import parse_version, reports_version_spans
from telescope.testing.fake_engine import FakeEngineSettings, FakeRequest

CHUNK_TOKENS = 32
NUM_CHUNKS = 128


class AnswerWriter:
    """Renders answers in vLLM's format. Logprobs are arbitrary but fixed for (token, position)."""

    def __init__(self, settings: FakeEngineSettings) -> None:
        self._with_spans = reports_version_spans(parse_version(settings.vllm_version))
        self._end_token = settings.end_token
        self._vocabulary = settings.vocabulary
        generator = _Generator(12345)
        chunks = [
            [1 + generator.next() % (settings.vocabulary - 1) for _ in range(CHUNK_TOKENS)] for _ in range(NUM_CHUNKS)
        ]
        self._ids = [",".join(map(str, chunk)).encode() for chunk in chunks]
        self._entries = [b",".join(map(self._entry, chunk, range(CHUNK_TOKENS))) for chunk in chunks]

    def _entry(self, token: int, position: int) -> bytes:
        # A float32 written as float64 has as many digits as vLLM's logprobs.
        logprob = array("f", [-((token * 7919 + position * 104_729) % 4_000) / 1_000])[0]
        if self._with_spans:
            pair = f'"token_id":{token},"logprob":{logprob},"rank":1'
            return f'{{{pair},"top_logprobs":[{{{pair}}}]}}'.encode()
        pair = f'"token":"token_id:{token}","logprob":{logprob},"bytes":null'
        return f'{{{pair},"top_logprobs":[{{{pair}}}]}}'.encode()

    def write(self, request: FakeRequest, reason: str) -> bytes:
        """Returns the body of a generate answer for the tokens that `request` has sampled so far."""
        count = request.num_tokens
        ids, entries = self._tokens(request, count)
        spans = b""
        if self._with_spans:
            starts = request.versions
            ends = [start for _, start in starts[1:]] + [count] if starts else []
            listed = [
                {"version": label, "start": start, "end": end} for (label, start), end in zip(starts, ends, strict=True)
            ]
            spans = b',"stop_reason":null,"sampling_mask":null,"weight_versions":' + msgspec.json.encode(listed)
        return b"".join(
            (
                f'{{"request_id":"{wire.engine_request_id(request.request_id)}","model":"fake",'
                f'"created":{int(time.time())},"usage":{{"prompt_tokens":{len(request.prompt)},'
                f'"total_tokens":{len(request.prompt) + count},"completion_tokens":{count},'
                f'"prompt_tokens_details":null}},"prompt_logprobs":null,"kv_transfer_params":null,'
                f'"ec_transfer_params":null,"choices":[{{"index":0,"finish_reason":"{reason}","token_ids":['.encode(),
                ids,
                b'],"routed_experts":null',
                spans,
                b',"logprobs":{"content":[',
                entries,
                b"]}}]}",
            )
        )

    def _tokens(self, request: FakeRequest, count: int) -> tuple[bytes, bytes]:
        if request.answer is not None:
            tokens = request.answer[:count]
            return ",".join(map(str, tokens)).encode(), b",".join(map(self._entry, tokens, range(count)))
        ended = count == request.total and request.finish_reason == "stop" and self._end_token is not None
        plain = count - 1 if ended else count
        generator = _Generator(request.seed)
        ids: list[bytes] = []
        entries: list[bytes] = []
        for _ in range(plain // CHUNK_TOKENS):
            index = generator.next() % NUM_CHUNKS
            ids.append(self._ids[index])
            entries.append(self._entries[index])
        tail = [1 + generator.next() % (self._vocabulary - 1) for _ in range(plain % CHUNK_TOKENS)]
        if ended and self._end_token is not None:
            tail = [*tail, self._end_token]
        if tail:
            ids.append(",".join(map(str, tail)).encode())
            entries.append(b",".join(map(self._entry, tail, range(len(tail)))))
        return b",".join(ids), b",".join(entries)


class _Generator:
    """A small fixed pseudo-random sequence (Knuth's MMIX constants), the same in every Python version."""

    def __init__(self, seed: int) -> None:
        self._state = (seed * 2862933555777941757 + 3037000493) & 0xFFFFFFFFFFFFFFFF

    def next(self) -> int:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        return self._state >> 33
