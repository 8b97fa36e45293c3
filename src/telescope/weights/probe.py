"""Verifies weights: compares fingerprints, and the logprobs of one text.

Owns the verdict. Pure: the fingerprints come from `sender` and `engine_weights`, the logprobs from the trainer and the
engine.

Two independent checks. *Fingerprints* are exact: one bit of one tensor in one worker changes the verdict, at any
learning rate. *Logprobs* are approximate, but cover the whole forward pass of both sides and so detect what no
comparison of weights can: another RoPE, a wrong norm epsilon, a graph that reads old addresses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from telescope.utils.text import listed
from telescope.weights.plan import add_fingerprints, as_matrix_shape, to_hex


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds on |trainer logprob - engine logprob|, in nats, over the probe's text."""

    maximum: float
    mean: float


TOLERANCES: Mapping[str, Tolerance] = {
    # On a CPU the same arithmetic in another order, 1e-6 to 1e-5 on small models. On a GPU the engine's attention
    # multiplies float32 in TF32: measured 8e-4 on average and 3e-3 at most. A wrong layer causes 0.1 and more.
    "float32": Tolerance(maximum=2e-2, mean=4e-3),
    # Rounding of 2^-11 and 2^-8 in every layer of one or both sides. A rare token can have a large error, not the mean.
    "float16": Tolerance(maximum=0.2, mean=0.02),
    "bfloat16": Tolerance(maximum=1.0, mean=0.08),
    # Rounding of 2^-4 of weights and activations in every product of one side.
    "fp8_per_block": Tolerance(maximum=4.0, mean=0.3),
}
"""Tolerances by dtype or quantization. They are wide because fingerprints detect stale weights."""


TEXT_TOKENS = 64
"""Length of the text whose logprobs are compared."""


def probe_text(prompt: list[int], max_model_len: int) -> list[int]:
    """Returns the beginning of a prompt, or a prompt of one token twice: the first token of a text has no logprob."""
    return (prompt if len(prompt) > 1 else 2 * prompt)[: min(TEXT_TOKENS, max_model_len - 1)]


def loosest_tolerance(dtypes: Sequence[str], temperature: float) -> tuple[str, Tolerance]:
    """Returns the least exact dtype and its bounds on logprob differences.

    A temperature below 1 multiplies differences of logits by its inverse.
    """
    # Engines never compute in float64, so the bounds of float32 are the tightest.
    bounds = {dtype: TOLERANCES.get(dtype, TOLERANCES["float32"]) for dtype in dtypes}
    loosest = max(dtypes, key=lambda dtype: bounds[dtype].mean)
    scale = 1.0 / min(temperature, 1.0)
    return loosest, Tolerance(bounds[loosest].maximum * scale, bounds[loosest].mean * scale)


@dataclass(frozen=True, slots=True)
class LogprobComparison:
    """Differences of logprobs over N tokens, in nats, with their bounds."""

    num_tokens: int
    maximum: float
    mean: float
    tolerance: Tolerance

    @property
    def ok(self) -> bool:
        # Written so that NaN fails.
        return self.maximum <= self.tolerance.maximum and self.mean <= self.tolerance.mean


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Result for one engine. `mismatched` maps each tensor that is not loaded as sent to the reason."""

    num_tensors: int
    mismatched: dict[str, str] = field(default_factory=dict)
    unaccounted: list[str] = field(default_factory=list)
    """Parameters of the engine for which nothing was sent."""
    moved: list[str] = field(default_factory=list)
    """Parameters whose storage has moved since the start: captured graphs would read the old one."""
    logprobs: LogprobComparison | None = None
    has_adapter: bool = False
    """Whether the engine has an adapter, so that only logprobs were compared."""

    @property
    def ok(self) -> bool:
        if self.has_adapter:
            return self.logprobs is not None and self.logprobs.ok
        return self.is_loaded and (self.logprobs is None or self.logprobs.ok)

    @property
    def is_loaded(self) -> bool:
        """Returns whether the engine has every tensor as sent."""
        return self.num_tensors > 0 and not (self.mismatched or self.unaccounted or self.moved)

    def __str__(self) -> str:
        parts = []
        if not self.has_adapter:
            parts.append(f"{self.num_tensors - len(self.mismatched)} of {self.num_tensors} tensors loaded as sent")
        if self.mismatched:
            parts.append("not loaded as sent: " + listed(f"{n} ({why})" for n, why in self.mismatched.items()))
        if self.unaccounted:
            parts.append("in the engine but never sent: " + listed(self.unaccounted))
        if self.moved:
            parts.append("moved in memory: " + listed(self.moved))
        if self.logprobs is not None:
            bound = self.logprobs.tolerance
            parts.append(
                f"logprobs of {self.logprobs.num_tokens} tokens differ by {self.logprobs.maximum:.2g} at most "
                f"(allowed {bound.maximum:g}), {self.logprobs.mean:.2g} on average (allowed {bound.mean:g})"
            )
        return "; ".join(parts)


def compare(
    *,
    sent: Mapping[str, str],
    loaded: Sequence[Mapping[str, Any]] | None,
    trainer_logprobs: Sequence[float] | None = None,
    engine_logprobs: Sequence[float] | None = None,
    precisions: Sequence[str] = ("float32",),
) -> ProbeReport:
    """Compares one engine with the sent tensors. `sent` is `SendReport.fingerprints` of all ranks.

    `loaded` is the result of `EngineBackend.fingerprints`, None for an engine with an adapter. Logprobs are of the same
    tokens in the same order; give both or none. `precisions` are what engine and trainer multiply with.
    """
    logprobs = None
    if trainer_logprobs is not None and engine_logprobs is not None:
        logprobs = compare_logprobs(trainer_logprobs, engine_logprobs, precisions)
    if loaded is None:
        return ProbeReport(0, logprobs=logprobs, has_adapter=True)
    mismatched = {} if loaded else dict.fromkeys(sent, "no worker answered")
    reported = {name for worker in loaded for name in worker.get("tensors", {})}
    ignored = {name for worker in loaded for name in worker.get("ignored", ())}
    for name in [*(sent.keys() - ignored), *sorted(reported - set(sent))] if loaded else ():
        if reason := _mismatch(name, sent.get(name), loaded):
            mismatched[name] = reason
    return ProbeReport(
        num_tensors=len(sent),
        mismatched=mismatched,
        unaccounted=sorted({name for worker in loaded for name in worker.get("unaccounted", ())}),
        moved=sorted({name for worker in loaded for name in worker.get("moved", ())}),
        logprobs=logprobs,
    )


def compare_logprobs(trainer: Sequence[float], engine: Sequence[float], precisions: Sequence[str]) -> LogprobComparison:
    """Compares logprobs of the same tokens at temperature 1, with the tolerance of the least exact precision.

    Raises ValueError if the two sides have different numbers of tokens, or none.
    """
    if len(trainer) != len(engine) or not trainer:
        raise ValueError(f"cannot compare {len(trainer)} logprobs of the trainer with {len(engine)} of the engine")
    differences = [abs(a - b) for a, b in zip(trainer, engine, strict=True)]
    # max() ignores NaN, a sum does not.
    mean = sum(differences) / len(differences)
    maximum = max(differences) if mean == mean else mean
    return LogprobComparison(len(differences), maximum, mean, loosest_tolerance(precisions, 1.0)[1])


def _mismatch(name: str, sent: str | None, loaded: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns why the workers do not have `name` as it was sent. None if they do."""
    if sent is None:
        return "the engine expects it, but it was not sent"
    shape = next((worker["shapes"][name] for worker in loaded if name in worker.get("shapes", {})), None)
    places: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for rank, worker in enumerate(loaded):
        for share in worker.get("tensors", {}).get(name, ()):
            places.setdefault(share["place"], []).append((rank, share))
    if shape is None or not places:
        return "the engine has no location for it"
    for place, shares in places.items():
        reason = _mismatch_in_place(tuple(shape), sent, shares)
        if reason is not None:
            return f"{place}: {reason}"
    return None


def _mismatch_in_place(
    shape: tuple[int, ...], sent: str, shares: Sequence[tuple[int, Mapping[str, Any]]]
) -> str | None:
    """Checks that shares cover the tensor, add up to its fingerprint exactly, and are equal where repeated."""
    parts: dict[tuple[int, int, int, int], str] = {}
    for rank, share in shares:
        if share.get("problem"):
            return f"worker {rank}: {share['problem']}"
        if not share["exact"]:
            return f"worker {rank} has values that do not fit the dtype that was sent"
        area = (*share["rows"], *share["columns"])
        if parts.setdefault(area, share["fingerprint"]) != share["fingerprint"]:
            return f"worker {rank} has other values than its replica"
    rows, columns = as_matrix_shape(shape)
    if not _tiles(set(parts), rows, columns):
        return f"the workers' parts {sorted(parts)} do not cover {rows} x {columns}"
    total = to_hex(add_fingerprints([int(value, 16) for value in parts.values()]))
    if total != sent:
        return f"fingerprint {total}, sent {sent}"
    return None


def _tiles(areas: set[tuple[int, int, int, int]], rows: int, columns: int) -> bool:
    """Returns whether rectangles cover rows x columns exactly once.

    They are (row start, row end, column start, column end). Correct for partitions along one dimension, the only ones
    in tensor parallelism.
    """
    by_rows = all(area[2:] == (0, columns) for area in areas)
    if not by_rows and any(area[:2] != (0, rows) for area in areas):
        return False
    ranges = sorted(area[:2] if by_rows else area[2:] for area in areas)
    ends = [end for _, end in ranges]
    return [start for start, _ in ranges] == [0, *ends[:-1]] and ends[-1] == (rows if by_rows else columns)
