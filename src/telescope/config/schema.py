"""`TelescopeConfig`: the whole configuration of a run as one flat, frozen object.

Joins the sections, applies the rules between fields, and owns the JSON form and the hash. Files and command lines are
read in `loader`; the machine is checked in `plan` and `orchestrator.preflight`.

Invariants:
- An existing value has passed every type, range and cross-field rule.
- It is immutable at any depth. `replace` builds and validates another one.
- `from_json(config.to_json()) == config`, with the same hash, in any process. Child processes get that text and never
  read the user's files again.
- `user_set` contains the names that the user chose (YAML, command line, environment variable, constructor), without
  values that a rule adjusted.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import PrivateAttr, ValidationInfo, model_validator

from telescope.config.base import Section
from telescope.config.rules import apply_rules
from telescope.config.sections import general, record, rollout, trainer

USER_SET_CONTEXT = "user_set"
HASH_LENGTH = 12  # hex digits: 48 bits, ample to tell the configurations of one project apart


class TelescopeConfig(
    rollout.TracingSection,
    trainer.MegatronSection,
    trainer.LoraSection,
    general.WeightSection,
    general.RaySection,
    record.LoggingSection,
    record.EvalSection,
    record.CheckpointSection,
    rollout.InferenceSection,
    rollout.PackingSection,
    rollout.SamplingSection,
    trainer.FilterSection,
    trainer.AlgorithmSection,
    trainer.TrainerSection,
    rollout.OrchestratorSection,
    general.WorkerSection,
    general.EnvironmentSection,
    general.ModelSection,
    general.GeneralSection,
):
    """The resolved configuration. Fields are those of the sections, in `telescope.config.sections`.

    Pydantic collects fields from the last base to the first, so the sections stand in reverse here.

    Raises `pydantic.ValidationError` for a value that does not fit its field, and `telescope.errors.ConfigError` for
    values that do not fit each other. `telescope.config.load_config` turns both into messages for people.
    """

    _user_set: frozenset[str] = PrivateAttr(default=frozenset())
    _notes: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="after")
    def _resolve(self, info: ValidationInfo) -> TelescopeConfig:
        chosen = (info.context or {}).get(USER_SET_CONTEXT)
        user_set = frozenset(self.model_fields_set if chosen is None else chosen)
        self._notes = tuple(apply_rules(self, user_set))
        self._user_set = user_set
        return self

    @property
    def user_set(self) -> frozenset[str]:
        """Names of the fields that a person chose. Defaults and adjusted values are none."""
        return self._user_set

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each default that a rule adjusted. Not part of the JSON form."""
        return self._notes

    @property
    def values(self) -> dict[str, Any]:
        """Every field as plain data, in the order of the schema. The copy can be changed."""
        return self.model_dump(mode="json")

    @property
    def hash(self) -> str:
        """12 hex digits of the SHA-256 of all values as canonical JSON."""
        canonical = json.dumps(self.values, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
        return hashlib.sha256(canonical.encode()).hexdigest()[:HASH_LENGTH]

    def to_json(self) -> str:
        """The form for other processes and the run directory: values, and which were chosen."""
        return json.dumps({"values": self.values, "user_set": sorted(self.user_set)}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> TelescopeConfig:
        """The configuration that `to_json` wrote. Raises `ValueError` for anything else."""
        data = json.loads(text)
        if not isinstance(data, dict) or set(data) != {"values", "user_set"}:
            raise ValueError("not a configuration written by TelescopeConfig.to_json")
        return cls.model_validate(data["values"], context={USER_SET_CONTEXT: data["user_set"]})

    def replace(self, **changes: Any) -> TelescopeConfig:
        """A copy with these fields changed, validated as a whole. The changed fields count as chosen."""
        return type(self).model_validate(
            {**self.values, **changes}, context={USER_SET_CONTEXT: self.user_set | changes.keys()}
        )

    def adjusted(self, **changes: Any) -> TelescopeConfig:
        """A copy with these defaults changed, which then do not count as chosen."""
        return type(self).model_validate({**self.values, **changes}, context={USER_SET_CONTEXT: self.user_set})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TelescopeConfig):
            return NotImplemented
        return self.values == other.values and self.user_set == other.user_set

    def __hash__(self) -> int:
        return hash(self.hash)

    @property
    def num_inference_servers(self) -> int:
        """vLLM processes of the run."""
        return self.inference_num_workers // self.inference_tensor_parallel_size

    @property
    def num_eval_servers(self) -> int:
        """Servers that are dedicated to evals during training."""
        return self.eval_num_servers if self.evals else 0

    @property
    def chosen_rollout_workers(self) -> int | None:
        """Rollout workers that the user chose."""
        return self.rollout_num_workers or self.environment_workers

    @property
    def lanes_per_server(self) -> int:
        """Samples that one server generates at once."""
        return self.max_concurrent_prompts_per_server * self.group_size

    @property
    def precisions(self) -> tuple[str, str]:
        """What the engine and the trainer multiply with: a quantization, else a dtype."""
        engine = self.engine_dtype if self.inference_quantization == "none" else self.inference_quantization
        return engine, "fp8_per_block" if self.megatron_fp8 else self.compute_dtype

    @property
    def compute_dtype(self) -> str:
        """Dtype of the trainer's products: the mixed precision dtype, else the model's."""
        return self.mixed_precision_dtype or self.model_dtype

    @property
    def engine_dtype(self) -> str:
        """Dtype of the engine: `inference_dtype`, else the mixed precision dtype, else the model's."""
        return self.inference_dtype or self.compute_dtype

    @property
    def tracker_names(self) -> list[str]:
        """Trackers of the run: `trackers`, or W&B if `use_wandb` is true."""
        return list(self.trackers) if self.trackers is not None else ["wandb"] * self.use_wandb


SECTIONS: tuple[type[Section], ...] = tuple(reversed(TelescopeConfig.__bases__))
"""The sections in the order of the documentation, the default file and the help."""
