"""vLLM's wire format: routes, request bodies and responses of the supported versions.

Translates between `GenerateRequest`/`Generation` and vLLM's HTTP bodies. `launch` builds the process, `client` sends
the bytes. Imports neither vllm nor torch, so the driver can use it.

Invariants: token ids in both directions, never text; logprobs are from the sampled distribution (the server runs with
`--logprobs-mode processed_logprobs`: after temperature and, where set, after top-p, renormalized over the kept mass);
every sampled token has exactly one policy version. Routes (`router_replay`) end with the token before the last sampled
one, which the engine has not processed; a token whose experts are not all different has none.

Responses differ between versions. 0.26 writes a logprob entry in OpenAI's chat format with `token: "token_id:<n>"` and
does not report which weights sampled a token; 0.32 writes `token_id: <n>` and reports spans of weight versions. One
parser reads both: ids from `token_ids`, values from `logprob`, and spans from the body, else from the header of
`policy_version.PolicyVersionMiddleware`.
"""

import base64
import io
import itertools
import operator
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from telescope.errors import InfrastructureError
from telescope.inference.base import GenerateRequest, Generation
from telescope.utils.frames import pack_frame, split_frame

GENERATE_ROUTE = "/inference/v1/generate"
NOT_FINITE = "Out of range float values are not JSON compliant"
"""Message of vLLM's 400 when its response has NaN or an infinity. The text comes from its JSON writer."""
PAUSE_ROUTE = "/pause"
RESUME_ROUTE = "/resume"
ABORT_ROUTE = "/abort_requests"
IS_PAUSED_ROUTE = "/is_paused"
INIT_TRANSFER_ROUTE = "/init_weight_transfer_engine"
START_UPDATE_ROUTE = "/start_weight_update"
UPDATE_WEIGHTS_ROUTE = "/update_weights"
FINISH_UPDATE_ROUTE = "/finish_weight_update"
COLLECTIVE_RPC_ROUTE = "/collective_rpc"
LOAD_ADAPTER_ROUTE = "/v1/load_lora_adapter"

ADAPTER_NAME = "policy"
"""Name of the trained LoRA adapter in a server (`lora_sync: adapter`)."""

REQUEST_ID_PREFIX = "generate-tokens-"
"""Prefix that vLLM adds to the caller's request id; aborts must name the prefixed form."""

VERSION_SPANS_HEADER = "x-telescope-version-spans"
"""Header with (label, first token) pairs as JSON, for engines that do not report spans."""

FINAL_ONLY = 2
"""vLLM's `RequestOutputKind` for a whole response. 0.32 assumes it on this route; 0.26 would build a response of all
tokens so far for every token and discard all but the last."""

INITIAL_LABEL = "default"
"""vLLM's label of the weights that a server started with."""


def engine_request_id(request_id: str) -> str:
    """Returns the engine's id of a request sent with `request_id`."""
    return REQUEST_ID_PREFIX + request_id


# --- requests -------------------------------------------------------------------------------------------------------


def encode_generate(request: GenerateRequest, *, with_priority: bool = True) -> bytes:
    """Returns the body of one generate request. The server itself stamps `cache_salt`.

    `with_priority` is False for a server with the `fcfs` policy, which refuses any priority but 0.
    """
    sampling: dict[str, object] = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "logprobs": 0,  # the sampled token's own logprob, no alternatives
        "detokenize": bool(request.stop),  # vLLM finds the texts that end a completion in its text
        "output_kind": FINAL_ONLY,
    }
    optional = {
        "top_p": request.top_p,
        "seed": request.seed,
        "stop_token_ids": request.stop_token_ids or None,
        "stop": request.stop or None,
        "ignore_eos": request.ignore_eos or None,
        "routed_experts_prompt_start": request.routes_start or None,
    }
    sampling |= {name: value for name, value in optional.items() if value is not None}
    body: dict[str, object] = {
        "request_id": request.request_id,
        "token_ids": request.prompt_token_ids,
        "sampling_params": sampling,
    }
    if with_priority and request.priority:
        body["priority"] = request.priority
    return msgspec.json.encode(body)


def encode_prompt_logprobs(token_ids: list[int], request_id: str) -> bytes:
    """Returns a body that asks for a fixed text's logprobs. Neither temperature nor prefix cache applies."""
    return msgspec.json.encode(
        {
            "request_id": request_id,
            "token_ids": token_ids,
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False},
        }
    )


def encode_abort(request_ids: list[str]) -> bytes:
    """Returns a body that aborts these requests. An empty list would abort all requests."""
    assert request_ids, "an empty abort list means everything to vLLM"
    return msgspec.json.encode({"request_ids": [engine_request_id(r) for r in request_ids]})


# --- responses ------------------------------------------------------------------------------------------------------


class _LogprobEntry(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_LogprobEntry] | None = None


class _WeightSpan(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_WeightSpan] | None = None
    routed_experts: str | None = None


class _GenerateAnswer(msgspec.Struct):
    choices: list[_Choice]


class _PromptAnswer(msgspec.Struct):
    prompt_logprobs: list[dict[str, _LogprobEntry] | None] | None = None


_generate_decoder = msgspec.json.Decoder(_GenerateAnswer)
_spans_decoder = msgspec.json.Decoder(list[tuple[str, int]])

ROUTE_DTYPES = (np.dtype(np.uint8), np.dtype(np.uint16))
"""Types of expert numbers: uint16 for more than 256 experts."""

FINISH_REASONS = ("stop", "length", "abort")


@dataclass(slots=True)
class LabelledAnswer:
    """A `Generation` with weight labels: (label, first token) pairs, or None if the server reports none."""

    token_ids_N: np.ndarray
    logprobs_N: np.ndarray
    finish_reason: str
    label_starts: list[tuple[str, int]] | None
    routes_MXK: np.ndarray | None = None


def read_generate(body: bytes | memoryview, *, spans_header: str | None = None) -> LabelledAnswer:
    """Parses a generate response of any supported version.

    Returns int32 ids and float32 logprobs, both [N]; N may be 0 for an aborted request. Raises `InfrastructureError`
    for anything else.
    """
    try:
        choice = _generate_decoder.decode(body).choices[0]
        starts = None if spans_header is None else _spans_decoder.decode(spans_header)
    except (msgspec.DecodeError, IndexError) as error:
        raise InfrastructureError(f"the engine's answer is not a generate answer: {error}") from error
    token_ids_N = np.array(choice.token_ids or (), dtype=np.int32)
    num_tokens = len(token_ids_N)
    entries = (choice.logprobs.content if choice.logprobs is not None else None) or []
    if len(entries) != num_tokens:
        raise InfrastructureError(f"the engine sent {len(entries)} logprobs for {num_tokens} tokens")
    logprobs_N = np.fromiter(map(operator.attrgetter("logprob"), entries), dtype=np.float32, count=num_tokens)
    if choice.finish_reason not in FINISH_REASONS:
        raise InfrastructureError(f"the engine ended a request with {choice.finish_reason!r}")
    if choice.weight_versions is not None:
        starts = [(span.version, span.start) for span in choice.weight_versions]
    routes = _read_routes(choice.routed_experts) if choice.routed_experts is not None else None
    return LabelledAnswer(token_ids_N, logprobs_N, choice.finish_reason, starts, routes)


def _read_routes(file: str | memoryview) -> np.ndarray:
    """Reads a .npy file, or vLLM's base64 of one. Raises `InfrastructureError` for anything else."""
    try:
        data = base64.b64decode(file, validate=True) if isinstance(file, str) else file
        routes = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise InfrastructureError(f"the engine's routed experts are unreadable: {error}") from error
    if not isinstance(routes, np.ndarray) or routes.dtype not in ROUTE_DTYPES or routes.ndim != 3:
        raise InfrastructureError("the engine's routed experts are not an array [tokens, layers, experts]")
    return routes


def resolve_versions(answer: LabelledAnswer, *, initial_version: int = 0) -> Generation:
    """Converts labels to policy versions. `initial_version` is the version of the server's first weights.

    Raises `InfrastructureError` when a token's weights are unknown.
    """
    num_tokens = len(answer.token_ids_N)
    if answer.label_starts is None and num_tokens:
        raise InfrastructureError("the engine does not report which weights sampled the tokens")
    spans = _close_spans(answer.label_starts or [], num_tokens, initial_version=initial_version)
    return Generation(answer.token_ids_N, answer.logprobs_N, answer.finish_reason, spans, answer.routes_MXK)


# --- responses as arrays --------------------------------------------------------------------------------------------

PACKED_TYPE = "application/x-telescope-generation"
"""Media type of a response from `pack_answer`. A client that reads it lists it in its `Accept` header."""


class _PackedRest(msgspec.Struct):
    finish_reason: str
    label_starts: list[tuple[str, int]] | None
    num_tokens: Annotated[int, msgspec.Meta(ge=0)]


_packed_decoder = msgspec.json.Decoder(_PackedRest)


def pack_answer(answer: LabelledAnswer) -> bytes:
    """Packs a response as a frame. The blob is N int32 ids, N float32 logprobs, and any routes as a .npy file."""
    rest = _PackedRest(answer.finish_reason, answer.label_starts, len(answer.token_ids_N))
    blob = io.BytesIO()
    blob.write(answer.token_ids_N.astype("<i4", copy=False).tobytes())
    blob.write(answer.logprobs_N.astype("<f4", copy=False).tobytes())
    if answer.routes_MXK is not None:
        np.save(blob, answer.routes_MXK)
    return pack_frame(msgspec.json.encode(rest), blob.getvalue())


def unpack_answer(data: bytes | memoryview) -> LabelledAnswer:
    """Inverse of `pack_answer`. Raises `InfrastructureError` for other bytes."""
    try:
        header, blob = split_frame(data)
        rest = _packed_decoder.decode(header)
        num_tokens, routes_at = rest.num_tokens, 8 * rest.num_tokens
        ids_N = np.frombuffer(blob, "<i4", num_tokens).astype(np.int32)
        logprobs_N = np.frombuffer(blob, "<f4", num_tokens, 4 * num_tokens).astype(np.float32)
    except (ValueError, msgspec.DecodeError) as error:
        raise InfrastructureError(f"the server's answer is not a binary response: {error}") from error
    if np.isnan(logprobs_N).any():
        raise InfrastructureError("the server's answer has NaN logprobs: its weights or its cache are corrupt")
    routes = _read_routes(blob[routes_at:]) if len(blob) > routes_at else None
    return LabelledAnswer(ids_N, logprobs_N, rest.finish_reason, rest.label_starts, routes)


def _close_spans(starts: list[tuple[str, int]], num_tokens: int, *, initial_version: int) -> list[tuple[int, int, int]]:
    """Returns (version, start, end) spans that cover `num_tokens`. None is empty, and equal neighbors are joined."""
    spans: list[tuple[int, int, int]] = []
    for position, (label, start) in enumerate(starts):
        following = starts[position + 1][1] if position + 1 < len(starts) else num_tokens
        end = min(following, num_tokens)
        if end <= start:
            continue
        try:
            version = initial_version if label == INITIAL_LABEL else int(label)
        except ValueError as error:
            raise InfrastructureError(f"the engine reports weight version {label!r}, not a policy version") from error
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1], end)
        else:
            spans.append((version, start, end))
    covered = spans[0][1] == 0 and spans[-1][2] == num_tokens if spans else num_tokens == 0
    contiguous = all(left[2] == right[1] for left, right in itertools.pairwise(spans))
    if not covered or not contiguous:
        raise InfrastructureError(f"version spans {spans} do not cover the {num_tokens} sampled tokens")
    return spans


def parse_prompt_logprobs(body: bytes, token_ids: list[int]) -> list[float]:
    """Parses logprobs of tokens 1..L-1 (L - 1 values). Raises `InfrastructureError`."""
    try:
        entries = msgspec.json.decode(body, type=_PromptAnswer).prompt_logprobs
    except msgspec.DecodeError as error:
        raise InfrastructureError(f"the engine's answer has no prompt logprobs: {error}") from error
    if entries is None or len(entries) != len(token_ids):
        found = "none" if entries is None else len(entries)
        raise InfrastructureError(f"asked for prompt logprobs of {len(token_ids)} tokens, the answer has {found}")
    try:
        pairs = zip(entries[1:], token_ids[1:], strict=True)
        return [(logprobs or {})[str(token_id)].logprob for logprobs, token_id in pairs]
    except KeyError as error:
        raise InfrastructureError(f"no logprob of the prompt's token {error} in the engine's answer") from None
