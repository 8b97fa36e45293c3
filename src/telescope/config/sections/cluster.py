"""Ray, and how new weights reach the inference servers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from telescope.config.base import MAX_STEPS, PlacementStrategy, Seconds, Section, Text, WholeSeconds

LEAST_CORES = 0.0001
"""What Ray counts shares of a core in."""


def client_address_problem(address: str) -> str | None:
    """Returns why a cluster's address cannot be used, and the fix; None if it can."""
    if "://" not in address:
        return None
    return (
        f"{address.partition('://')[0]}:// addresses are those of clients outside of the cluster, and the driver of a "
        'run must be inside. Start the run on a node of the cluster, with "auto" or with the host and port of the head '
        "node, such as 10.0.0.1:6379"
    )


def _inside_of_the_cluster(address: str) -> str:
    if problem := client_address_problem(address):
        raise ValueError(problem)
    return address


def _countable(cores: float) -> float:
    if 0 < cores < LEAST_CORES:
        raise ValueError(f"it must be at least {LEAST_CORES}, the smallest share of a core that Ray counts")
    return cores


Cores = Annotated[float, AfterValidator(_countable), Field(ge=LEAST_CORES, le=1024)]
"""A share of a node's CPU cores."""


class RaySection(Section):
    TITLE: ClassVar[str] = "Ray Cluster"

    ray_address: Annotated[Text, AfterValidator(_inside_of_the_cluster)] = "auto"
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


class WeightSection(Section):
    TITLE: ClassVar[str] = "Weight Broadcasting"

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
    """Longest transfer of weights to one server, in seconds. A server that exceeds it is restarted; the
    others go on."""
