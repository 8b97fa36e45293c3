"""The schema in sections. `SECTIONS` fixes their order in the documentation, the default file and the help."""

from telescope.config.base import Section
from telescope.config.sections.algorithm import AlgorithmSection, FilterSection
from telescope.config.sections.cluster import RaySection, WeightSection
from telescope.config.sections.general import EnvironmentSection, GeneralSection, ModelSection, WorkerSection
from telescope.config.sections.inference import InferenceSection, TracingSection
from telescope.config.sections.megatron import MegatronSection
from telescope.config.sections.record import CheckpointSection, EvalSection, LoggingSection
from telescope.config.sections.rollout import OrchestratorSection, PackingSection, SamplingSection
from telescope.config.sections.trainer import TrainerSection

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
