"""Checkpoints, evals, and what a run records and uploads."""

import re
import shlex
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from telescope.config.base import MAX_STEPS, Count, PathText, Seconds, Section, Steps, Text, WholeSeconds, refuse
from telescope.config.environments import EvalEntry

CODE_EXCLUDE_PATTERNS = (
    ".git", ".venv", "venv", "__pycache__", "*.pyc", ".cache", ".mypy_cache", ".pytest_cache", ".ruff_cache",
    "node_modules", "wandb", "runs", "checkpoints", "build", "dist", "*.egg-info", "*.safetensors", "*.parquet",
)  # fmt: skip

_NO_INTERVAL = f"must be 0 (off) or a number of steps, at most {MAX_STEPS}"
_NO_CHECKPOINT = "must be true (the latest), false, or the number of a checkpoint, such as 50"


def _address_problem(text: str) -> str | None:
    is_address = re.fullmatch(r"\S+:\d{1,5}", text) and 0 < int(text.rpartition(":")[2]) <= 65535
    return None if is_address else "it must be HOST:PORT with a port from 1 to 65535, such as 127.0.0.1:9400"


class CheckpointSection(Section, title="Checkpointing"):
    checkpoint_every: Annotated[
        int | bool,
        refuse(lambda value: value is True and "true does not say how often; give a number of steps, such as 50"),
        refuse(lambda value: not 0 <= value <= MAX_STEPS and _NO_INTERVAL),
    ] = False
    """Save every N steps, and after the last one. 0 or false to disable."""
    checkpoint_save_training_state: bool = True
    """Include the optimizer's state. false = weights only: a third of the size or less; a resumed run starts with a
    new optimizer."""
    resume_from_checkpoint: Annotated[
        bool | int, refuse(lambda value: type(value) is int and not 1 <= value <= MAX_STEPS and _NO_CHECKPOINT)
    ] = False
    """true = continue the run in run_dir from its newest checkpoint; integer = from the checkpoint after that step."""
    resume_force: bool = False
    """Resume although the config, the data or the tokenizer changed in a way that is refused otherwise. Prompts may
    then be trained twice or never, and steps before and after are not one experiment."""
    checkpoint_on_exit_timeout_s: Seconds = 600.0
    """Longest time from a stop signal (Ctrl-C, SIGTERM, SIGHUP), or from the error that ends a run, until the last
    checkpoint is complete, in seconds. It is skipped if it takes longer. No limit when a run ends normally."""
    checkpoint_dir: PathText | None = None
    """Custom checkpoint path. Default: RUN_DIR/checkpoints, or the value of `TELESCOPE_CHECKPOINT_DIR`."""
    checkpoint_keep_last: Steps | None = None
    """Keep only the N most recent checkpoints. null keeps all."""
    checkpoint_keep_every: Steps | None = None
    """Always keep checkpoints at these step multiples, whatever checkpoint_keep_last is."""
    trainer_max_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """How often a run replaces its trainer ranks when the process or the node of one is lost, and continues from the
    newest checkpoint. Needs checkpoint_every. 0 = a lost rank ends the run."""


class EvalSection(Section, title="Evals"):
    evals: list[EvalEntry] = Field(default_factory=list)
    """Evaluations of this run, each with its own dataset size, sampling and schedule."""
    eval_before_training: bool = True
    """Run evaluations before training starts."""
    eval_after_training: bool = True
    """Run evaluations after training ends."""
    eval_num_servers: Annotated[int, Field(ge=0, le=1024)] = 1
    """Number of dedicated eval servers reserved from the inference pool. 0 = no periodic evals during training. One
    server for rollouts always remains."""
    eval_start_end_use_all_servers: bool = True
    """Use all inference servers for start/end evals."""


class LoggingSection(Section, title="Logging"):
    """The run directory is complete whatever is chosen here; trackers such as Weights & Biases get a copy."""

    use_wandb: bool = True
    """Enable Weights & Biases logging. Without credentials it records offline into the run directory and reports that
    once."""
    trackers: Annotated[
        list[Literal["wandb", "tensorboard", "trackio"]] | None,
        refuse(lambda value: len(set(value or ())) < len(value or ()) and "must name each tracker once"),
    ] = None
    """All trackers of the run, such as `[wandb, tensorboard]`. null = W&B if use_wandb is true. A list decides
    use_wandb, which then need not be set."""
    wandb_project: Text = "telescope"
    """W&B project name. `WANDB_PROJECT` fills it in when neither the YAML nor the command line sets it."""
    wandb_run_name: Text = "telescope_run"
    """W&B run name. Also names the run directory. `WANDB_RUN_NAME` fills it in when it is not set."""
    wandb_tags: list[str] = Field(default_factory=lambda: ["telescope"])
    """W&B tags. `WANDB_TAGS`, separated by commas, fills them in when they are not set."""
    wandb_upload_record: bool = True
    """Upload the files of the record to W&B, so that `telescope ui ENTITY/PROJECT` shows the run elsewhere. They have
    prompts and answers."""
    wandb_upload_code: bool = True
    """Upload source code to W&B: the code snapshot, as an artifact and with the record."""
    wandb_upload_logs: bool = True
    """Upload trainer/inference logs to W&B: the table `logs`, with the lines of all processes."""
    wandb_upload_logs_detailed: bool = False
    """Include detailed logs in W&B upload: the log files of driver and environments."""
    wandb_upload_logs_stdout: bool = False
    """Include stdout logs in W&B upload: what trainer ranks and vLLM servers print."""
    wandb_code_max_file_size_mb: Annotated[float, Field(gt=0, le=65_536)] = 2.0
    """Largest file of the code snapshot, in MB: `RUN_DIR/code/attempt-<n>.tar.gz` has the sources, the commit and the
    uncommitted changes of each start."""
    wandb_code_exclude_patterns: list[str] = Field(default_factory=lambda: list(CODE_EXCLUDE_PATTERNS))
    """Glob patterns of files and folders that the code snapshot leaves out. Names of secrets, such as `.env`, are left
    out always."""
    system_metrics_collection_interval_seconds: Seconds = 1.0
    """System metrics collection interval, in seconds: GPUs, processor and memory of each machine, and the metrics of
    each vLLM server."""
    torch_memory_sample_interval_seconds: Seconds = 0.1
    """PyTorch memory sampling interval, in seconds: the allocator state of each trainer rank."""
    event_tail_window_seconds: WholeSeconds = 60
    """Tail window for event aggregation, in seconds: how long new rows of a table go into one small file, its tail.
    Then that file is synced to disk, and another begins: a power failure loses the rows of one window at most."""
    event_block_duration_seconds: WholeSeconds = 1800
    """Duration of event blocks, in seconds: after it the tails of a table (spans, gauges, logs, steps, ...) become one
    Parquet file. Tables of rollouts use `rollout_block_size`. 32 MiB of rows become one at any time."""
    event_upload_interval_seconds: WholeSeconds = 5
    """Event upload interval, in seconds: how often trackers get new numbers, and W&B changed files of the record. A
    growing file of more than 1 MB is uploaded less often."""
    metrics_logger_interval_seconds: Seconds = 2.0
    """Metrics logger flush interval, in seconds: how long a row may wait in memory before it is in a file. A kill loses
    the rows of one interval at most."""
    ray_torch_memory_drain_interval_seconds: Seconds = 0.5
    """Interval for draining Ray torch memory metrics, in seconds: how often the driver asks each rank for its
    samples."""
    rollout_block_size: Count = 500
    """Block size for rollout event grouping, in rollouts: after so many samples the tails of the tables of rollouts
    (samples, turns, groups, tokens, ...) become one Parquet file each. From 16 files on, a file has more: 1/16 of the
    run's samples."""
    record_tokens: Literal["none", "all"] | Annotated[int, Field(ge=0, le=65_536)] = 8
    """Samples per step whose tokens are recorded in the table `tokens`: id, logprobs of engine and trainer, entropy,
    policy version and loss mask of each token, about 20 bytes a token. `none`, a number, or `all`. A number is spread
    evenly over the batch; `all` includes samples that are not trained, of discarded groups and of evals."""
    alert_command: str | list[Text] | None = None
    """Command that is run for each alert, for the error that ends a run (kind `run`) and for any other end (kind
    `end`), such as `notify.sh` or `[python, notify.py]`. It gets the alert as JSON on standard input and in
    `TELESCOPE_ALERT_KIND`, `_LEVEL`, `_MESSAGE`, `_ADVICE`, `_STEP`, `_RUN` and `_RUN_DIR`. No shell reads it. One runs
    at a time, for at most 30 seconds; the run never waits for it (docs/record.md)."""
    prometheus_address: Annotated[str, refuse(_address_problem)] | None = None
    """Address at which the driver serves the state of the run to Prometheus, such as 127.0.0.1:9400; 0.0.0.0:9400 for
    other machines. null = none. It asks for no password; it serves numbers and the run's name (docs/service.md)."""
    track_gpu_events: bool = True
    """Record the timeline of each trainer rank in the table `spans`: forward, backward, loss, gradient reduction and
    the other operations, per micro-batch. The metrics `timing_<operation>_*` do not depend on it."""

    @field_validator("alert_command", mode="before")
    @classmethod
    def _split_command(cls, value: Any) -> Any:
        """Splits a text as a shell would. Raises `ValueError` for one without a program."""
        if not isinstance(value, str | list):
            return value
        try:
            parts = shlex.split(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f"{value!r} has {str(error).lower()}; close the quotes, or give a list") from None
        if not parts:
            raise ValueError("must name a program, or be null")
        return parts
