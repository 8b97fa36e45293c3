"""The trainer's tokens go to the experts that the engine chose, on both backends and however a row is divided."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.integration.trainer.lora_cases import FIELDS, adapter_job, follows_full_gradient
from tests.integration.trainer.test_megatron import CP, EP, OPTIMIZER, PP, RECOMPUTE, SEQUENCE, TP
from tests.integration.trainer.trainer_cases import (
    build_model,
    make_config,
    make_samples,
    packed_share,
    relative_error,
    run_here,
    run_ranks,
    step_gradient,
)
from transformers import AutoModelForCausalLM

from telescope.errors import UserError
from telescope.trainer.batch import TrainSample
from telescope.trainer.router_replay import AGREEMENT, REPLAYED, RouterReplay
from telescope.trainer.worker import Trainer

LENGTHS = [5, 31, 12, 7, 2, 28, 19, 3]
EXPERTS, TOP_K = 4, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_model(tmp_path_factory.mktemp("routed") / "experts", family="qwen3_moe", tied=False)


def own_routes(model: str, samples: list[TrainSample]) -> list[np.ndarray]:
    """The experts that transformers chooses for each token of each sample, [L, X, K]."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found: list[torch.Tensor] = []
    for layer in reference.model.layers:
        layer.mlp.gate.register_forward_hook(lambda router, inputs, outputs: found.append(outputs[2]))
    routes = []
    for sample in samples:
        found.clear()
        with torch.no_grad():
            reference(torch.from_numpy(sample.token_ids_L)[None])
        routes.append(torch.stack(found, dim=1).numpy().astype(np.uint8))
    return routes


def other_routes(samples: list[TrainSample], seed: int = 0) -> list[np.ndarray]:
    """Random different experts for each token."""
    rng = np.random.default_rng(seed)
    return [rng.random((s.length, 2, EXPERTS)).argsort(axis=-1)[..., :TOP_K].astype(np.uint8) for s in samples]


def forced_gradient(model: str, samples: list[TrainSample], routes: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """The gradient of the mean trained logprob of samples run one by one, their experts masked to the given ones."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="eager")
    current: dict[str, torch.Tensor] = {}

    def forced(router: Any, inputs: Any, outputs: Any, *, layer: int) -> Any:
        logits = outputs[0]
        chosen = current["routes"][:, layer]
        weights = logits.softmax(dim=-1).gather(1, chosen)
        return logits, weights / weights.sum(dim=-1, keepdim=True), chosen

    for index, block in enumerate(reference.model.layers):
        block.mlp.gate.register_forward_hook(
            lambda router, inputs, outputs, index=index: forced(router, inputs, outputs, layer=index)
        )
    num_trained = sum(sample.num_trained for sample in samples)
    for sample, routes_LXK in zip(samples, routes, strict=True):
        current["routes"] = torch.from_numpy(routes_LXK.astype(np.int64))
        logits = reference(torch.from_numpy(sample.token_ids_L)[None]).logits[0].log_softmax(dim=-1)
        trained = np.flatnonzero(sample.trained_L)
        logp = logits[torch.from_numpy(trained - 1), torch.from_numpy(sample.token_ids_L[trained])]
        (-(sample.advantage * logp).sum() / num_trained).backward()
    return {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}


def samples_with(routes: list[np.ndarray] | None) -> list[TrainSample]:
    samples = make_samples(LENGTHS)
    for sample, recorded in zip(samples, routes or [None] * len(samples), strict=True):
        sample.routes_LXK = recorded
    return samples


def options(**changes: Any) -> dict[str, Any]:
    return {"model_dtype": "float32", "router_replay": True, **changes}


def gradient_job(trainer: Trainer, samples: list[TrainSample]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The gradient of one optimizer step by Hugging Face name, and the metrics of the replay."""
    backend: Any = trainer.backend
    gradient = step_gradient(trainer, packed_share(trainer, samples))
    return gradient, backend.replay.metrics() if backend.replay is not None else {}


def fused_experts(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names of checkpoints as those of transformers: the experts of a layer in two tensors."""
    fused: dict[str, torch.Tensor] = {}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        if f"{at}.0.gate_proj.weight" not in found:
            return found
        kinds = ("gate_proj", "up_proj")
        both = [torch.cat([found[f"{at}.{e}.{kind}.weight"] for kind in kinds]) for e in range(EXPERTS)]
        fused[f"{at}.gate_up_proj"] = torch.stack(both)
        fused[f"{at}.down_proj"] = torch.stack([found[f"{at}.{e}.down_proj.weight"] for e in range(EXPERTS)])
    return fused | {name: tensor for name, tensor in found.items() if ".experts." not in name}


DIVISIONS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "fsdp, recomputed": {"gradient_checkpointing": True},
    "fsdp, rows shared": {"fsdp_context_parallel_size": 2},
}
ADAPTED: tuple[dict[str, Any], ...] = ({}, {"router_replay": False, "fsdp_context_parallel_size": 2})
"""Of the runs with adapters: with the engine's experts, and with the trainer's own, where ranks share rows."""
MEGATRON = {
    "train_backend": "megatron", SEQUENCE: False, OPTIMIZER: False, RECOMPUTE: False,
    "weight_broadcast_free_grad_buffers": True,
}  # fmt: skip
STAGES: dict[str, dict[str, Any]] = {
    "tokens and experts divided": {TP: 2, EP: 2, SEQUENCE: True},
    "rows shared": {CP: 2},
    "two stages, recomputed": {PP: 2, RECOMPUTE: True},
}


def check(model: str, results: list[Any], samples: list[TrainSample], routes: list[np.ndarray]) -> None:
    """Compares gradients with transformers under forced routes, and the agreement with a count."""
    wanted = forced_gradient(model, samples, routes)
    own = own_routes(model, samples)
    agreeing = sum(
        int((mine[..., None] == theirs[..., None, :]).any(axis=-1).sum())
        for mine, theirs in zip(first_layer(routes), first_layer(own), strict=True)
    )
    total = sum(array.size for array in first_layer(routes))
    for gradient, metrics in results:
        assert relative_error(fused_experts(gradient), wanted) < 1e-5
        assert 0.0 < metrics[AGREEMENT] < 1.0
        # Below the first layer, replayed experts change what routers see; the first one's share is exact.
        assert abs(metrics[AGREEMENT] - agreeing / total) < 0.2
        assert 0.5 < metrics[REPLAYED] < 1.0  # padding has no routes


def first_layer(routes: list[np.ndarray]) -> list[np.ndarray]:
    return [array[:, :1] for array in routes]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_gradient_with_the_trainers_own_choices_replayed_is_the_ordinary_one(model: str, recompute: bool) -> None:
    changes = {"gradient_checkpointing": recompute}
    samples = samples_with(own_routes(model, make_samples(LENGTHS)))
    replayed, metrics = run_here((gradient_job, make_config(model, **options(**changes)), (samples,)))
    ordinary, nothing = run_here(
        (gradient_job, make_config(model, **options(router_replay=False, **changes)), (samples_with(None),))
    )
    assert relative_error(replayed, ordinary) < 1e-6
    assert metrics[AGREEMENT] == 1.0
    assert nothing == {}


def test_without_recorded_routes_the_trainer_chooses(model: str) -> None:
    unrecorded = [np.zeros((length, 2, TOP_K), np.uint8) for length in LENGTHS]
    for routes in (None, unrecorded):
        found, metrics = run_here((gradient_job, make_config(model, **options()), (samples_with(routes),)))
        ordinary, _ = run_here(
            (gradient_job, make_config(model, **options(router_replay=False)), (samples_with(None),))
        )
        assert relative_error(found, ordinary) < 1e-6
        assert metrics == {REPLAYED: 0.0}


def test_fsdp_ranks_and_their_adapters_train_with_the_recorded_experts(model: str, tmp_path: Path) -> None:
    samples = samples_with(other_routes(make_samples(LENGTHS)))
    routes = [sample.routes_LXK for sample in samples if sample.routes_LXK is not None]
    divisions = [make_config(model, **options(**changes)) for changes in DIVISIONS.values()]
    adapted = [make_config(model, **options(**FIELDS, **changes)) for changes in ADAPTED]
    jobs: list[Any] = [(gradient_job, config, (samples,)) for config in divisions]
    jobs += [(adapter_job, config, (samples,)) for config in adapted]
    found = iter(run_ranks(jobs, num_ranks=2, folder=tmp_path / "ranks"))
    for _ in divisions:
        check(model, next(found), samples, routes)
    ordinary = forced_gradient(model, samples, own_routes(model, samples))
    replayed = forced_gradient(model, samples, routes)
    for changes in ADAPTED:
        for gradient, a in next(found):
            follows_full_gradient(gradient, a, replayed if changes.get("router_replay", True) else ordinary, 1e-5)


def test_megatron_ranks_train_with_the_recorded_experts(model: str, tmp_path: Path) -> None:
    samples = samples_with(other_routes(make_samples(LENGTHS)))
    jobs: list[Any] = [
        (gradient_job, make_config(model, **options(**(MEGATRON | changes))), (samples,)) for changes in STAGES.values()
    ]
    for results in run_ranks(jobs, num_ranks=2, folder=tmp_path / "ranks"):
        check(model, results, samples, [sample.routes_LXK for sample in samples if sample.routes_LXK is not None])


def test_a_step_reports_the_agreement(model: str) -> None:
    samples = samples_with(own_routes(model, make_samples(LENGTHS)))

    def step(trainer: Trainer) -> dict[str, float]:
        return trainer.train_step(packed_share(trainer, samples)).metrics

    metrics = run_here((step, make_config(model, **options()), ()))
    assert metrics[AGREEMENT] == 1.0


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    dense = build_model(tmp_path / "dense", family="qwen3")
    with pytest.raises(UserError, match="router_replay is true"):
        run_here((gradient_job, make_config(dense, **options()), (samples_with(None),)))


def test_half_of_the_choices_agree(one_rank: Any) -> None:
    one_rank("experts", model_dtype="float32")  # for its process group
    replay = RouterReplay(torch.device("cpu"))
    own = torch.tensor([[0, 1], [2, 3], [0, 2]])
    recorded = torch.tensor([[1, 0], [3, 1], [0, 0]])  # both, one, not recorded
    with replay.counting():
        assert replay.choose(own, recorded).tolist() == [[1, 0], [3, 1], [0, 2]]
    replay.choose(own, recorded)  # recomputed
    assert replay.metrics() == {AGREEMENT: 3 / 4, REPLAYED: 4 / 6}
    assert replay.metrics() == {}
