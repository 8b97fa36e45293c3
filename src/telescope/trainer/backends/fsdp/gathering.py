"""When sharded weights are gathered, how far ahead, and how long they stay.

Owns the order of the units (what is gathered together) and what FSDP2 is told about it. Invariants: nothing here
changes a number, only when weights move; after the last backward pass of an optimizer step everything is sharded again,
so that the next forward pass gathers the updated weights.

The units are the embedding and the head, each by itself where they are untied, every layer, and the root: the last
norm, and the shared table where they are tied. The root and the head are what a forward pass ends and its backward pass
begins with, so they are not dropped in between. The embedding's backward pass does not read its weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.fsdp import FSDPModule

from telescope.trainer.model import PolicyModel


def units(policy: PolicyModel) -> Iterator[FSDPModule]:
    """What is gathered together, the root included."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            yield module


def set_prefetch(policy: PolicyModel, num_layers: int) -> None:
    """Gather `num_layers` units ahead of the one that computes. 0: as torch does by itself, one in backward passes."""
    embedding = policy.causal_lm.get_input_embeddings()
    forward = [unit for unit in (embedding, *policy.layers, policy.head) if isinstance(unit, FSDPModule)]
    backward = [unit for unit in reversed(forward) if unit is not embedding]
    if isinstance(embedding, FSDPModule):
        embedding.set_unshard_in_backward(False)
    if not num_layers:
        return
    assert isinstance(policy, FSDPModule)
    policy.set_modules_to_forward_prefetch([*forward[:num_layers]])
    for place, unit in enumerate(forward):
        unit.set_modules_to_forward_prefetch([*forward[place + 1 : place + 1 + num_layers]])
    for place, unit in enumerate(backward):
        unit.set_modules_to_backward_prefetch([*backward[place + 1 : place + 1 + num_layers]])


def stay_gathered(policy: PolicyModel, stays: bool) -> None:
    """Whether weights stay gathered after the backward passes that follow."""
    for unit in units(policy):
        unit.set_reshard_after_backward(not stays, recurse=False)


def reshard_all(policy: PolicyModel) -> None:
    """Drop gathered weights, which stay after a forward pass that no backward pass follows."""
    for unit in units(policy):
        unit.reshard()
