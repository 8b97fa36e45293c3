"""A worker extension that corrupts the next sync inside the vLLM worker, for tests in which the probe must fail.

It exists in the tests only: a server is started with it by name, in place of the one that it extends.
"""

import os
from collections.abc import Iterable
from typing import Any

import torch

from telescope.inference.vllm import weights
from telescope.inference.vllm.weights import WeightsWorkerExtension

UNPACKED_VARIABLE = "TELESCOPE_TEST_UNPACKED"

if os.environ.get(UNPACKED_VARIABLE) == "1":
    # Before any layer is made: linear layers of the CPU then compute with their plain weight, as those of a GPU do.
    from vllm import _custom_ops

    _custom_ops._supports_onednn = False


class FaultyWorkerExtension(WeightsWorkerExtension):
    """`telescope_test_fault` sets the fault of the next update, and of no other."""

    def telescope_test_pid(self) -> dict[str, int]:
        return {"pid": os.getpid()}

    def telescope_test_remember(self) -> None:
        """Keep copies of every tensor of the next update, as the version before of a later one."""
        engine: Any = self.weight_transfer_engine  # type: ignore[attr-defined]
        engine.remembered = {}

        def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
            engine.remembered.update({name: tensor.clone() for name, tensor in tensors})
            type(engine)._load(engine, tensors)

        def load_staging(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            received = list(tensors)
            engine.remembered.update({name: tensor.clone() for name, tensor in received})
            type(engine.staging).load(engine.staging, received)

        engine._load = load
        if engine.staging is not None:
            engine.staging.load = load_staging

    def telescope_test_fault(self, fault: str, name: str, rank: int | None) -> None:
        engine: Any = self.weight_transfer_engine  # type: ignore[attr-defined]
        if rank is not None and rank != self.rank:  # type: ignore[attr-defined]
            return
        original = weights.reprocess_tied_layers
        take_kernels = weights.remove_expert_kernels
        if fault == "unpacked":
            weights.remove_expert_kernels = lambda model: []
        other = name.replace("q_proj", "k_proj").replace("gate_proj", "up_proj").replace(".0.down_proj", ".1.down_proj")

        def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
            type(engine)._load(engine, corrupt(dict(tensors)))

        def corrupt(tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
            if fault == "nothing":
                return []
            if fault == "raise":
                del engine._load, engine.finish_weight_update
                raise ValueError("this worker cannot load, on purpose")
            if fault == "skipped":
                del tensors[name]
            elif fault == "previous":
                tensors[name] = engine.remembered[name]
            elif fault == "swapped":
                rows = min(len(tensors[name]), len(tensors[other]))
                mine, theirs = tensors[name].clone(), tensors[other].clone()
                mine[:rows], theirs[:rows] = tensors[other][:rows], tensors[name][:rows]
                tensors[name], tensors[other] = mine, theirs
            elif fault == "bit":
                corrupted = tensors[name].clone()
                corrupted.view(torch.int32).view(-1)[-1] ^= 1
                tensors[name] = corrupted
            return list(tensors.items())

        def load_staging(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            type(engine.staging).load(engine.staging, corrupt(dict(tensors)))

        def finish() -> None:
            if fault == "tie":
                weights.reprocess_tied_layers = lambda model: None
            try:
                type(engine).finish_weight_update(engine)
            finally:
                weights.reprocess_tied_layers = original
                weights.remove_expert_kernels = take_kernels
                del engine._load, engine.finish_weight_update
                if engine.staging is not None:
                    vars(engine.staging).pop("load")
                    vars(engine.staging).pop("swap", None)

        engine._load = load
        engine.finish_weight_update = finish
        if engine.staging is not None:
            engine.staging.load = load_staging
            if fault == "no swap":
                engine.staging.swap = lambda: None
