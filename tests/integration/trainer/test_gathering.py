"""When weights are gathered changes no number, and nothing stays whole that need not."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from tests.integration.trainer.live_bytes import LiveBytes
from tests.integration.trainer.trainer_cases import (
    build_model,
    gradients,
    make_config,
    make_samples,
    relative_error,
    run_here,
    run_ranks,
    weights,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

from telescope.trainer.backends.fsdp.sharding import units
from telescope.trainer.metrics import StepMetrics
from telescope.trainer.packing import pack_step
from telescope.trainer.worker import Trainer
from telescope.utils.timeline import Timeline

NUM_LAYERS = 4
LENGTHS = [30, 31, 32, 29, 28, 27, 26, 25, 30, 31, 20, 32]  # a row of 32 each: six micro-batches on two ranks
MODELS = {"tied": True, "untied": False}
SETTINGS = [(True, 0), (True, 2), (False, 1)]
WIDER = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4}
ALIVE_SHARE = 0.9
"""Bytes alive after a backward pass, gathered weights aside, over those of all weights: the half of the gradients that
this rank has, and little else: ids and logprobs of rows, sums of metrics."""
BFLOAT16 = {"model_dtype": "bfloat16", "mixed_precision_dtype": "bfloat16"}


def settings_job(trainer: Trainer) -> dict[str, Any]:
    """Gradients of six micro-batches, then two steps and the logprobs in between; what was gathered and when."""
    backend: Any = trainer.backend
    gathers = CountedGathers()
    for unit in units(backend.policy):
        unit.set_custom_all_gather(gathers)
    ahead = watch_what_is_ahead(backend.policy)
    batch = packed(trainer, step=0).minibatches[0]
    backend.accumulate(batch, 0, Timeline(backend.device, trainer.rank), StepMetrics(backend.device))
    found: dict[str, Any] = {
        "gathers": gathers.count, "ahead": deepcopy(ahead), "micro_batches": len(batch.micro_batches),
    }  # fmt: skip
    found["gathered_after"] = sum(not group_of(unit).is_sharded for unit in units(backend.policy))
    found["gradient"] = gradients(trainer)
    trainer.train_step(packed(trainer, step=0))
    found["logprobs"] = trainer.backend.sequence_logprobs([1, 5, 9, 2, 60, 33])
    trainer.train_step(packed(trainer, step=1, num_minibatches=2))
    found["weights"] = weights(trainer)
    return found


def gradient_shards_job(trainer: Trainer) -> dict[str, Any]:
    """What is alive after the backward pass of each of six micro-batches, before the first and after the update."""
    backend: Any = trainer.backend
    whole_bytes = sum(p.numel() * p.element_size() for p in backend.parameters)
    seen: list[dict[str, Any]] = []
    with LiveBytes() as live:
        trainer.train_step(packed(trainer, step=0))  # makes what lives as long as the trainer
        gc.collect()
        before = live.now

        class Watching(Timeline):
            @contextmanager
            def span(self, name: str, micro_batch: int | None = None) -> Iterator[None]:
                yield
                if name != "backward":
                    return
                gc.collect()
                wait_until_freed(lambda: live.now - before - gathered_bytes(trainer, len(seen)), whole_bytes)
                shards = [p.grad.to_local() for p in backend.parameters if p.grad is not None]
                seen.append(
                    {
                        "whole": sum(has_whole_gradient(p) for u in units(backend.policy) for p in params_of(u)),
                        "shards": sum(g.numel() * g.element_size() for g in shards),
                        "dtypes": {g.dtype for g in shards},
                        "reduced_in": {
                            group_of(u)._reduce_dtype or group_of(u)._orig_dtype for u in units(backend.policy)
                        },
                        "alive": live.now - before - gathered_bytes(trainer, len(seen)),
                    }
                )

        batch = packed(trainer, step=1).minibatches[0]
        backend.accumulate(batch, 0, Watching(backend.device, 0, enabled=False), StepMetrics(backend.device))
    return {"seen": seen, "whole_bytes": whole_bytes}


def gathered_bytes(trainer: Trainer, micro_batch: int) -> int:
    """Bytes of weights that stay gathered after this one of six micro-batches."""
    if trainer.config.fsdp_reshard_after_forward or micro_batch == 5:
        return 0
    return sum(p.numel() * p.element_size() for p in trainer.backend.parameters)  # type: ignore[attr-defined]


def wait_until_freed(alive: Callable[[], int], whole_bytes: int) -> None:
    """Waits for gloo's threads: they still refer to the buffers of a collective for a moment after it is done."""
    deadline = time.monotonic() + 10.0
    while alive() > ALIVE_SHARE * whole_bytes and time.monotonic() < deadline:
        time.sleep(0.01)


class CountedGathers(DefaultAllGather):
    """FSDP2's all-gather, counted."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return super().__call__(*args, **kwargs)


def watch_what_is_ahead(policy: Any) -> dict[str, list[int]]:
    """By direction, how many of the layers that come later are under way when the first to compute begins."""
    ahead: dict[str, list[int]] = {"forward": [], "backward": []}

    def count(direction: str, others: list[Any]) -> None:
        groups = [group_of(layer) for layer in others]
        ahead[direction].append(sum(group._all_gather_result is not None or group.is_unsharded for group in groups))

    first, *later = policy.layers
    *earlier, last = policy.layers
    first.register_forward_pre_hook(lambda *_: count("forward", later))

    def watch_backward(_module: Any, _arguments: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: count("backward", earlier))

    last.register_forward_hook(watch_backward)
    return ahead


def group_of(unit: Any) -> Any:
    return unit._get_fsdp_state()._fsdp_param_group


def params_of(unit: Any) -> list[Any]:
    return list(group_of(unit).fsdp_params)


def has_whole_gradient(param: Any) -> bool:
    whole = getattr(param, "_unsharded_param", None)
    return param.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


def packed(trainer: Trainer, step: int, num_minibatches: int = 1) -> Any:
    inputs = pack_step(
        make_samples(LENGTHS, seed=step), step=step, version=0, seq_len=32, num_ranks=trainer.world_size,
        pad_to_multiple_of=8, num_minibatches=num_minibatches,
    )  # fmt: skip
    return inputs[trainer.rank]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Any]:
    """Every setting on two ranks, each model on one, and stored gradients in float64 and in bfloat16."""
    root = tmp_path_factory.mktemp("gathering")
    jobs, names, one = [], [], {}
    for model, tied in MODELS.items():
        path = build_model(root / model, family="starcoder2", tied=tied, num_hidden_layers=NUM_LAYERS)
        for reshard, prefetch in SETTINGS:
            changes: dict[str, Any] = {"fsdp_reshard_after_forward": reshard, "fsdp_prefetch_layers": prefetch}
            config = make_config(path, gradient_checkpointing=prefetch == 2, weight_decay=0.1, **changes)
            jobs.append((settings_job, config, ()))
            names.append((model, reshard, prefetch))
        one[model] = run_here((settings_job, make_config(path, weight_decay=0.1), ()))
        path = build_model(root / f"{model}_wider", family="starcoder2", tied=tied, **WIDER)
        dtype, precision = ("bfloat16", BFLOAT16) if tied else ("float64", {})
        for reshard in (True, False):
            jobs.append((gradient_shards_job, make_config(path, fsdp_reshard_after_forward=reshard, **precision), ()))
            names.append((model, dtype, reshard))
    on_two = run_ranks(jobs, num_ranks=2, folder=root / "results")
    return {"one": one, **dict(zip(names, on_two, strict=True))}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("reshard", "prefetch"), SETTINGS)
def test_every_setting_gives_the_gradients_and_weights_of_one_rank(results, model, reshard, prefetch):
    one, plain = results["one"][model], results[model, True, 0][0]
    for rank in results[model, reshard, prefetch]:
        assert relative_error(rank["gradient"], one["gradient"]) < 1e-12
        assert relative_error(rank["weights"], one["weights"]) < 1e-10
        assert relative_error(rank["gradient"], plain["gradient"]) == 0.0
        assert relative_error(rank["weights"], plain["weights"]) == 0.0
        assert rank["logprobs"] == plain["logprobs"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_weights_that_stay_are_gathered_once_per_optimizer_step(results, model, prefetch):
    tables = 0 if model == "tied" else 2
    kept, dropped = results[model, False, 1][0], results[model, True, prefetch][0]
    assert kept["micro_batches"] == 6
    assert kept["gathers"] == NUM_LAYERS + tables + 1
    # Layers twice; the root and the head once, since they are used last and first; the embedding forward only.
    assert dropped["gathers"] == 6 * (2 * NUM_LAYERS + tables + 1)


@pytest.mark.parametrize("model", MODELS)
def test_as_many_layers_are_gathered_ahead_as_asked_in_both_directions(results, model):
    for rank in results[model, True, 2]:
        assert rank["ahead"] == {"forward": [2] * 6, "backward": [2] * 6}
    for rank in results[model, True, 0]:
        assert rank["ahead"]["forward"] == [0] * 6


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("reshard", "prefetch"), SETTINGS)
def test_nothing_is_gathered_when_the_update_comes(results, model, reshard, prefetch):
    assert [rank["gathered_after"] for rank in results[model, reshard, prefetch]] == [0, 0]


@pytest.mark.parametrize(("model", "dtype"), [("tied", "bfloat16"), ("untied", "float64")])
@pytest.mark.parametrize("reshard", [True, False])
def test_between_micro_batches_the_only_gradients_are_shards(results, model, dtype, reshard):
    for rank in results[model, dtype, reshard]:
        assert len(rank["seen"]) == 6
        for seen in rank["seen"]:
            assert seen["whole"] == 0
            assert seen["dtypes"] == {getattr(torch, dtype)}
            assert seen["reduced_in"] == {torch.float32 if dtype == "bfloat16" else torch.float64}
            assert rank["whole_bytes"] * 0.45 < seen["shards"] < rank["whole_bytes"] * 0.55
            assert 0.1 < seen["alive"] / rank["whole_bytes"] < ALIVE_SHARE
