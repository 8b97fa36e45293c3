"""Creates the process groups of a Megatron run.

Megatron orders ranks by tensor, context, expert, data and pipeline parallelism, so neighbors share a layer. Expert
parallelism divides the ranks of a pipeline stage, including ranks that share rows, and each has a part of the experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from telescope.trainer.batch import COLLECTIVE_TIMEOUT
from telescope.trainer.sequence_exchange import ContextGroup


@dataclass(slots=True, frozen=True)
class Parallel:
    """This rank's groups for each kind of parallelism."""

    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    ep: dist.ProcessGroup
    dp: dist.ProcessGroup

    @property
    def is_first_stage(self) -> bool:
        return self.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1

    @property
    def context(self) -> ContextGroup | None:
        """The ranks that share a row, or None if every row has its own rank."""
        return ContextGroup.of(self.cp) if self.cp.size() > 1 else None


def initialize(config: Any) -> Parallel:
    """Creates the process groups of a config, replacing earlier ones. Collective."""
    destroy_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.megatron_tensor_parallel_size,
        pipeline_model_parallel_size=config.megatron_pipeline_parallel_size,
        context_parallel_size=config.megatron_context_parallel_size,
        expert_model_parallel_size=config.megatron_expert_parallel_size,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=int(COLLECTIVE_TIMEOUT.total_seconds() // 60),
    )
    model_parallel_cuda_manual_seed(config.seed)
    torch.manual_seed(config.seed)
    return Parallel(
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        ep=parallel_state.get_expert_model_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
    )


def destroy_groups() -> None:
    """Destroys the process groups, if any."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
