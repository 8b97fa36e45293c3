"""Packs samples into micro-batches of optimizer steps and ranks, which are data-parallel ranks here (`batch.Layout`).

Imports numpy only, because the driver packs. Invariants of every packing: each trained token is in exactly one
micro-batch of one rank. A group is never split over two optimizer steps. All ranks get the same number of micro-batches
in each optimizer step (FSDP's collectives run once per micro-batch on every rank, so uneven counts would hang). The
loss is divided by counts over all ranks. A dummy micro-batch (nothing trained) appears only if an optimizer step has
fewer samples than micro-batches.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from telescope.trainer.batch import MicroBatch, OptimizerStepBatch, StepInput, TrainSample

ATTENTION_CROSSOVER_TOKENS = 16_384
"""Length at which causal attention costs as much as the rest of a layer, about 12 x hidden size, here for a 1.5B model.
It only affects the balance between ranks, so it need not be exact."""

SHORTEST_ROW = 2
"""Minimum tokens of a row. A size of 1 would be compiled separately, which takes a minute on a GPU."""

ARRAYS_OF_TOKENS = ("token_ids_L", "trained_L", "engine_logprob_L", "version_L", "routes_LXK")


def sample_cost(length: int) -> float:
    """Computes the relative cost of a sample: its tokens, plus their square for attention."""
    return length + length * length / ATTENTION_CROSSOVER_TOKENS


def _bin_cost(row: list[int], lengths: Sequence[int]) -> float:
    return sum(sample_cost(lengths[i]) for i in row)


def pack_step(
    samples: Sequence[TrainSample],
    *,
    step: int,
    version: int,
    seq_len: int,
    num_ranks: int,
    pad_to_multiple_of: int = 1,
    num_minibatches: int = 1,
    packs: bool = True,
) -> list[StepInput]:
    """Packs one training batch for all ranks. Element r of the result is for rank r.

    Without `packs`, samples of a micro-batch do not share a row, and `seq_len` bounds their number times the longest.
    Samples without a trained token are left out and not counted. With fewer groups than `num_minibatches` there are as
    many optimizer steps as groups, and none without trained tokens. Raises `ValueError` for a sample longer than
    `seq_len`; `truncate_to` is the alternative.
    """
    usable = [sample for sample in samples if sample.num_trained > 0]
    for sample in usable:
        if sample.length > seq_len:
            raise ValueError(
                f"sample {sample.sample_id} has {sample.length} tokens, more than seq_len = {seq_len}: "
                "raise seq_len or lower max_model_len"
            )
        if sample.trained_L[0]:
            raise ValueError(f"sample {sample.sample_id} trains its first token, which nothing predicts")
    per_rank: list[list[OptimizerStepBatch]] = [[] for _ in range(num_ranks)]
    for chunk in split_groups(usable, num_minibatches):
        bins = assign_bins([sample.length for sample in chunk], seq_len, num_ranks, packs=packs)
        num_trained = sum(sample.num_trained for sample in chunk)
        for rank, rows in enumerate(deal_bins(bins, [sample.length for sample in chunk], num_ranks)):
            micro_batches = [lay_out([chunk[i] for i in row], pad_to_multiple_of) for row in rows]
            per_rank[rank].append(OptimizerStepBatch(micro_batches, num_trained, len(chunk)))
    return [StepInput(step=step, version=version, minibatches=minibatches) for minibatches in per_rank]


def split_groups(samples: Sequence[TrainSample], num_minibatches: int) -> list[list[TrainSample]]:
    """Splits a batch into at most `num_minibatches` non-empty lists of whole groups, of even sizes."""
    groups: dict[int, list[TrainSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    members = list(groups.values())
    num_parts = min(num_minibatches, len(members))
    bounds = [len(members) * part // num_parts for part in range(num_parts + 1)] if num_parts else []
    return [[sample for group in members[start:end] for sample in group] for start, end in pairwise(bounds)]


def assign_bins(lengths: Sequence[int], capacity: int, num_ranks: int, *, packs: bool = True) -> list[list[int]]:
    """Assigns samples to bins of similar cost.

    Their number is a multiple of `num_ranks`, and each holds at most `capacity` tokens. First-fit by decreasing length
    finds a sufficient number of bins, rounded up to a multiple of the ranks. The samples are then distributed again,
    each to the cheapest bin with space. If that does not fit, the most expensive of the first-fit bins are halved until
    there are enough. Bins are empty only if there are fewer samples than bins. Without `packs`, each sample takes as
    many tokens of a bin as the longest sample in it, which is the first.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    tight = _first_fit(order, lengths, capacity, packs)
    num_bins = -(-len(tight) // num_ranks) * num_ranks
    spread = _spread(order, lengths, capacity, num_bins, packs)
    return spread if spread is not None else _halve_until(tight, lengths, num_bins)


def _first_fit(order: Sequence[int], lengths: Sequence[int], capacity: int, packs: bool) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for i in order:
        for b, free in enumerate(room):
            taken = lengths[i if packs else bins[b][0]]
            if taken <= free:
                bins[b].append(i)
                room[b] -= taken
                break
        else:
            bins.append([i])
            room.append(capacity - lengths[i])
    return bins


def _spread(
    order: Sequence[int], lengths: Sequence[int], capacity: int, num_bins: int, packs: bool
) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    cost = np.zeros(num_bins)
    room = np.full(num_bins, capacity, dtype=np.int64)
    for i in order:
        taken = np.array([lengths[i if packs or not row else row[0]] for row in bins])
        fits = room >= taken
        if not fits.any():
            return None
        b = int(np.where(fits, cost, np.inf).argmin())
        bins[b].append(i)
        cost[b] += sample_cost(lengths[i])
        room[b] -= taken[b]
    return bins


def _halve_until(bins: list[list[int]], lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    while len(bins) < num_bins:
        splittable = [row for row in bins if len(row) > 1]
        if not splittable:
            bins.append([])
            continue
        costliest = max(splittable, key=lambda row: _bin_cost(row, lengths))
        bins.remove(costliest)
        bins.extend((costliest[::2], costliest[1::2]))
    return bins


def deal_bins(bins: list[list[int]], lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    """Distributes the same number of bins to each rank.

    The k-th micro-batches of all ranks have similar costs, since ranks wait for each other at every micro-batch. Among
    these micro-batches, the cheapest goes to the rank with the most work so far.
    """
    falling = sorted(bins, key=lambda row: _bin_cost(row, lengths), reverse=True)
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    for start in range(0, len(falling), num_ranks):
        lightest_first = sorted(range(num_ranks), key=lambda r: (load[r], r))
        for rank, row in zip(lightest_first, falling[start : start + num_ranks], strict=True):
            ranks[rank].append(row)
            load[rank] += _bin_cost(row, lengths)
    return ranks


def lay_out(samples: Sequence[TrainSample], pad_to_multiple_of: int = 1) -> MicroBatch:
    """Concatenates samples and pads the row to a multiple. Without samples, the row is a dummy that is only padding."""
    lengths = [sample.length for sample in samples]
    used = sum(lengths)
    total = -(-max(used, SHORTEST_ROW) // pad_to_multiple_of) * pad_to_multiple_of
    segments = [*lengths, total - used] if total > used else lengths
    cu_seqlens = np.concatenate([[0], np.cumsum(segments)]).astype(np.int32)
    starts = np.repeat(cu_seqlens[:-1], segments)
    tail = total - used

    def row(name: str, fill: float, dtype: type) -> np.ndarray:
        parts = [getattr(sample, name) for sample in samples]
        return np.concatenate([*parts, np.full(tail, fill, dtype)], dtype=dtype, casting="unsafe")

    return MicroBatch(
        token_ids_T=row("token_ids_L", 0, np.int64),
        position_ids_T=np.arange(total, dtype=np.int64) - starts,
        trained_T=row("trained_L", 0, np.bool_),
        engine_logprob_T=row("engine_logprob_L", 0.0, np.float64),
        advantage_T=np.repeat(np.array([*(s.advantage for s in samples), 0.0]), [*lengths, tail]),
        version_T=row("version_L", -1, np.int32),
        sample_index_T=np.repeat(np.array([*range(len(samples)), -1], dtype=np.int32), [*lengths, tail]),
        cu_seqlens=cu_seqlens,
        sample_ids=[sample.sample_id for sample in samples],
        environments=[sample.environment for sample in samples],
        routes_TXK=_routes(samples, total),
        payloads=[sample.payload for sample in samples],
    )


def _routes(samples: Sequence[TrainSample], total: int) -> np.ndarray | None:
    """Concatenates the samples' routes [total, X, K], with zeros for samples without routes."""
    known = [sample.routes_LXK for sample in samples if sample.routes_LXK is not None]
    if not known:
        return None
    routes_TXK = np.zeros((total, *known[0].shape[1:]), dtype=known[0].dtype)
    start = 0
    for sample in samples:
        if sample.routes_LXK is not None:
            routes_TXK[start : start + sample.length] = sample.routes_LXK
        start += sample.length
    return routes_TXK


def warm_up_row(seq_len: int, pad_to_multiple_of: int, vocab_size: int) -> MicroBatch:
    """Makes a row for compiling before there is data. It has the maximum length and four arbitrary segments."""
    total = max(seq_len // pad_to_multiple_of * pad_to_multiple_of, 12)
    short = total // 6
    # Many different tokens, so that a mixture of experts uses many experts.
    tokens = [np.arange(length) % vocab_size for length in (total - 3 * short, short, short, short)]
    return lay_out([untrained_sample("warm-up", token_ids) for token_ids in tokens])


def untrained_sample(name: str, token_ids_L: np.ndarray) -> TrainSample:
    """Makes a sample without a score, of which every token except the first is predicted."""
    length = len(token_ids_L)
    return TrainSample(
        sample_id=name,
        group_id=0,
        environment=name,
        token_ids_L=token_ids_L,
        trained_L=np.arange(length) > 0,
        engine_logprob_L=np.zeros(length),
        version_L=np.zeros(length, dtype=np.int32),
        reward=0.0,
    )


def packing_stats(inputs: Sequence[StepInput]) -> dict[str, float]:
    """Computes metrics of a packed step: the shares of padding and of dummy rows in the tokens of all ranks, in [0, 1].

    `imbalance` is the largest cost of a rank over the mean cost; 1 is even.
    """
    of_ranks = [[row for minibatch in rank.minibatches for row in minibatch.micro_batches] for rank in inputs]
    rows = [row for of_rank in of_ranks for row in of_rank]
    total = max(1, sum(len(row.token_ids_T) for row in rows))
    padding = sum(int((row.sample_index_T < 0).sum()) for row in rows if row.sample_ids)
    dummy = sum(len(row.token_ids_T) for row in rows if not row.sample_ids)
    costs = [sum(sample_cost(int(n)) for row in of_rank for n in np.diff(row.cu_seqlens)) for of_rank in of_ranks]
    return {
        "packing/padding_share": padding / total,
        "packing/dummy_share": dummy / total,
        "packing/imbalance": max(costs) * len(costs) / sum(costs) if any(costs) else 1.0,
    }


def truncate_to(samples: Sequence[TrainSample], seq_len: int) -> tuple[list[TrainSample], int]:
    """Truncates samples to `seq_len` tokens. Returns them and the number of trained tokens that were cut off."""
    kept: list[TrainSample] = []
    lost = 0
    for sample in samples:
        if sample.length <= seq_len:
            kept.append(sample)
            continue
        lost += int(sample.trained_L[seq_len:].sum())
        arrays = {name: getattr(sample, name) for name in ARRAYS_OF_TOKENS}
        kept.append(replace(sample, **{name: a[:seq_len] for name, a in arrays.items() if a is not None}))
    return kept, lost
