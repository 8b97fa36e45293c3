"""The schema in sections. `SECTIONS` fixes their order in the documentation, the default file and the help."""

from telescope.config.base import Section
from telescope.config.sections.cluster import RaySection, WeightSection
from telescope.config.sections.general import EnvironmentSection, GeneralSection, ModelSection, WorkerSection
from telescope.config.sections.record import CheckpointSection, EvalSection, LoggingSection
from telescope.config.sections.rollout import (
    InferenceSection,
    OrchestratorSection,
    PackingSection,
    SamplingSection,
    TracingSection,
)
from telescope.config.sections.trainer import AlgorithmSection, FilterSection, MegatronSection, TrainerSection

SECTIONS: tuple[type[Section], ...] = (
    GeneralSection,
    ModelSection,
    EnvironmentSection,
    WorkerSection,
    OrchestratorSection,
    TrainerSection,
    AlgorithmSection,
    FilterSection,
    SamplingSection,
    PackingSection,
    InferenceSection,
    CheckpointSection,
    EvalSection,
    LoggingSection,
    RaySection,
    WeightSection,
    MegatronSection,
    TracingSection,
)

__all__ = [
    "SECTIONS",
    "AlgorithmSection",
    "CheckpointSection",
    "EnvironmentSection",
    "EvalSection",
    "FilterSection",
    "GeneralSection",
    "InferenceSection",
    "LoggingSection",
    "MegatronSection",
    "ModelSection",
    "OrchestratorSection",
    "PackingSection",
    "RaySection",
    "SamplingSection",
    "Section",
    "TracingSection",
    "TrainerSection",
    "WeightSection",
    "WorkerSection",
]
