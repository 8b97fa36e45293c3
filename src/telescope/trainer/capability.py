"""Finds out whether a model can be trained, and how, by trying a small copy of it.

The copy has the model's class and config with few layers, a short vocabulary and short windows, and random weights. A
way to compute several samples at once is correct if their logprobs equal those that transformers computes for each
sample alone. Differences reveal a recurrence that would mix packed samples, an unknown change of the logits, an
attention that cannot be replaced, and rotary positions that depend on the row.
"""

import copy
import math
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from telescope.config.model_shape import EXPERT_COUNTS
from telescope.errors import UserError
from telescope.trainer.attention import register_attention
from telescope.trainer.model import PACKED, Execution, PolicyModel, auto_class, load_config, reason
from telescope.trainer.model_input import model_input
from telescope.trainer.packing import lay_out, untrained_sample
from telescope.utils.timeline import Timeline

WAYS = (PACKED, Execution("sdpa", packs=False), Execution("eager", packs=False))
"""Ways to compute several samples, from the fastest to the slowest."""

PACKED_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Model types known to be packed correctly (`benchmarks/families.py`), so that a run does not try them."""

EXPERT_MODEL_TYPES = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "glm4_moe", "granitemoe")
"""Mixture-of-experts types whose weight transfer `benchmarks/families.py` verifies."""

MAX_LAYERS = 8
VOCABULARY = 64
WINDOW = 4
LARGEST = {
    "sliding_window": WINDOW, "attention_chunk_size": WINDOW, "vocab_size_per_layer_input": VOCABULARY,
    "intermediate_size": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    **dict.fromkeys(EXPERT_COUNTS, 8), "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
"""Largest values of the copy's config, by field."""
LENGTHS = (9, 5, 7)
"""Tokens of the samples, all longer than a window."""
TOLERANCE = 2e-4
"""Nats, in float32. Rounding causes 1e-6, a convolution of three tokens over a boundary causes 1."""
DISTURBANCE = 0.8
"""Standard deviation of the noise added to weights, times the root of the hidden size, for logits of order 1."""

DERIVED = (".mamba.A_log", ".mixer.A_log")


def choose_execution(
    model: str, max_model_len: int, *, trust_remote_code: bool = False, plain_too: bool = False
) -> Execution:
    """Returns the fastest correct way to compute several samples of a model at once, found on the CPU.

    Raises `UserError` for a model that cannot be loaded, built or computed correctly. Plain decoders are known to be
    packed, and are tried only with `plain_too`.
    """
    config = load_config(model, trust_remote_code=trust_remote_code)
    refuse_known_differences(model, config.get_text_config(), max_model_len)
    if config.model_type in PACKED_TYPES and not plain_too:
        return PACKED
    register_attention()
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(0)

        def build(config: PretrainedConfig, attention: str = "eager") -> Any:
            options: dict[str, Any] = {"attn_implementation": attention, "dtype": torch.float32}
            options["trust_remote_code"] = trust_remote_code
            return auto_class(config).from_config(copy.deepcopy(config), **options)

        try:
            with torch.device("meta"):
                skeleton = build(config)
            refuse_modules(model, config.get_text_config().model_type, skeleton)
            small = shrink(config)
            alone = build(small)
            alone.eval()
            alpha = DISTURBANCE / math.sqrt(alone.config.get_text_config().hidden_size)
            for parameter in alone.parameters():  # norms and biases start as ones and zeros
                parameter.add_(torch.randn_like(parameter), alpha=alpha)
            samples = [torch.randint(3, VOCABULARY, (length,)) for length in LENGTHS]
            wanted_N = torch.cat([_logprobs_alone(alone, sample) for sample in samples])
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"model: {model!r} ({config.model_type}): a small copy of it cannot be computed: {reason(error)}. "
                "Choose another model"
            ) from error
        reasons = []
        for way in WAYS:
            try:
                other = build(small, way.attention)
                other.load_state_dict(alone.state_dict())
                policy = PolicyModel(other, VOCABULARY, packs=way.packs)
                difference = float((_logprobs_together(policy, samples) - wanted_N).abs().max())
            except Exception as error:
                reasons.append(reason(error))
                continue
            if difference <= TOLERANCE:
                return way
            reasons.append(f"logprobs differ by {difference:.1g} nats from those of each sample alone")
    raise UserError(
        f"model: {model!r} ({config.model_type}) cannot be trained. Packed: {reasons[0]}. Side by side: {reasons[-1]}. "
        "Choose another model"
    )


def refuse_modules(model: str, model_type: str, skeleton: PreTrainedModel) -> None:
    """Raises `UserError` for layers that the weight transfer does not support."""
    if any(name.endswith(DERIVED) for name, _ in skeleton.named_parameters()):
        raise UserError(
            f"model: {model!r} ({model_type}) has Mamba layers, of which vLLM keeps a function of the weight A_log, so "
            "that the weight transfer cannot be checked. Choose another model"
        )
    modules = " ".join(name for name, _ in skeleton.named_modules())
    if model_type not in EXPERT_MODEL_TYPES and ("expert" in modules or "moe" in modules):
        raise UserError(
            f"model: {model!r} is a mixture of experts of type {model_type}. Of models with experts, the weight "
            f"transfer supports only {', '.join(EXPERT_MODEL_TYPES)}. Choose one of those, or a dense model"
        )


def refuse_known_differences(model: str, config: PretrainedConfig, max_model_len: int) -> None:
    """Raises `UserError` for tokens at which trainer and engine are known to compute different values.

    `config` is the text model's config.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [part for part in (rope, *rope.values()) if isinstance(part, dict)]  # one for all layers, or by their type
    if any(part.get("rope_type") == "dynamic" and not part.get("alpha") for part in kinds):
        raise UserError(
            f"model: {model!r} has rotary positions of rope_type dynamic: transformers scales them by the length of a "
            "row, vLLM always. Set rope_type in config.json to yarn or linear, or choose another model"
        )
    original = min((int(part.get("original_max_position_embeddings") or 2**31) for part in kinds), default=2**31)
    boundary, why = 2**31, ""
    if any(part.get("rope_type") == "longrope" for part in kinds):
        boundary, why = original, "transformers chooses the factors of longrope by the length of a row, vLLM once"
    elif any(part.get("llama_4_scaling_beta") for part in kinds):
        boundary, why = original, "vLLM and transformers scale the queries behind them differently"
    elif config.model_type == "cohere2" and config.sliding_window:
        boundary, why = int(config.sliding_window), "the window of vLLM is one token longer than that of transformers"
    longest = getattr(config, "max_position_embeddings", None) or -1  # -1: relative positions, of any length
    if not rope and 0 < longest < boundary:
        boundary, why = longest, "it has no position embeddings for more"
    if max_model_len > boundary:
        raise UserError(
            f"max_model_len is {max_model_len}, but beyond {boundary} tokens {model!r} cannot be trained: {why}. Lower "
            f"max_model_len to {boundary} or less"
        )


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """Returns a config of the same model with few layers, experts and tokens, and short windows."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    num_layers = int(text.num_hidden_layers)
    lists = [list(getattr(text, name, None) or ()) for name in ("layer_types", "mlp_layer_types")]
    needed = max((kinds.index(kind) for kinds in lists for kind in set(kinds)), default=1) + 1
    kept = min(num_layers, max(2, min(needed, MAX_LAYERS)))
    shared = getattr(text, "num_kv_shared_layers", 0)  # the last ones, with keys and values of layers of their kind
    if shared:
        kept = 2 * len(set(lists[0]))
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == num_layers and name != "architectures":
            setattr(text, name, value[:kept])
    text.num_hidden_layers = kept
    if shared:
        text.layer_types = list(dict.fromkeys(lists[0])) * 2
        text.num_kv_shared_layers = kept // 2
    for name, largest in LARGEST.items():
        value = getattr(text, name, None)
        if isinstance(value, int) and value > largest:
            setattr(text, name, largest)
    text.vocab_size = VOCABULARY
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        for part in (small, text):
            if getattr(part, name, None) is not None:
                setattr(part, name, 0)
    vision = getattr(small, "vision_config", None)
    if vision is not None and getattr(vision, "num_hidden_layers", None):
        vision.num_hidden_layers = 1
    return small


def _logprobs_alone(model: PreTrainedModel, tokens_L: torch.Tensor) -> torch.Tensor:
    logits_LV = model(tokens_L[None], use_cache=False).logits[0, :-1].float()
    return logits_LV.log_softmax(-1).gather(1, tokens_L[1:, None])[:, 0]


def _logprobs_together(policy: PolicyModel, samples: list[torch.Tensor]) -> torch.Tensor:
    row = lay_out([untrained_sample("trial", sample.numpy()) for sample in samples])
    device = torch.device("cpu")
    inputs = model_input(row, device, "padded" if policy.packs else None)
    logprob_N, _ = policy(inputs, 1.0, Timeline(device, 0, enabled=False))
    return logprob_N
