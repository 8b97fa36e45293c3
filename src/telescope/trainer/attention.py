"""Computes attention over a packed row, in which each sample attends only to itself.

Owns the attention function of transformers' models (registered as `ATTENTION_NAME`) and the host-side plan of a row
(`PackedLayout`). Does not own packing.

Invariants: a token attends to earlier tokens of its own segment only, in every kernel. No mask of T x T exists. Padding
rows produce unused numbers and receive gradients of exactly zero. An unknown argument is an error and never ignored.

Kernels: on a GPU in half precision, kernels with offsets: `flash_attn_4` (Hopper and newer) or `flash_attn`
(FlashAttention 2) if the package is installed, else `varlen`, torch's own FlashAttention 2. Everywhere else `padded`:
segments of similar length share one causal scaled-dot-product call, where padding on the right needs no mask, because
causal queries never reach it. Only `padded` supports soft-capped scores and attention sinks, for which it writes the
scores to memory.
"""

import importlib.util
import inspect
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from telescope.errors import UserError
from telescope.trainer import flash_attention_4
from telescope.trainer.sequence_exchange import ContextGroup, heads_to_tokens, tokens_to_heads

ATTENTION_NAME = "telescope_packed"
Kernel = Literal["flash_attn_4", "flash_attn", "varlen", "padded"]

BUCKET_FILL = 0.75
"""A segment joins the padded call of a longer one if it fills at least this share of it: at most 1.8 x the work."""
MAX_HEAD_DIM = 256
"""The largest head size of FlashAttention; sizes are multiples of 8."""
VARLEN_KNOWS_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether torch's own kernel supports fewer key than query heads."""
SHORT_SEGMENT = 64
"""Segments up to this length share one call, because a call costs more than the padding."""
KNOWN_ARGUMENTS = frozenset({"position_ids", "cache_position", "use_cache", "output_attentions", "is_causal"})
"""Arguments of transformers' attention that have no effect here: every token knows its segment and is causal."""


@dataclass(slots=True)
class PackedLayout:
    """The segments of a whole row on the device, in the form that the kernel needs."""

    kernel: Kernel
    cu_seqlens: torch.Tensor
    max_seqlen: int
    buckets: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """For each call of S segments of similar length, at most L tokens (`padded` only): their row positions [S, L], in
    which padding repeats position 0, and the places in it, counted row by row, that are not padding [P]."""
    order_T: torch.Tensor | None = None
    """For each row position, its index in the concatenated real outputs of all buckets (`padded` only)."""
    context: ContextGroup | None = None
    """The ranks that share the row, or None if this rank has all of it."""


def choose_kernel(device: torch.device, dtype: torch.dtype, head_dim: int, *, plain: bool = True) -> Kernel:
    """Returns the fastest available kernel for this device, dtype and head size.

    `plain` means that scores have no soft-cap and no sinks.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or not plain:
        return "padded"
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return "padded"
    if flash_attention_4.can_run(device, head_dim):
        return "flash_attn_4"
    # FlashAttention 2 and 4 share the package name `flash_attn`.
    is_second = importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.flash_attn_interface")
    return "flash_attn" if is_second else "varlen"


def make_layout(
    cu_seqlens: np.ndarray, device: torch.device, kernel: Kernel, context: ContextGroup | None = None
) -> PackedLayout:
    """Plans the attention of one row. `cu_seqlens` are the host-side offsets of its segments, int32 [S + 1]."""
    lengths = np.diff(cu_seqlens)
    layout = PackedLayout(
        kernel=kernel,
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)).to(device, non_blocking=True),
        max_seqlen=int(lengths.max()),
        context=context,
    )
    if kernel != "padded":
        return layout
    order = np.empty(int(cu_seqlens[-1]), dtype=np.int64)
    placed = 0
    for members in bucket_segments(lengths):
        longest = int(lengths[members[0]])
        offsets = np.arange(longest)
        real = offsets[None, :] < lengths[members][:, None]
        position = np.where(real, cu_seqlens[members][:, None] + offsets[None, :], 0)
        order[position[real]] = placed + np.arange(int(real.sum()))
        placed += int(real.sum())
        gather_SL, real_P = torch.from_numpy(position), torch.from_numpy(np.flatnonzero(real))
        layout.buckets.append((gather_SL.to(device), real_P.to(device)))
    layout.order_T = torch.from_numpy(order).to(device)
    return layout


def bucket_segments(lengths: np.ndarray) -> list[np.ndarray]:
    """Groups segments into padded calls with little padding, longest first."""
    order = np.argsort(-lengths, kind="stable")
    buckets: list[list[int]] = []
    for index in order:
        longest = lengths[buckets[-1][0]] if buckets else 0
        if buckets and (longest <= SHORT_SEGMENT or lengths[index] >= BUCKET_FILL * longest):
            buckets[-1].append(int(index))
        else:
            buckets.append([int(index)])
    return [np.array(members) for members in buckets]


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_layout: PackedLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention for transformers' models.

    query [1, H, T, D]; key [1, K, T, D]; value [1, K, T, E] -> output [1, T, H, E]. With context parallelism, T counts
    the tokens of this rank's part of the row. `softcap` c bounds scores to c tanh(score / c); `s_aux` [H] is a score
    that takes probability and has no value (an attention sink). Raises `UserError` for unknown arguments, and for these
    two with a kernel that lacks them.
    """
    unknown = sorted([name for name, value in others.items() if name not in KNOWN_ARGUMENTS and value is not None])
    if others.get("is_causal") is False:
        unknown.append("is_causal: false")
    if unknown or ((softcap is not None or s_aux is not None) and packed_layout.kernel != "padded"):
        raise UserError(
            f"model: {type(module).__name__} passes {', '.join(unknown) or 'softcap or s_aux'} to its attention, which "
            f"the trainer's kernel {packed_layout.kernel} does not implement. Choose another model"
        )
    assert dropout == 0.0, "dropout would make the trainer's logprobs differ from the engine's"
    q_THD, k_TKD, v_TKE = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    context = packed_layout.context
    if context is not None:
        q_THD, k_TKD, v_TKE = (tokens_to_heads(t, context) for t in (q_THD, k_TKD, v_TKE))
    if sliding_window is not None and sliding_window >= packed_layout.max_seqlen:
        sliding_window = None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if packed_layout.kernel == "padded":
        if s_aux is not None and context is not None:
            s_aux = s_aux.chunk(context.size)[context.rank]
        out_THE = _padded(q_THD, k_TKD, v_TKE, packed_layout, scale, sliding_window, softcap, s_aux)
    else:
        width, missing = v_TKE.shape[-1], q_THD.shape[-1] - v_TKE.shape[-1]
        if missing:  # in latent attention; kernels need values as wide as keys
            v_TKE = F.pad(v_TKE, (0, missing))
        out_THE = _by_offsets(q_THD, k_TKD, v_TKE, packed_layout, scale, sliding_window)[..., :width]
    if context is not None:
        out_THE = heads_to_tokens(out_THE, context)
    return out_THE.unsqueeze(0), None


def _padded(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKE: torch.Tensor,
    layout: PackedLayout,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    assert layout.order_T is not None
    num_heads, width = q_THD.shape[1], v_TKE.shape[2]
    repeats = num_heads // k_TKD.shape[1]
    outputs = []
    for gather_SL, real_P in layout.buckets:
        q, k, v = (
            rows.index_select(0, gather_SL.flatten()).view(*gather_SL.shape, *rows.shape[1:]).transpose(1, 2)
            for rows in (q_THD, k_TKD, v_TKE)
        )
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        length, band = q.shape[2], None
        if sliding_window is not None and sliding_window < length:
            band = _band(length, sliding_window, q.device)
        if softcap is None and sinks_H is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=band, is_causal=band is None, scale=scale)
        else:
            band = _band(length, length, q.device) if band is None else band
            out = _by_scores(q, k, v, band, scale, softcap, sinks_H)
        outputs.append(out.transpose(1, 2).reshape(-1, num_heads, width).index_select(0, real_P))
    return torch.cat(outputs).index_select(0, layout.order_T)


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Returns a mask [L, L] in which a query attends to `window` keys: itself and the keys before it."""
    position = torch.arange(length, device=device)
    behind = position[:, None] - position[None, :]
    return (behind >= 0) & (behind < window)


def _by_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    band_LL: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Computes attention with features that scaled-dot-product calls lack. The softmax is in float32 or wider."""
    scores_SHLL = q @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores_SHLL = torch.tanh(scores_SHLL / softcap) * softcap
    scores_SHLL = scores_SHLL.masked_fill(~band_LL, -torch.inf)
    if sinks_H is not None:
        sinks_SHL1 = sinks_H.to(q.dtype).view(1, -1, 1, 1).expand(*scores_SHLL.shape[:3], 1)
        scores_SHLL = torch.cat([scores_SHLL, sinks_SHL1], dim=-1)
    wide = torch.promote_types(q.dtype, torch.float32)
    return scores_SHLL.softmax(-1, dtype=wide)[..., : k.shape[2]].to(q.dtype) @ v


def _by_offsets(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    layout: PackedLayout,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    cu, longest = layout.cu_seqlens, layout.max_seqlen
    if layout.kernel == "flash_attn_4":
        return flash_attention_4.flash_attention_4(q_THD, k_TKD, v_TKD, cu, longest, scale, sliding_window)
    # Both other kernels count the window as tokens before the query, without the query itself.
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    if layout.kernel == "flash_attn":
        from flash_attn import flash_attn_varlen_func

        return flash_attn_varlen_func(
            q_THD, k_TKD, v_TKD, cu, cu, longest, longest, softmax_scale=scale, causal=True, window_size=window
        )
    options: dict[str, Any] = {"scale": scale, "window_size": window}
    if VARLEN_KNOWS_GROUPS:
        options["enable_gqa"] = k_TKD.shape[1] != q_THD.shape[1]
    elif k_TKD.shape[1] != q_THD.shape[1]:
        repeats = q_THD.shape[1] // k_TKD.shape[1]
        k_TKD, v_TKD = k_TKD.repeat_interleave(repeats, dim=1), v_TKD.repeat_interleave(repeats, dim=1)
    attend: Any = varlen_attn
    return attend(q_THD, k_TKD, v_TKD, cu, cu, longest, longest, **options)


def register_attention() -> None:
    """Registers `ATTENTION_NAME` with transformers in this process. Idempotent."""
    # Without a registered mask function, transformers builds no mask.
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
