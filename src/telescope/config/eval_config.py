"""The configuration of `telescope eval`. It has what to measure, and the fields of the training schema that concern it.

A YAML file or flags set both. Fields that concern only training are refused. `build_eval_config` makes the
`TelescopeConfig` that servers and environments of an eval are started with; for checkpoints of a run it begins with the
run's own values, so that prompts and sampling are those of the run.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from telescope.config.base import Count, PathText, Section, Steps, Text
from telescope.config.environments import EvalEntry
from telescope.config.loader import build_config, parse_overrides
from telescope.config.messages import describe_errors, unknown_field
from telescope.config.model_source import files_in
from telescope.config.schema import TelescopeConfig
from telescope.config.sections.general import EnvironmentSection, RaySection
from telescope.config.sections.rollout import InferenceSection
from telescope.config.yaml_file import read_yaml_file
from telescope.errors import ConfigError


class CheckpointEntry(Section):
    """One checkpoint or model to evaluate."""

    path: PathText
    """A checkpoint, a model folder, or a name on the Hugging Face hub."""
    step: Steps | None = None
    """Its training step. Null: the number in the name of its folder."""


class EvalCommand(Section):
    """The fields of `telescope eval` that the training schema does not have."""

    evals: list[EvalEntry] = Field(default_factory=list)
    """What to measure. Empty: the evals of the run."""
    checkpoint_dir: PathText | None = None
    """A run directory, or a folder with step_N folders."""
    checkpoints: list[CheckpointEntry] = Field(default_factory=list)
    """Checkpoints and models, one by one."""
    hf_weights: bool | Text | list[Text] | None = None
    """Names on the hub or model folders to evaluate too. true: the checkpoints must be Hugging Face models."""
    max_concurrent_samples_per_server: Count = 256
    """Samples that one server generates at once."""
    wandb_run_path: Text | None = None
    """W&B run that receives the results: entity/project/run_id."""


SHARED_FIELDS = frozenset(
    {
        *InferenceSection.model_fields,
        *(name for name in RaySection.model_fields if "trainer" not in name and "broadcast" not in name),
        *("inference_num_workers", "inference_tensor_parallel_size", "inference_threads", "temperature", "top_p"),
        *("max_tokens", "interleaved_rollouts", "enable_prompt_prefetch", "model_dtype", "mixed_precision_dtype"),
        *("trust_remote_code", "seed", "device", "debug", "watchdog_seconds", "environments_path", "seq_len"),
        *("environment_workers", "environment_timeout_seconds", "eager_prepare_resources", "request_timeout_seconds"),
        *(name for name in EnvironmentSection.model_fields if name.startswith("rollout_")),
        "environment_error_budget",
        *("stop_token_ids", "stop", "allow_special_tokens_in_content"),
        *("weight_broadcast_bucket_mb", "weight_sync_timeout_seconds", "free_lane_after_generation"),
    }
    - {"share_gpus"}
)
"""Fields of the training schema that concern evals."""

INHERITED_FIELDS = SHARED_FIELDS | {"environments", "overlong_samples"}
"""Fields whose values are taken from the config of an evaluated run."""

MEASURED = (
    "temperature", "top_p", "max_tokens", "max_model_len", "seq_len", "seed", "enable_thinking", "chat_template",
    "interleaved_rollouts", "overlong_samples", "stop_token_ids", "stop", "allow_special_tokens_in_content",
)  # fmt: skip
"""Fields that change results: other values are another measurement."""

SAMPLING = frozenset({"temperature", "top_p", "max_tokens"})
"""Fields that an entry of `evals` may set for itself."""

PLACEHOLDER_ENVIRONMENT = [{"name": "countdown"}]
"""Required by the schema, which is that of training. Evals do not use it."""


@dataclass(frozen=True)
class EvalRequest:
    """What the user asked for. `fields` are chosen fields of the training schema, and `flags` those set by flags."""

    command: EvalCommand
    fields: Mapping[str, Any] = field(default_factory=dict)
    flags: Set[str] = frozenset()
    notes: list[str] = field(default_factory=list)


def load_eval_request(
    path: Path | None, overrides: Sequence[str] = (), command: Mapping[str, Any] | None = None
) -> EvalRequest:
    """Reads the request from a YAML file and flags, which win.

    `overrides` are flags of fields, `command` has values of `EvalCommand`. Raises `ConfigError` for an unknown field,
    and for one that only training has.
    """
    values, sources = read_yaml_file(path) if path is not None else ({}, {})
    flags = parse_overrides(overrides)
    values = {**values, **flags, **(command or {})}
    sources |= dict.fromkeys((*flags, *(command or {})), "command line")
    known = (*EvalCommand.model_fields, *SHARED_FIELDS)
    problems = []
    for name in values:
        if name in known:
            continue
        if name in TelescopeConfig.model_fields:
            fix = "Name models as arguments" if name == "model" else "Remove it"
            problems.append(f"{name} ({sources[name]}) is a field of training, which evals do not use. {fix}")
        else:
            problems.append(unknown_field(str(name), known, sources.get(name), values[name]))
    if problems:
        raise ConfigError("\n".join(problems))
    own = {name: values[name] for name in EvalCommand.model_fields if name in values}
    try:
        parsed = EvalCommand.model_validate(own)
    except ValidationError as error:
        raise ConfigError(describe_errors(error, own, sources)) from None
    fields = {name: value for name, value in values.items() if name in SHARED_FIELDS}
    notes = []
    if "enable_prompt_prefetch" in fields:
        notes.append("enable_prompt_prefetch has no effect: all prompts of an eval are rendered before it starts")
    return EvalRequest(parsed, fields, flags.keys(), notes)


def known_evals(request: EvalRequest, of_run: Sequence[EvalEntry]) -> tuple[list[EvalEntry], list[EvalEntry]]:
    """Returns the evals of the request and of the run, without sampling of their own that the request replaces.

    Flags replace that of both, and fields of the request's file that of the run's.
    """
    replaced = ((request.command.evals, request.flags), (of_run, request.fields.keys()))
    given, inherited = (
        [entry.model_copy(update=dict.fromkeys(SAMPLING & names)) for entry in entries] for entries, names in replaced
    )
    return given, inherited


def build_eval_config(
    request: EvalRequest, run_config: Mapping[str, Any] | None, evals: Sequence[EvalEntry], model: Path
) -> TelescopeConfig:
    """Returns the config of an eval's servers and environments.

    The servers load the folder `model` first. `run_config` are the values of the evaluated run's config; without them,
    lengths fit the model's context. Raises `ConfigError`.
    """
    defaults = TelescopeConfig.model_fields
    inherited = {
        name: value
        for name, value in (run_config or {}).items()
        if name in INHERITED_FIELDS and value != defaults[name].get_default(call_default_factory=True)
    }
    values: dict[str, Any] = {"environments": PLACEHOLDER_ENVIRONMENT, "inference_num_workers": 1}
    values |= {**inherited, **request.fields}
    if run_config is None:
        known = files_in(model, str(model)).read_object("config.json") if model.is_dir() else None
        longest = (known or {}).get("max_position_embeddings") or math.inf
        context = values.setdefault("max_model_len", min(defaults["max_model_len"].default, longest))
        if isinstance(context, int):  # else it is refused below
            values.setdefault("max_tokens", min(defaults["max_tokens"].default, context))
            values.setdefault("seq_len", context)
    tensor_parallel = values.get("inference_tensor_parallel_size", 1)
    if "inference_num_workers" not in request.fields and isinstance(tensor_parallel, int):
        values["inference_num_workers"] = max(values["inference_num_workers"], tensor_parallel)
    entries = [entry.model_dump(mode="json") for entry in evals]
    given = request.fields.get("temperature")
    if given == 0 and not isinstance(given, bool):  # greedy: `temperature` of training refuses 0, so each eval gets it
        del values["temperature"]
        entries = [entry | ({"temperature": 0.0} if entry["temperature"] is None else {}) for entry in entries]
    values |= {
        "model": str(model.absolute()),
        "evals": entries,
        "max_concurrent_prompts_per_server": request.command.max_concurrent_samples_per_server,
        "group_size": 1,
        "weight_transfer": "in_place",
        "eval_num_servers": 0,
        "enable_vllm_tracing": False,
        "use_wandb": False,
    }
    return build_config(values)


def measurement_digest(config: TelescopeConfig, evals: Sequence[EvalEntry]) -> str:
    """Returns a digest of everything but the model on which results depend."""
    entries = [entry.model_dump(mode="json", exclude={"eval_every"}) for entry in evals]
    values = {name: config.values[name] for name in MEASURED} | {"evals": entries, "dtype": config.engine_dtype}
    if any(entry.kwargs == {} for entry in evals):  # it may take those of the run's environment
        values["environments"] = config.values["environments"]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
