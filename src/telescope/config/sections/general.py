"""General settings, the model, the environments and the number of workers."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from telescope.config.base import Dtype, Seconds, Section, Text, Workers
from telescope.config.environments import EnvironmentEntry


class GeneralSection(Section):
    TITLE: ClassVar[str] = "General"

    debug: bool = False
    """Enable debug mode: debug-level logs of the driver, the trainer, vLLM, Ray and environments, collectives that name
    their mismatches (TORCH_DISTRIBUTED_DEBUG, slower), and the stack of every error that ends a run."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the run. Prompt order, sampling and initialization follow from it; with `max_async_rollout: 0` two
    runs with one seed give the same samples. Change it to measure the spread between runs."""
    save_final_model: bool = True
    """Write the trained weights as a Hugging Face folder, `model/` in the run directory, when training ends or is
    stopped by Ctrl-C."""
    run_dir: Text | None = None
    """Directory of the run: tables, logs, checkpoints, summary. Null: `runs/<wandb_run_name>-<UTC time>` under the
    current directory, or the value of `TELESCOPE_RUN_DIR`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where models run. `auto` uses GPUs if the cluster has any, else the CPU."""
    watchdog_seconds: Seconds = 1800.0
    """Seconds without a finished sample and without a finished step after which the stacks of all processes are
    dumped to the logs. Raise it when single answers take longer than this."""


class ModelSection(Section):
    TITLE: ClassVar[str] = "Model"

    model: Text = "Qwen/Qwen2.5-3B"
    """HuggingFace model identifier or local path. A path must contain `config.json`, weights and a tokenizer."""
    model_dtype: Dtype = "float32"
    """Model weight precision: the dtype of the trainer's own weights, gradients and optimizer state. Choose float32
    to keep small updates; bfloat16 halves the memory and rounds away updates below about 1/256 of a weight."""
    mixed_precision_dtype: Dtype | None = "bfloat16"
    """FSDP mixed precision compute dtype. null to disable. Forward and backward run in it while weights and
    optimizer stay in `model_dtype`. Use null on CPU."""
    trust_remote_code: bool = False
    """Run Python code that ships inside the model's repository. Leave off unless you have read that code."""


class EnvironmentSection(Section):
    TITLE: ClassVar[str] = "Environments"
    INTRO: ClassVar[str] = "At least one environment must be configured."

    environments: list[EnvironmentEntry] = Field(default_factory=list)
    """Environments to train on, each with a sampling weight and its own settings."""
    environments_path: list[Text] = Field(default_factory=list)
    """Further folders that hold environments: `<folder>/<name>/environment.py`. Searched before the installed ones."""
    environment_workers: Workers | None = None
    """Processes that run rewards, tools and turns. Null: the number of cores, at most 4. Raise it when rewards are
    slow and cores are free."""
    environment_timeout_seconds: Seconds = 120.0
    """Seconds that one call of environment code may take. A slower call is terminated together with its
    process, and its sample is masked."""
    environment_error_budget: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share of samples, in [0, 1], that may fail in environment code before the run stops. 0 stops at the first
    failure; other shares count from 16 failures on, over the last 512 samples of each environment. Prompts that cannot
    be made, or leave no space for an answer, have the same limit as a share of prompts; they are no samples."""
    normalize_rewards: bool = False
    """Map each environment's rewards from [reward_min, reward_max] to [0, 1] before advantages are computed.
    Every environment then needs both, from its class or its entry. Off: the ranges only scale charts."""
    eager_prepare_resources: bool = False
    """Start resources of environments (sandbox pools) at the start of the run. Off: with the first sample."""


class WorkerSection(Section):
    TITLE: ClassVar[str] = "Workers"
    INTRO: ClassVar[str] = (
        "With GPUs a worker is one GPU. The number of inference servers is `inference_num_workers` over "
        "`inference_tensor_parallel_size`."
    )

    inference_num_workers: Workers = 2
    """Number of vLLM inference workers. Must be divisible by inference_tensor_parallel_size. Add some when the
    trainer waits for batches."""
    inference_tensor_parallel_size: Workers = 1
    """Tensor parallelism degree for each inference server. Raise it when the model does not fit one GPU."""
    trainer_num_workers: Workers = 2
    """Number of FSDP/Megatron trainer workers. Add some when inference waits for the trainer, or to fit a larger
    model."""
    inference_threads: Workers | None = None
    """CPU threads of each inference server when it runs on the CPU. Null: what `ray_inference_cpus_per_worker`
    gives, at least 1."""
    trainer_threads: Workers | None = None
    """CPU threads of each trainer worker when it runs on the CPU. Null: what `ray_trainer_cpus_per_worker` gives,
    at least 1."""
