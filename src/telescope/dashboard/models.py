"""Models of API responses about runs, their code and configs; `row_models` has the others. Times are Unix seconds."""

from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import pyarrow as pa
import pydantic_core
from pydantic import BaseModel, create_model

from telescope.dashboard.remote import RemoteCopy
from telescope.record.files import plain_value
from telescope.record.reader import RunSummary
from telescope.record.tables import INT32_LIST, NUMBERS, TABLES, TEXT_LIST, TEXTS

Number = float | None
Model = TypeVar("Model", bound=BaseModel)

TYPES: dict[pa.DataType, Any] = {
    pa.string(): str, pa.int64(): int, pa.float64(): float, pa.bool_(): bool, INT32_LIST: list[int],
    TEXT_LIST: list[str], NUMBERS: dict[str, Number], TEXTS: dict[str, str],
}  # fmt: skip


def columns_of(
    table: str, *, known: str = "", names: str = "", as_lists: bool = False
) -> Callable[[type[Model]], type[Model]]:
    """Adds columns of a table to a model, by default all. Only `known` columns and maps are never null.

    With `as_lists`, the model has many rows, as a list for each column.
    """
    chosen = names.split() or TABLES[table].column_names

    def extend(model: type[Model]) -> type[Model]:
        fields: dict[str, Any] = {}
        for column in TABLES[table].columns:
            if column.name in chosen and column.name not in model.model_fields:
                of_column: Any = TYPES[column.type]
                required = column.name in known.split() or column.type in (NUMBERS, TEXTS)
                of_column = of_column if required else of_column | None
                fields[column.name] = (list[of_column] if as_lists else of_column, ...)
        return create_model(model.__name__, __base__=model, __doc__=model.__doc__, **fields)

    return extend


def to_json(value: Any) -> bytes:
    """Encodes a response as JSON: NaN and infinity as null, numpy arrays and numbers as lists and numbers.

    Replaces lone surrogates, which names may contain but UTF-8 cannot, by question marks.
    """
    try:
        return pydantic_core.to_json(value, inf_nan_mode="null", fallback=plain_value)
    except (pydantic_core.PydanticSerializationError, UnicodeError):
        return pydantic_core.to_json(_encodable(value), inf_nan_mode="null", fallback=plain_value)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(one) for key, one in value.items()}
    return [_encodable(one) for one in value] if isinstance(value, list | tuple) else value


FROM_SUMMARY = (
    *("name", "status", "started_at", "duration", "attempt", "steps", "num_steps", "reward_first", "reward_last"),
    *("heldout_before", "heldout_after", "error", "project"),
)
"""Fields of `RunSummary` that a row of the list of runs has."""


def summary_of(model: type[Model]) -> type[Model]:
    """Adds the fields `FROM_SUMMARY` to a model."""
    types = get_type_hints(RunSummary)
    fields: dict[str, Any] = {name: (types[name], ...) for name in FROM_SUMMARY}
    return create_model(model.__name__, __base__=model, __doc__=model.__doc__, **fields)


@summary_of
class RunRow(BaseModel):
    """A run in the list of runs. `key` stays when its folder moves; runs of an `experiment` differ in seed.

    `heldout_after` is measured after `heldout_step` steps; `best_checkpoint` is the one with the highest result.
    `metrics` has the metric of `heldout` and of each eval's field where it is not `correct`.
    """

    id: str
    key: str
    live: bool
    heldout_step: int | None
    best_checkpoint: int | None
    metrics: dict[str, str]
    tags: list[str]
    model: str | None
    algorithm: str | None
    environments: list[str]
    rewards: list[Number]
    experiment: str
    fields: dict[str, Any]
    remote: RemoteCopy | None


class Field(BaseModel):
    """A field of runs: `config.NAME`, `last.METRIC` or `eval.NAME`, with how many runs and values it has."""

    name: str
    runs: int
    values: int
    examples: list[Any]


class Problem(BaseModel):
    """A folder that could not be read, and why."""

    path: str
    problem: str


class Project(BaseModel):
    """A W&B project whose runs are shown. `runs` is the number of Telescope runs."""

    path: str
    runs: int
    problem: str | None


class Projects(BaseModel):
    """The W&B projects. If `can_change`, the document `projects` adds and removes some."""

    can_change: bool
    projects: list[Project]
    removed: list[str]
    problem: str | None


class Runs(BaseModel):
    """The list of runs, newest first."""

    runs: list[RunRow]
    problems: list[Problem]
    roots: list[str]


@columns_of(
    "attempts",
    known="attempt notes",
    names=" ".join(name for name in TABLES["attempts"].column_names if name != "model_config"),
)
class Attempt(BaseModel):
    """A start of a run: a row of the table `attempts`."""


class MetricRange(BaseModel):
    """Smallest and largest expected value of a metric."""

    min: Number
    max: Number


@columns_of("environments", known="attempt key name purpose")
class Environment(BaseModel):
    """An environment of a run: a row of the table `environments`."""

    metrics_ranges: dict[str, MetricRange]
    tags_options: dict[str, list[str]]


@columns_of("nodes", known="attempt node gpus links")
class Node(BaseModel):
    """A machine of a run: a row of the table `nodes`."""


class RunInfo(BaseModel):
    """A run. `path` and `final_model` are quoted for a shell. `user_set` lists the settings that the user wrote.

    `written` has the checkpoints that an ended run has written, also those that are not in its folder; None if that is
    not known. `unreadable` lists files of its record. `version` is the server's.
    """

    info: RunRow
    config: dict[str, Any]
    user_set: list[str]
    attempts: list[Attempt]
    environments: list[Environment]
    nodes: list[Node]
    result: dict[str, Any]
    checkpoints: list[int]
    written: list[int] | None
    path: str
    final_model: str | None
    unreadable: list[str]
    version: str


class Server(BaseModel):
    """An inference server and its current activity."""

    name: str
    doing: str


class Now(BaseModel):
    """What a run does right now. Everything but `live` is empty when it has ended or does not say.

    `age_seconds`: since it was written, by the server's clock, because that of a browser may be wrong.
    """

    live: bool
    time: Number
    age_seconds: Number
    phase: str | None
    step: int | None
    version: int | None
    num_generating: int | None
    num_slots: int | None
    num_waiting: int | None
    num_open_groups: int | None
    num_finished_groups: int | None
    tokens_per_second: Number
    seconds_left: Number
    eval_done: int | None
    eval_total: int | None
    oldest_seconds: Number
    trainer: str | None
    servers: list[Server]
    components: dict[str, str]


class ModelPart(BaseModel):
    """A part of a model: how many there are, their sizes in words, and the parameters of one."""

    part: str
    count: int
    sizes: str
    parameters: int


class Architecture(BaseModel):
    """The model of a run. `kv_bytes_per_token` is of keys and values in bfloat16, over all layers."""

    name: str | None
    source: str | None
    model_type: str | None
    layers: int | None
    parameters: int | None
    active_parameters: int | None
    kv_bytes_per_token: int | None
    max_position_embeddings: int | None
    parts: list[ModelPart]


class StepColumns(BaseModel):
    """Rows of steps as columns. `next` is the cursor of the next request."""

    next: int
    attempt: list[int]
    step: list[int]
    started_at: list[Number]
    ended_at: list[Number]
    num_tokens_trained: list[Number]
    metrics: dict[str, list[Number]]


class Sentence(BaseModel):
    """A sentence of the verdict, and its metrics. `is_outcome`: it states the result of an eval, or the reward."""

    text: str
    metrics: list[str]
    is_outcome: bool


class HealthCell(BaseModel):
    """One number of the health strip: mean of the last 10 steps, in words."""

    name: str
    title: str
    metric: str
    latest: Number
    unit: str
    words: str
    attention: bool


@columns_of("alerts", known="metrics", names="step time kind level advice metrics")
class Alert(BaseModel):
    """Something that a person should know. Reported `count` times, from `first_step` and `first_time` on."""

    first_step: int | None
    first_time: Number
    count: int
    title: str
    text: str
    resolved: bool


class Progress(BaseModel):
    """How far the run is. `step` is the number of finished steps."""

    step: int
    num_steps: int | None
    seconds_left: Number


class Health(BaseModel):
    """What the first page says about a run."""

    verdict: list[Sentence]
    cells: list[HealthCell]
    alerts: list[Alert]
    progress: Progress


class ConfigDifference(BaseModel):
    """A setting: one value per run, in the order of the request. `bookkeeping`: a name, folder or port."""

    key: str
    values: list[Any]
    bookkeeping: bool


@columns_of("attempts", names="started_at git_commit git_dirty host versions topology")
class Start(BaseModel):
    """Code and machines of the newest attempt of a run."""

    run: str


class Comparison(BaseModel):
    """Settings of runs, those that differ or all. It also has the code and machines of their newest attempts."""

    runs: list[str]
    config: list[ConfigDifference]
    num_differing: int
    attempts: list[Start]


class CodePath(BaseModel):
    """A file of the code, and its bytes."""

    path: str
    size: int


class Code(BaseModel):
    """Code of an attempt: git state, uncommitted changes as a diff, files. `attempts` are those that have code."""

    attempts: list[int]
    attempt: int | None
    git: dict[str, Any]
    left_out: list[str]
    changes: str
    files: list[CodePath]


class CodeFile(BaseModel):
    """A file of the code. `text` is null if it is binary or too large."""

    path: str
    size: int
    text: str | None


class FileDifference(BaseModel):
    """A file that was `added`, `removed` or `changed`. `diff` is null if it is not compared line by line."""

    path: str
    status: str
    added: int | None
    removed: int | None
    diff: str | None


class CodeDifference(BaseModel):
    """Differences of the newest code of two runs."""

    files: list[FileDifference]
    num_equal: int


class Costs(BaseModel):
    """The time of engines and ranks, in seconds of `unit` (GPU or process) by use, and tokens by outcome."""

    unit: str
    tokens: dict[str, int]
    engines: dict[str, float]
    trainer: dict[str, float]
