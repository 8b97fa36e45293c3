"""General settings: model, environments, workers, Ray, weight transfer."""

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from telescope.config.base import MAX_STEPS, Dtype, PathText, Seconds, Section, Text, WholeSeconds, Workers, refuse
from telescope.config.environments import EnvironmentEntry


class GeneralSection(Section, title="General"):
    debug: bool = False
    """Enable debug mode: debug-level logs of the driver, the trainer, vLLM, Ray and environments, collectives that name
    their mismatches (TORCH_DISTRIBUTED_DEBUG, slower), and the stack of every error that ends a run."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the run. Prompt order, sampling and initialization follow from it; with `max_async_rollout: 0` two
    runs with one seed give the same samples. Change it to measure the spread between runs."""
    save_final_model: bool = True
    """Write the trained weights as a Hugging Face folder, `model/` in the run directory, when training ends or is
    stopped by Ctrl-C."""
    run_dir: PathText | None = None
    """Directory of the run: tables, logs, checkpoints, summary. Null: `runs/<wandb_run_name>-<UTC time>` under the
    current directory, or the value of `TELESCOPE_RUN_DIR`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where models run. `auto` uses GPUs if the cluster has any, else the CPU."""
    watchdog_seconds: Seconds = 1800.0
    """Seconds without a finished turn, sample or step after which the run ends, and the stacks of all processes are
    dumped to the logs. Raise it when single answers take longer than this."""


class ModelSection(Section, title="Model"):
    model: Annotated[Text, AfterValidator(os.path.expanduser)] = "Qwen/Qwen2.5-3B"
    """HuggingFace model identifier or local path. A path must contain `config.json`, weights and a tokenizer."""
    model_dtype: Dtype = "float32"
    """Model weight precision: the dtype of the trainer's own weights, gradients and optimizer state. Choose float32
    to keep small updates; bfloat16 halves the memory and rounds away updates below about 1/256 of a weight."""
    mixed_precision_dtype: Dtype | None = "bfloat16"
    """FSDP mixed precision compute dtype. null to disable. Forward and backward run in it while weights and
    optimizer stay in `model_dtype`. Use null on CPU."""
    trust_remote_code: bool = False
    """Run Python code that ships inside the model's repository. Leave off unless you have read that code."""


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class EnvironmentSection(Section, title="Environments"):
    """At least one environment must be configured."""

    environments: list[EnvironmentEntry] = Field(default_factory=list)
    """Environments to train on, each with a sampling weight and its own settings."""
    environments_path: Annotated[list[PathText], BeforeValidator(_as_list)] = Field(default_factory=list)
    """Further folders that hold environments: `<folder>/<name>/environment.py`. Searched before the installed ones."""
    rollout_num_workers: Workers | None = None
    """Processes that run rollouts: prompts, turns, tools and rewards. They run on any node of the cluster. Null: one
    for 64 samples in flight, at most one a core. Raise it when rewards are slow and cores are free."""
    rollout_cpus_per_worker: Annotated[float, Field(ge=0)] = 0
    """CPU cores that Ray reserves for a rollout worker. 0: they share the cores that nothing else reserves."""
    rollout_placement_strategy: Literal["SPREAD", "DEFAULT"] = "SPREAD"
    """Where rollout workers are: on all nodes in turn (SPREAD), or where Ray has room (DEFAULT)."""
    rollout_max_restarts: Annotated[int, Field(ge=0, le=10_000)] = 100
    """Rollout workers that may be replaced in a run, because user code ended or blocked their process."""
    environment_workers: Workers | None = None
    """Another name of rollout_num_workers, which takes precedence."""
    environment_timeout_seconds: Seconds = 120.0
    """Seconds that one call of environment code may take. A slower call is terminated together with its
    process, and its sample is masked."""
    environment_error_budget: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Share of samples, in [0, 1], that may fail in environment code before the run stops. 0 stops at the first
    failure; other shares count from 16 failures on, over the last 512 samples of each environment. Prompts that cannot
    be made have the same limit as a share of prompts; they are no samples."""
    normalize_rewards: bool = False
    """Map each environment's rewards from [reward_min, reward_max] to [0, 1] before advantages are computed.
    Every environment then needs both, from its class or its entry. Off: the ranges only scale charts."""
    eager_prepare_resources: bool = False
    """Start resources of environments (sandbox pools) at the start of the run. Off: with the first sample."""


class WorkerSection(Section, title="Workers"):
    """With GPUs a worker is one GPU.

    The number of inference servers is `inference_num_workers` over `inference_tensor_parallel_size`.
    """

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


PlacementStrategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


def client_address_problem(address: str) -> str | None:
    """Returns why a cluster's address cannot be used, and the fix. None if it can."""
    if "://" not in address:
        return None
    return (
        f"{address.partition('://')[0]}:// addresses are those of clients outside of the cluster, and the driver of a "
        'run must be inside. Start the run on a node of the cluster, with "auto" or with the host and port of the head '
        "node, such as 10.0.0.1:6379"
    )


Cores = Annotated[float, Field(ge=0.0001, le=1024)]
"""A share of a node's CPU cores, which Ray counts in ten-thousandths of a core."""


class RaySection(Section, title="Ray Cluster"):
    ray_address: Annotated[Text, refuse(client_address_problem)] = "auto"
    """Ray cluster address. "auto" joins a cluster that runs on this machine; "local" always starts one of its own;
    host:port joins that one, of which this machine must be a node. Not ray://, which is for clients outside."""
    ray_auto_start_local: bool = True
    """Auto-start a local Ray cluster if none is running. Off: a missing cluster is an error."""
    ray_namespace: Text = "telescope"
    """Ray namespace. Actors of runs in different namespaces do not see each other by name."""
    ray_log_to_driver: bool = True
    """Forward worker logs to the driver process."""
    ray_runtime_env: dict[str, Any] | None = None
    """Custom Ray runtime environment, such as {env_vars: {NCCL_DEBUG: INFO}}. Merged with what the run itself needs,
    NCCL_*, TORCH_NCCL_* and GLOO_* of the shell that starts the run included; this field wins."""
    ray_disable_runtime_env_hook: bool = True
    """Disable Ray's runtime environment hooks: the one that under `uv run` would build an environment anew on every
    node, and one that RAY_RUNTIME_ENV_HOOK names."""
    ray_pin_py_executable: bool = True
    """Pin the Python executable path in workers to the driver's own."""
    ray_propagate_active_venv: bool = True
    """Propagate the active virtualenv to workers (VIRTUAL_ENV and PATH)."""
    ray_propagate_run_dir: bool = True
    """Propagate the run directory to workers (TELESCOPE_RUN_DIR)."""
    ray_broadcast_init_timeout_s: WholeSeconds = 300
    """Timeout for weight broadcast initialization, in seconds."""
    ray_broadcast_prefer_loopback_if_single_node: bool = True
    """Prefer loopback interface for single-node broadcasts, when all ranks and servers are on one node. Off, or on
    several nodes: the node's address, and the interface that has it."""
    ray_shutdown_on_exit: bool = False
    """Shut down the Ray cluster on exit: its processes on this machine, and with the head node the others. A cluster
    that the run started itself is always shut down."""
    ray_inference_cpus_per_worker: Cores = 4.0
    """CPU cores allocated per inference worker. May be a fraction. Lower it when the placement does not fit."""
    ray_trainer_cpus_per_worker: Cores = 4.0
    """CPU cores allocated per trainer worker. May be a fraction. Lower it when the placement does not fit."""
    ray_inference_placement_strategy: PlacementStrategy = "PACK"
    """Placement strategy for inference workers. PACK: few nodes if possible; SPREAD: many nodes if possible;
    STRICT_PACK: one node; STRICT_SPREAD: a node per server. A server's GPUs are always on one node."""
    ray_trainer_placement_strategy: PlacementStrategy = "PACK"
    """Placement strategy for trainer workers. PACK: few nodes if possible; SPREAD: many nodes if possible;
    STRICT_PACK: one node; STRICT_SPREAD: a node per worker."""
    share_gpus: bool = False
    """Let trainer rank i and inference server i use one GPU, for machines with a single one: the server takes
    gpu_memory_utilization of its memory, the rank has the rest, and weights travel through host memory. They slow each
    other down. No effect without GPUs, which a run then reports."""
    ray_placement_timeout_s: WholeSeconds = 900
    """Timeout for Ray placement group creation, in seconds. Waits for resources that other runs use; a run
    that does not fit even the idle cluster is refused at once."""


class WeightSection(Section, title="Weight Broadcasting"):
    weight_broadcast_mode: Literal["flattened_bucket", "per_tensor"] = "flattened_bucket"
    """Strategy for broadcasting updated weights to inference servers. Buckets are faster; per_tensor needs less
    memory."""
    weight_broadcast_bucket_mb: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Bucket size in MB for flattened broadcast. Two buckets are alive at a time on each side."""
    weight_broadcast_cpu_staging: bool = False
    """Use CPU staging buffer for weight transfers. Slower; for GPUs without memory to spare."""
    weight_broadcast_pin_memory: bool = True
    """Use pinned CPU memory for faster H2D transfers. Only with weight_broadcast_cpu_staging."""
    weight_transfer: Literal["auto", "background", "in_place"] = "auto"
    """How a server receives new weights. background: into a second copy while it generates, so that it pauses only for
    the swap; in_place: inside the pause. auto: background where layers and GPU memory allow it (dense, not
    quantized, one GPU), else in_place. background fails with the reason where it is not possible."""
    weight_broadcast_free_grad_buffers: bool = True
    """Free Megatron gradient buffers during broadcast (saves ~14 GB)."""
    weight_probe_every: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 50
    """Weight syncs between two verifications that the engines have loaded exactly the trainer's weights. The initial
    weights and the first sync are always verified; 0 = only those."""
    weight_sync_timeout_seconds: Seconds = 600.0
    """Longest transfer of weights to one server, in seconds. A server that exceeds it, or of several servers one that
    does not respond for half of it, is restarted; the others go on."""
