"""Replays the engine's choices of experts in the trainer ("R3", arXiv 2510.11370).

Engine and trainer compute router logits with different kernels, so they choose different experts where logits nearly
tie. Higher precision elsewhere does not remove the resulting difference of logprobs. With `router_replay` a token goes
to the experts that the engine chose for it. The weights of these experts come from the trainer's own logits, so that
gradients reach the router.

Owns the choice, and the count of choices in which both agree. `RouterReplay` replaces the selection of experts in a
backend: the top-k of Qwen3-MoE's router in transformers, `router_replay` of a Megatron router.

Invariants: a token without recorded routes goes to the trainer's own choice. Routes belong to a row, also when a block
is recomputed, and agreement is counted only in forward passes of training.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from telescope.errors import UserError

AGREEMENT = "router_replay/agreement"
REPLAYED = "router_replay/token_share"


class RouterReplay:
    """Chooses experts in all layers of one rank that have experts."""

    routes_TXK: torch.Tensor | None = None
    """The routes of the next forward and backward pass of a transformers model."""

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(3, dtype=torch.float64, device=device)
        """Number of agreeing choices, of replayed choices, and of all choices in the step."""
        self._counting = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts choices of the enclosed forward pass, without its recomputation."""
        self._counting = True
        try:
            yield
        finally:
            self._counting = False

    def choose(self, own_TK: torch.Tensor, recorded_TK: torch.Tensor | None) -> torch.Tensor:
        """Returns each token's experts [T, K], int64: the recorded ones or else its own."""
        chosen_TK = own_TK
        if recorded_TK is not None:
            recorded_TK = recorded_TK.long()
            sorted_TK = recorded_TK.sort(dim=-1).values
            known_T1 = (sorted_TK[:, 1:] != sorted_TK[:, :-1]).all(dim=-1, keepdim=True)
            chosen_TK = torch.where(known_T1, recorded_TK, own_TK)
            if self._counting:
                agree_TK = (recorded_TK[:, :, None] == own_TK[:, None, :]).any(dim=-1) & known_T1
                self._counts[0] += agree_TK.sum()
                self._counts[1] += known_T1.sum() * own_TK.shape[1]
        if self._counting:
            self._counts[2] += own_TK.numel()
        return chosen_TK

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of all ranks since the last call. Collective."""
        dist.all_reduce(self._counts)
        agreeing, replayed, everything = self._counts.tolist()
        self._counts.zero_()
        shares = {REPLAYED: replayed / everything} if everything else {}
        return shares | ({AGREEMENT: agreeing / replayed} if replayed else {})


def replay_in_transformers(layers: list[nn.Module], replay: RouterReplay) -> None:
    """Makes the routers of a transformers model (Qwen3-MoE) replay routes. Raises `UserError` for any other model."""
    found = False
    for index, layer in enumerate(layers):
        for module in layer.modules():
            if type(module).__name__ == "Qwen3MoeTopKRouter":
                found = True
                module.forward = functools.partial(_route, module, index, replay)
    if not found:
        raise UserError("router_replay is true, which works for Qwen3-MoE: set it to false, or choose such a model")


def _route(
    router: Any, layer: int, replay: RouterReplay, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes (logits, weights [T, K], experts [T, K]) of the chosen experts, like `Qwen3MoeTopKRouter`."""
    logits = nn.functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    probabilities = logits.softmax(dim=-1, dtype=torch.float)
    own_TK = probabilities.topk(router.top_k, dim=-1).indices
    chosen_TK = replay.choose(own_TK, None if replay.routes_TXK is None else replay.routes_TXK[:, layer])
    weights_TK = probabilities.gather(1, chosen_TK)
    if router.norm_topk_prob:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return logits, weights_TK.to(logits.dtype), chosen_TK


@dataclass(eq=False)
class MegatronChoice:
    """The choice of experts that one Megatron router calls.

    megatron-core's own class takes the routes of a recomputation from a queue, which must have the order of the
    pipeline's schedule, and does not support tokens without routes. Here the layer's input contains its routes each
    time.
    """

    replay: RouterReplay
    recorded_TK: torch.Tensor | None = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns scores and indices of the chosen experts, [T, K] each."""
        assert default_compute_topk is not None
        own_TK = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)[1]
        chosen_TK = self.replay.choose(own_TK, self.recorded_TK)
        return scores.gather(1, chosen_TK), chosen_TK


def replay_in_megatron(stage: nn.Module, replay: RouterReplay, sharing: dist.ProcessGroup | None) -> None:
    """Makes the routers of a pipeline stage replay their rows' routes. Raises `UserError` for a model without routers.

    The ranks of `sharing` divide a row's tokens among their routers.
    """
    found = False
    for layer in stage.modules():
        router = getattr(getattr(layer, "mlp", None), "router", None)
        if router is None:
            continue
        found = True
        router.router_replay = choice = MegatronChoice(replay)

        def take_routes(layer: Any, args: Any, kwargs: dict[str, Any], choice: MegatronChoice = choice) -> None:
            routes_TXK = kwargs["packed_seq_params"].data.routes_TXK
            if routes_TXK is not None and sharing is not None:
                routes_TXK = routes_TXK.chunk(sharing.size())[sharing.rank()]
            choice.recorded_TK = None if routes_TXK is None else routes_TXK[:, layer.layer_number - 1]

        layer.register_forward_pre_hook(take_routes, with_kwargs=True)
    if not found:
        raise UserError("router_replay is true, but the model has no experts: set it to false")
