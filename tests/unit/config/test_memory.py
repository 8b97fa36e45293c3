"""Sizes of models and the memory estimate."""

import re
from pathlib import Path

import pytest
import yaml

from telescope.config import TelescopeConfig
from telescope.config.megatron import check_division
from telescope.config.memory import GIB, StagingPlan, estimate_memory, plan_staging
from telescope.config.model_shape import ModelShape, known_shape

EXAMPLES = Path(__file__).parents[3] / "configs" / "examples"
# Parameters as the models' own pages and files state them.
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768, "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304, "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512, "Qwen/Qwen3-0.6B": 596_049_920, "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B-Base": 8_190_735_360, "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
}  # fmt: skip
LLAMA_3_2_1B = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
    "tie_word_embeddings": True, "attention_bias": False, "max_position_embeddings": 131072,
}  # fmt: skip
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip


def config(**values: object) -> TelescopeConfig:
    return TelescopeConfig(**{"environments": [{"name": "a"}], **values})


def test_models_have_their_published_number_of_parameters():
    assert {model: known_shape(model).num_parameters for model in PUBLISHED} == PUBLISHED
    assert ModelShape.from_config(LLAMA_3_2_1B).num_parameters == 1_235_814_400
    assert ModelShape.from_config(QWEN3_30B_A3B).num_parameters == 30_532_122_624


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("example_*.yaml")), ids=lambda path: path.stem)
def test_the_models_of_examples_are_known_without_the_hub(example):
    assert known_shape(yaml.safe_load(example.read_text()).get("model", "Qwen/Qwen2.5-3B"))


def test_the_output_layer_of_a_gemma_is_its_embedding():
    """Its released `config.json` does not say so."""
    gemma_3_1b = {
        "model_type": "gemma3_text", "head_dim": 256, "hidden_size": 1152, "intermediate_size": 6912,
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "vocab_size": 262144,
    }  # fmt: skip
    assert ModelShape.from_config(gemma_3_1b).embedding_parameters == 262144 * 1152


def test_a_dense_layer_among_experts_is_counted_by_its_mlp_width():
    experts = ModelShape.from_config(QWEN3_30B_A3B)
    half = ModelShape.from_config(QWEN3_30B_A3B | {"decoder_sparse_step": 2})
    fewer = 24 * 2048 * (128 * (3 * 768 + 1) - 3 * 6144)
    assert experts.num_parameters - half.num_parameters == fewer

    def estimate(shape: ModelShape, **settings: object):
        return estimate_memory(config(trainer_num_workers=1, **settings), shape)

    assert estimate(experts).engine.weights - estimate(half).engine.weights == 2 * fewer
    # A layer keeps three arrays of the MLP: of 8 experts of 768, or of one of 6,144, which is as wide.
    narrow = ModelShape.from_config(QWEN3_30B_A3B | {"decoder_sparse_step": 2, "intermediate_size": 2048})
    kept = {"gradient_checkpointing": False, "seq_len": 4096}
    saved = estimate(half, **kept).trainer.activations - estimate(narrow, **kept).trainer.activations
    assert saved == 24 * 4096 * 2 * 3 * (6144 - 2048)
    # Layers 0 to 40 are recomputed; of the seven after them, four are sparse.
    some = {"gradient_checkpointing_layers": 41, "seq_len": 4096}
    saved = estimate(half, **some).trainer.activations - estimate(narrow, **some).trainer.activations
    assert saved == 3 * 4096 * 2 * 3 * (6144 - 2048)


def test_what_is_not_known_has_no_shape_and_numbers_may_be_text():
    assert known_shape("acme/secret-1B") is None
    assert ModelShape.from_config({"model_type": "rwkv"}) is None
    for sizes in ({"num_attention_heads": 0}, {"hidden_size": 0}, {"num_hidden_layers": -2}, {"vocab_size": "many"}):
        assert ModelShape.from_config(LLAMA_3_2_1B | sizes) is None
    assert ModelShape.from_config({"text_config": LLAMA_3_2_1B}) == ModelShape.from_config(LLAMA_3_2_1B)
    assert ModelShape.from_config(LLAMA_3_2_1B | {"max_position_embeddings": "512"}).max_position_embeddings == 512


def test_trainer_state_is_sharded_over_ranks():
    shape = known_shape("Qwen/Qwen2.5-3B")
    one = estimate_memory(config(trainer_num_workers=1), shape).trainer
    four = estimate_memory(config(trainer_num_workers=4), shape).trainer
    assert one.parameters == shape.num_parameters * 4
    assert one.optimizer == 2 * one.parameters
    assert four.parameters == pytest.approx(one.parameters / 4, rel=1e-6)
    parts = (one.parameters, one.gradients, one.optimizer, one.unsharded, one.activations, one.moment, one.overhead)
    assert one.total == sum(parts)


def test_checkpointing_saves_activations_and_length_costs_them():
    shape = known_shape("Qwen/Qwen2.5-3B")
    kept = estimate_memory(config(gradient_checkpointing=False), shape).trainer.activations
    recomputed = estimate_memory(config(), shape).trainer.activations
    longer = estimate_memory(config(seq_len=8192), shape).trainer.activations
    least = estimate_memory(config(recompute_attention=True), shape).trainer.activations
    assert kept > 5 * least
    # Layers x tokens x heads x (head dimension x bfloat16, and a float32 sum).
    assert recomputed - least == 36 * 4096 * 16 * (128 * 2 + 4)
    assert longer == 2 * recomputed


def test_ranks_that_share_a_row_have_each_a_part_of_its_activations():
    shape = known_shape("Qwen/Qwen2.5-3B")
    ranks = {"trainer_num_workers": 4, "seq_len": 65_536}
    alone, shared = (
        estimate_memory(config(**ranks, fsdp_context_parallel_size=size), shape, device_memory_bytes=20 * GIB)
        for size in (1, 4)
    )
    assert shared.trainer.activations == alone.trainer.activations / 4
    assert shared.trainer.moment < alone.trainer.moment
    assert shared.trainer.states == alone.trainer.states
    assert "raise fsdp_context_parallel_size" in alone.problems[0]
    assert not any("fsdp_context_parallel_size" in problem for problem in shared.problems)


MEASURED = [
    # shape, tokens, recomputed, model_dtype, GiB: benchmarks/results/trainer.json
    ("qwen3-0.6b", 16_384, "nothing", "float32", 28.28),
    ("qwen3-0.6b", 16_384, "selective", "float32", 11.61),
    ("qwen3-0.6b", 65_536, "selective", "float32", 21.48),
    ("qwen3-0.6b", 65_536, "all", "float32", 14.75),
    ("qwen3-4b", 16_384, "selective", "bfloat16", 34.00),
    ("qwen3-4b", 65_536, "selective", "bfloat16", 61.86),
    ("qwen3-8b", 16_384, "selective", "bfloat16", 66.89),
    ("qwen3-8b", 65_536, "selective", "bfloat16", 96.49),
]


@pytest.mark.parametrize(("name", "tokens", "recomputed", "dtype", "gib"), MEASURED)
def test_the_estimate_is_near_what_was_measured_on_one_gpu(name, tokens, recomputed, dtype, gib):
    settings = {"gradient_checkpointing": recomputed != "nothing", "recompute_attention": recomputed == "all"}
    lengths = {"seq_len": tokens, "max_model_len": tokens, "max_tokens": tokens // 2}
    run = config(trainer_num_workers=1, model_dtype=dtype, **settings, **lengths)
    of = estimate_memory(run, known_shape(name)).trainer
    # One micro-batch a step: while activations are there, nearly no gradients are.
    kept = of.states + of.unsharded
    found = max(kept - of.gradients + of.activations + max(of.layer, of.logprobs), kept + of.tables) / GIB
    assert 0.95 * gib <= found <= 1.05 * gib


@pytest.mark.parametrize(
    ("changes", "gib"),  # a rank of two: benchmarks/results/megatron.json
    [({}, 51.38), ({"megatron_tensor_parallel_size": 2}, 37.11), ({"megatron_gradient_checkpointing": False}, 119.43)],
)
def test_the_estimate_of_megatron_is_near_what_was_measured(changes, gib):
    lengths = {"seq_len": 16_384, "max_tokens": 1024, "max_model_len": 16_384}
    run = config(
        train_backend="megatron", mixed_precision_dtype="bfloat16", trainer_num_workers=2, **lengths, **changes
    )
    trainer = estimate_memory(run, known_shape("qwen3-4b")).trainer
    assert gib <= (trainer.total - trainer.overhead) / GIB < 1.05 * gib


def test_documented_models_fit_a_gpu_of_139_gib():
    def total(name: str, ranks: int, tokens: int, **settings: object) -> float:
        lengths = {"seq_len": tokens, "max_model_len": tokens, "max_tokens": tokens // 2}
        run = config(trainer_num_workers=ranks, **lengths, **settings)
        return estimate_memory(run, known_shape(name)).trainer.total / GIB

    assert total("qwen3-14b", 4, 32_768) == pytest.approx(95, abs=1)
    assert total("qwen3-14b", 4, 65_536, recompute_attention=True) == pytest.approx(103, abs=1)
    assert total("qwen3-8b", 2, 65_536) == pytest.approx(115, abs=1)
    assert total("qwen3-32b", 8, 16_384) == pytest.approx(100, abs=1)
    assert total("qwen3-32b", 4, 16_384, model_dtype="bfloat16") == pytest.approx(100, abs=1)
    assert total("qwen3-0.6b", 1, 65_536, gradient_checkpointing_layers=10) == pytest.approx(68, abs=1)
    assert total("qwen3-4b", 8, 65_536, gradient_checkpointing_layers=24) == pytest.approx(118, abs=1)
    assert total("qwen3-4b", 8, 16_384, gradient_checkpointing=False) == pytest.approx(75, abs=1)


@pytest.mark.parametrize(("gib", "settings", "recomputed"), [
    (80, {}, False), (24, {}, True), (24, {"seq_len": 4096, "max_model_len": 4096}, False),
    (24, {"gradient_checkpointing": False}, False),
    (80, {"share_gpus": True, "inference_num_workers": 1, "gpu_memory_utilization": 0.6}, False),
    (80, {"share_gpus": True, "inference_num_workers": 1, "gpu_memory_utilization": 0.8}, True),
    (24, {"recompute_attention": False}, False), (80, {"recompute_attention": True}, True), (None, {}, False),
])  # fmt: skip
def test_attention_is_recomputed_where_the_memory_of_a_gpu_is_too_small_otherwise(gib, settings, recomputed):
    lengths = {"seq_len": 65_536, "max_model_len": 65_536, "max_tokens": 1024}
    memory = None if gib is None else gib * GIB
    shape = known_shape("qwen3-0.6b")
    run = config(trainer_num_workers=1, **(lengths | settings))
    estimate = estimate_memory(run, shape, device_memory_bytes=memory).trainer
    assert estimate.recomputes_attention is recomputed
    kept = 65_536 * 28 * 16 * (128 * 2 + 4)
    if gib == 24 and not settings:
        always = estimate_memory(config(trainer_num_workers=1, recompute_attention=False, **lengths), shape).trainer
        assert always.activations - estimate.activations == kept
        assert estimate.total < 0.9 * memory < always.total


def test_on_the_cpu_attention_is_kept_and_no_memory_is_set_aside_for_a_second_copy():
    of = estimate_memory(config(), known_shape("qwen3-0.6b"), device="cpu", device_memory_bytes=GIB)
    assert not of.trainer.recomputes_attention
    assert of.engine.staging == 0


def test_gathered_weights_cost_memory_in_what_is_computed_with():
    shape = known_shape("qwen3-8b")
    dropped = estimate_memory(config(), shape).trainer
    stay = estimate_memory(config(fsdp_reshard_after_forward=False), shape).trainer
    assert stay.unsharded == 2 * shape.num_parameters
    assert 0.9 * stay.unsharded < stay.total - dropped.total < stay.unsharded
    one, three = (estimate_memory(config(fsdp_prefetch_layers=n), shape).trainer.total for n in (1, 3))
    assert three - one == 2 * shape.largest_layer_parameters * 2


def test_memory_of_logprobs_depends_on_the_chunk_and_not_on_length_times_vocabulary():
    shape = known_shape("Qwen/Qwen2.5-3B")
    small = estimate_memory(config(seq_len=65536, entropy_chunk_size=512), shape).trainer.logprobs
    assert small < 65536 * shape.vocab_size * 4 / 10


def test_engine_weights_follow_the_engine_dtype_and_tensor_parallelism():
    shape = known_shape("Qwen/Qwen2.5-7B")
    half = estimate_memory(config(inference_dtype="bfloat16"), shape).engine
    full = estimate_memory(config(inference_dtype="float32"), shape).engine
    split = estimate_memory(config(inference_tensor_parallel_size=2), shape).engine
    assert full.weights == 2 * half.weights
    assert split.weights == pytest.approx(half.weights / 2, rel=1e-6)
    assert split.kv_bytes_per_token == half.kv_bytes_per_token // 2


def test_quantized_servers_need_about_half_for_their_weights_and_receive_them_in_place():
    shape = known_shape("Qwen/Qwen2.5-7B")
    half = estimate_memory(config(inference_dtype="bfloat16"), shape).engine
    quantized = config(inference_dtype="bfloat16", inference_quantization="fp8_per_block")
    engine = estimate_memory(quantized, shape).engine
    tables = shape.embedding_parameters * 2
    assert engine.weights - tables == pytest.approx((half.weights - tables) / 2, rel=1e-3)
    assert plan_staging(quantized, shape, 80 * GIB) == StagingPlan(0, "the weights are quantized as they arrive")


def test_the_kv_cache_is_what_the_share_of_the_gpu_leaves():
    shape = known_shape("Qwen/Qwen2.5-3B")
    engine = estimate_memory(config(), shape, device_memory_bytes=80 * GIB).engine
    assert engine.kv_bytes_per_token == 2 * 36 * 2 * 128 * 2
    assert engine.kv_cache == int(80 * GIB * 0.9) - engine.weights - engine.staging - engine.overhead
    assert engine.tokens == engine.kv_cache // engine.kv_bytes_per_token
    assert estimate_memory(config(), shape).engine.kv_cache is None


def test_what_does_not_fit_names_the_field():
    shape = known_shape("Qwen/Qwen2.5-7B")
    tight = estimate_memory(config(), shape, device_memory_bytes=24 * GIB).problems
    assert any("trainer_num_workers" in problem for problem in tight)
    engine = estimate_memory(config(gpu_memory_utilization=0.2), shape, device_memory_bytes=80 * GIB).problems
    assert any("max_model_len" in problem and "gpu_memory_utilization" in problem for problem in engine)
    cpu = estimate_memory(config(inference_kv_cache_gib=1), shape, device="cpu", device_memory_bytes=8 * GIB)
    assert any("inference_kv_cache_gib" in problem for problem in cpu.problems)
    assert cpu.kv_cache_problem is None
    assert not estimate_memory(config(), known_shape("Qwen/Qwen2.5-0.5B"), device_memory_bytes=80 * GIB).problems


def test_a_kv_cache_set_below_one_sequence_is_refused_on_the_cpu_with_what_one_takes():
    """vLLM would round it up to a GiB, which is not what the user set."""

    def problem(gib: float, model: str = "Qwen/Qwen2.5-0.5B", **values: object) -> str:
        settings = config(inference_dtype="float32", **{"max_model_len": 4096, **values}, inference_kv_cache_gib=gib)
        memory = estimate_memory(settings, known_shape(model), device="cpu", device_memory_bytes=64 * GIB)
        return memory.kv_cache_problem or ""

    needed = 4096 * 2 * 24 * 2 * 64 * 4 / GIB
    assert "holds 0 tokens; one sequence takes 0.0938 GiB" in problem(0.00001)
    assert problem(needed * 0.99)
    assert not problem(needed)
    long = problem(1, "Qwen/Qwen2.5-7B", max_model_len=32768, seq_len=32768)
    assert long.startswith("max_model_len is 32768") and "inference_kv_cache_gib" in long


H200 = 140 * GIB


def test_a_second_copy_of_the_weights_reduces_the_kv_cache():
    shape = known_shape("Qwen/Qwen3-4B")
    plan = plan_staging(config(), shape, H200)
    weights, embedding, bucket = 2 * shape.num_parameters, 2 * shape.embedding_parameters, 256 << 20
    assert plan.in_place_because is None
    assert plan.num_bytes == weights + embedding + bucket
    background = estimate_memory(config(), shape, device_memory_bytes=H200).engine
    in_place = estimate_memory(config(weight_transfer="in_place"), shape, device_memory_bytes=H200).engine
    assert (background.staging, in_place.staging) == (plan.num_bytes, 0)
    assert in_place.kv_cache - background.kv_cache == plan.num_bytes
    assert background.total == in_place.total


@pytest.mark.parametrize(("values", "shape", "memory", "reason"), [
    ({"weight_transfer": "in_place"}, known_shape("qwen3-4b"), H200, "weight_transfer is in_place"),
    ({"inference_num_workers": 2, "inference_tensor_parallel_size": 2}, known_shape("qwen3-4b"), H200,
     "tensor-paral"),
    ({}, ModelShape.from_config(QWEN3_30B_A3B), H200, "experts"),
    ({}, None, H200, "sizes of the model"), ({}, known_shape("qwen3-4b"), None, "memory of the GPU"),
    ({}, known_shape("qwen3-14b"), 80 * GIB, r"takes 30\.4 GiB of the 42\.5 GiB"),
])  # fmt: skip
def test_weights_come_in_place_where_a_second_copy_does_not_fit_or_costs_too_much(values, shape, memory, reason):
    plan = plan_staging(config(**values), shape, memory)
    assert plan.num_bytes == 0
    assert re.search(reason, plan.in_place_because)


def test_weight_transfer_background_is_used_while_one_sequence_fits_and_its_cost_is_reported():
    insists = config(weight_transfer="background")
    shape = known_shape("qwen3-14b")
    assert plan_staging(insists, shape, 80 * GIB).num_bytes > 30 * GIB
    assert plan_staging(insists, None, 80 * GIB).in_place_because is None
    assert plan_staging(insists, shape, None) == plan_staging(insists, shape, 80 * GIB)
    problems = estimate_memory(insists, shape, device_memory_bytes=66 * GIB).problems
    assert any("set weight_transfer to in_place, which saves 30.4 GiB" in problem for problem in problems)


def test_a_shared_gpu_has_for_the_trainer_what_the_server_leaves():
    one = {"trainer_num_workers": 1, "inference_num_workers": 1, "share_gpus": True, "gpu_memory_utilization": 0.5}
    small = estimate_memory(config(**one), known_shape("qwen3-0.6b"), device_memory_bytes=80 * GIB)
    assert not [problem for problem in small.problems if "share_gpus" in problem]
    large = estimate_memory(config(**one), known_shape("qwen3-4b"), device_memory_bytes=80 * GIB)
    assert large.trainer.states > 40 * GIB
    assert any("share_gpus leaves it 39.0 of a GPU's 80.0 GiB" in problem for problem in large.problems)


def test_advice_on_memory_is_for_the_backend_and_for_what_is_not_set_yet():
    shape = known_shape("Qwen/Qwen3-14B")

    def advice(**changes: object) -> str:
        return " ".join(estimate_memory(config(**changes), shape, device_memory_bytes=40 * GIB).problems)

    everything = advice(recompute_attention=False)
    assert 'set recompute_attention to true, set model_dtype to "bfloat16", set lora_rank' in everything
    assert "model_dtype" not in advice(model_dtype="bfloat16")
    kept = advice(gradient_checkpointing=False)
    assert "set gradient_checkpointing to true" in kept
    assert "recompute_attention" not in kept, "it has no effect without gradient_checkpointing"
    assert "remove gradient_checkpointing_layers" in advice(gradient_checkpointing_layers=3)
    by_megatron = advice(train_backend="megatron")
    assert "model_dtype" not in by_megatron
    assert "set megatron_optimizer_cpu_offload to true" in by_megatron


def test_a_14b_model_with_adapters_fits_one_gpu():
    shape = known_shape("Qwen/Qwen3-14B")
    settings = {"model_dtype": "bfloat16", "trainer_num_workers": 1, "seq_len": 16384}
    full = estimate_memory(config(**settings), shape, device_memory_bytes=139 * GIB).trainer
    adapted = estimate_memory(config(**settings, lora_rank=16), shape, device_memory_bytes=139 * GIB).trainer
    assert adapted.parameters == full.parameters + 4 * 64_225_280
    assert adapted.gradients == 4 * 64_225_280
    assert adapted.optimizer == 8 * 64_225_280
    assert full.total > 100 * GIB > 55 * GIB > adapted.total
    served = config(**settings, lora_rank=16, lora_sync="adapter")
    assert plan_staging(served, shape, 139 * GIB).num_bytes == 0


SMALL_STATES = {
    "megatron_use_precision_aware_optimizer": True, "megatron_exp_avg_dtype": "bfloat16",
    "megatron_exp_avg_sq_dtype": "bfloat16", "megatron_main_grads_dtype": "bfloat16",
    "megatron_grad_reduce_in_fp32": False,
}  # fmt: skip
SIZES = [f"megatron_{kind}_parallel_size" for kind in ("tensor", "pipeline", "context", "expert")]


def test_the_table_of_models_in_the_documentation_is_the_estimate():
    text = (Path(__file__).parents[3] / "docs" / "large-models.md").read_text()
    table = text.split("## Which backend, how many GPUs?")[1].split("\n\n")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    for model, ranks, backend, sizes, *estimates in rows:
        shape = known_shape("llama-3.3-70b" if model == "70B" else f"qwen3-{model}")
        for seq_len, estimate in zip((16_384, 65_536), estimates, strict=True):
            options = {"seq_len": seq_len, "max_tokens": 1024, "max_model_len": 16_384, "overlong_samples": "truncate"}
            options |= {"mixed_precision_dtype": "bfloat16", "trainer_num_workers": int(ranks), "model": "x"}
            if backend.startswith("Megatron"):
                options |= {"train_backend": "megatron", **dict(zip(SIZES, map(int, sizes.split(",")), strict=True))}
                options |= {"megatron_use_transformer_engine": "Transformer Engine" in backend}
                options |= SMALL_STATES if "small states" in backend else {}
            elif seq_len > 16_384:
                context = re.search(r"fsdp_context_parallel_size: (\d)", backend)
                ranks_of_a_row = int(context[1]) if context else 1
                options |= {"recompute_attention": True, "fsdp_context_parallel_size": ranks_of_a_row}
            else:
                options["recompute_attention"] = False
            if estimate:
                run = config(**options)
                check_division(run, shape)
                found = estimate_memory(run, shape).trainer.total
                assert f"{found / GIB:.0f}" == estimate, (model, ranks, backend, seq_len)
    assert len(rows) > 10
