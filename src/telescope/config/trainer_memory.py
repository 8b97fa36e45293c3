"""How much memory a trainer rank needs at its peak, estimated from the model's shape.

Owns the arithmetic of one training step. Does not own whether that fits (`memory`). What holds its bytes all through a
step (shards of weights, gradients and optimizer, what is gathered, the activations that every layer keeps) is counted
once; on top comes the largest of three moments that do not coincide: the backward pass of the output layer, that of one
block, and the reduction of the tables' gradient, which comes when the activations are gone. Sizes are those that a
second micro-batch meets, when gradients of the first are held.

Checked against a count of all tensors of real steps (`tests/integration/trainer/test_memory_of_a_step.py`) and against
peaks that were measured on GPUs (`tests/unit/config/test_memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from telescope.config.model_shape import DTYPE_BYTES, ModelShape

if TYPE_CHECKING:
    from telescope.config.schema import TelescopeConfig

GIB = 1 << 30
CUDA_CONTEXT_BYTES = GIB  # CUDA context, NCCL buffers and cuBLAS workspaces of one process, together
SUM_BYTES = 4
"""Gradients are reduced over ranks, and sums of products kept, in float32."""
VOCABULARY_BLOCKS = 8
"""Blocks that the output layer's pass cuts the vocabulary into on a GPU; its gradient is summed up block by block."""


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of one trainer rank. FSDP shards parameters, gradients and optimizer over all ranks."""

    parameters: int
    gradients: int
    optimizer: int
    """AdamW: two moments, in the dtype of the parameters."""
    unsharded: int
    """Weights that are gathered all through a micro-batch: a table that is tied, or everything if it stays gathered."""
    activations: int
    """What all layers keep of one micro-batch of `seq_len` tokens."""
    layer: int
    """The backward pass of one block: what it recomputes and its gradients, gathered weights, their reduction."""
    logprobs: int
    """The chunked pass over the output layer and its gradient."""
    tables: int
    """Reducing the gradients of embedding and output layer, after the activations are gone."""
    overhead: int

    @property
    def states(self) -> int:
        """What a rank holds all the time, whatever the batch."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def moment(self) -> int:
        """What the largest moment takes beside what is held all through a step."""
        return max(self.activations + max(self.layer, self.logprobs), self.tables) - self.activations

    @property
    def total(self) -> int:
        return self.states + self.unsharded + self.activations + self.moment + self.overhead


def reshards_after_forward(choice: bool | Literal["auto"], device: str) -> bool:
    """What `fsdp_reshard_after_forward` comes to: whether weights are dropped between forward and backward pass.

    On the CPU memory is rarely what is short, and a gather over gloo costs more than it is worth.
    """
    return device == "cuda" if choice == "auto" else choice


def num_recomputed(config: TelescopeConfig, num_layers: int) -> int:
    """Blocks that are recomputed in backward, counted from the first."""
    if not config.gradient_checkpointing:
        return 0
    return min(config.gradient_checkpointing_layers or num_layers, num_layers)


def trainer_memory(config: TelescopeConfig, shape: ModelShape, device: Literal["cpu", "cuda"]) -> TrainerMemory:
    """The estimate for one rank."""
    ranks, tokens, width = config.trainer_num_workers, config.seq_len, shape.hidden_size
    stored = DTYPE_BYTES[config.model_dtype]
    computed = DTYPE_BYTES[config.mixed_precision_dtype or config.model_dtype]
    shard = -(-shape.num_parameters // ranks) * stored
    table, layer = shape.vocab_size * width, shape.largest_layer_parameters
    drops = reshards_after_forward(config.fsdp_reshard_after_forward, device)
    compiled = config.compile_blocks and device == "cuda" and computed == 2
    unsharded = (table if shape.tied_embeddings else 0) if drops else shape.num_parameters
    # One rank has nothing to send: it copies its weights when it needs them.
    ahead = config.fsdp_prefetch_layers * layer * computed if drops and ranks > 1 else 0
    # The whole gradient of a tied table is there from the head's backward pass to the embedding's.
    whole_gradient = table * computed if shape.tied_embeddings else 0

    dense, sparse = (
        tokens * computed * shape.activation_elements_per_token(mlp_width, compiled=compiled)
        for mlp_width in shape.mlp_widths
    )
    # Recomputed blocks keep their input and, unless that is recomputed too, what attention returned.
    recomputed = num_recomputed(config, shape.num_layers)
    attention = 0 if config.recompute_attention else shape.num_heads * (shape.head_dim * computed + SUM_BYTES)
    kept = recomputed * tokens * (width * computed + attention)
    kept += shape.num_dense_layers(recomputed) * dense + shape.num_sparse_layers(recomputed) * sparse
    # A last block that is not recomputed has what its backward pass needs, which meets what all others keep.
    block = max(dense, sparse) if recomputed == shape.num_layers else 0
    # Beside what a block saves: gradients of the widest arrays, of its input and of its output.
    block += tokens * computed * (2 * max(shape.mlp_widths) + 2 * width)
    weights_of_block = layer * ((computed if drops else 0) + computed)  # gathered, and their gradients
    # A copy for the reduction lives until the next one: the last block still meets that of an untied output layer.
    reduced = SUM_BYTES * (layer if shape.tied_embeddings else max(layer, table))

    logprobs = _logprobs(config, shape, device, computed)
    if not shape.tied_embeddings:
        # The output layer is a unit by itself: its gradient is reduced right after its pass.
        logprobs = max(logprobs + (table * computed if drops else 0), _reduction(table, computed, ranks))

    return TrainerMemory(
        parameters=shard,
        gradients=shard,
        optimizer=2 * shard,
        unsharded=unsharded * computed,
        activations=kept,
        layer=block + weights_of_block + reduced + ahead + whole_gradient,
        logprobs=logprobs + ahead,
        tables=_reduction(table, computed, ranks) + whole_gradient,
        overhead=CUDA_CONTEXT_BYTES if device == "cuda" else 0,
    )


def _logprobs(config: TelescopeConfig, shape: ModelShape, device: str, computed: int) -> int:
    """The output layer's backward pass, its gathered weight not counted."""
    tokens, table = config.seq_len, shape.vocab_size * shape.hidden_size
    chunk = min(config.entropy_chunk_size, tokens) * shape.vocab_size
    if device == "cuda":
        logits = chunk * (SUM_BYTES + computed)  # and their gradient, which on Hopper is all that there is
        blocks = max(1, min(VOCABULARY_BLOCKS, -(-tokens // config.entropy_chunk_size)))
    else:
        logits, blocks = chunk * 3 * SUM_BYTES, 1  # without kernels of our own an array more
    sums = 0 if computed == SUM_BYTES else table * SUM_BYTES // blocks
    # Final norm's input, the predicting rows of its output, and two gradients, one of them in float32.
    hidden = tokens * shape.hidden_size * (3 * computed + 2 * SUM_BYTES)
    return logits + table * computed + sums + hidden


def _reduction(parameters: int, computed: int, ranks: int) -> int:
    """A whole gradient, its copy for the reduction, and this rank's share of the result."""
    return parameters * (computed + SUM_BYTES) + -(-parameters * SUM_BYTES // ranks)
