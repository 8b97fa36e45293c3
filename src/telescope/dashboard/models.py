"""What the API returns. Times are Unix seconds; a number that was not measured is null."""

from __future__ import annotations

from typing import Any, Literal

import pydantic_core
from pydantic import BaseModel

Number = float | None


class RemoteCopy(BaseModel):
    """How far the copy of a run on W&B is. `listed`: no page has asked for it, and it has no tables."""

    phase: Literal["listed", "syncing", "synced", "failed"]
    source: str
    done_bytes: int
    total_bytes: int
    message: str | None


def to_json(value: Any) -> bytes:
    """Returns an answer as JSON. NaN and infinity are null; numpy's arrays and numbers are lists and numbers.

    Halves of surrogate pairs, which a name may have and UTF-8 cannot, become question marks.
    """
    try:
        return pydantic_core.to_json(value, inf_nan_mode="null", fallback=_plain)
    except (pydantic_core.PydanticSerializationError, UnicodeError):
        return pydantic_core.to_json(_encodable(value), inf_nan_mode="null", fallback=_plain)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(one) for key, one in value.items()}
    return [_encodable(one) for one in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


class RunRow(BaseModel):
    """A run in the list of runs. `key` stays when its folder moves; runs of one `experiment` differ in their seed."""

    id: str
    key: str
    name: str
    status: str
    live: bool
    started_at: Number
    duration: Number
    attempt: int
    steps: int
    num_steps: int | None
    reward_first: Number
    reward_last: Number
    heldout_before: Number
    heldout_after: Number
    error: str | None
    project: str
    tags: list[str]
    model: str | None
    algorithm: str | None
    environments: list[str]
    max_step: int | None
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


class Runs(BaseModel):
    """The list of runs, newest first."""

    runs: list[RunRow]
    problems: list[Problem]
    roots: list[str]


class Attempt(BaseModel):
    """A start of a run: a row of the table `attempts`."""

    attempt: int
    started_at: Number
    config_hash: str | None
    git_commit: str | None
    git_dirty: bool | None
    versions: dict[str, str]
    topology: dict[str, str]
    notes: list[str]
    first_step: int | None
    host: str | None
    pid: int | None


class MetricRange(BaseModel):
    """Smallest and largest expected value of a metric."""

    min: Number
    max: Number


class Environment(BaseModel):
    """An environment of a run: a row of the table `environments`."""

    attempt: int
    key: str
    name: str
    purpose: str
    weight: Number
    num_samples: int | None
    is_multi_turn: bool | None
    reward_min: Number
    reward_max: Number
    metrics_ranges: dict[str, MetricRange]
    tags_options: dict[str, list[str]]
    not_extendable: str | None


class RunInfo(BaseModel):
    """A run: its config, attempts, environments and result. `user_set`: settings that the user wrote."""

    info: RunRow
    config: dict[str, Any]
    user_set: list[str]
    attempts: list[Attempt]
    environments: list[Environment]
    result: dict[str, Any]
    checkpoints: list[int]


class Server(BaseModel):
    """An inference server and its current activity."""

    name: str
    doing: str


class Now(BaseModel):
    """What a run does right now. Everything but `live` is empty when it has ended or does not say."""

    live: bool
    time: Number
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
    tokens_in_flight: int
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
    config: dict[str, Any]
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
    """A sentence of the verdict, and the metrics that it read."""

    text: str
    metrics: list[str]


class HealthCell(BaseModel):
    """One number of the health strip: mean of the last 10 steps, in words."""

    name: str
    title: str
    metric: str
    latest: Number
    unit: str
    words: str
    attention: bool


class Alert(BaseModel):
    """Something that a person should know."""

    step: int | None
    time: Number
    kind: str | None
    level: str | None
    title: str
    text: str
    advice: str | None
    metrics: list[str]
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


class Distribution(BaseModel):
    """The distribution of a number of the samples, per step. `histogram`: samples in equal bins from low to high."""

    step: list[int]
    n: list[int]
    mean: list[Number]
    std: list[Number]
    min: list[Number]
    max: list[Number]
    p5: list[Number]
    p25: list[Number]
    p50: list[Number]
    p75: list[Number]
    p95: list[Number]
    gini: list[Number]
    low: list[Number]
    high: list[Number]
    histogram: list[list[int] | None]


class EvalRow(BaseModel):
    """The result of one eval: a row of the table `evals`."""

    attempt: int
    eval_id: str
    name: str
    number: int | None
    source: str
    status: str
    error: str | None
    step: int
    version: int
    started_at: Number
    ended_at: Number
    num_items: int
    num_completions: int
    num_scored: int
    temperature: Number
    top_p: Number
    max_tokens: int | None
    held_out: bool | None
    metric: str | None
    accuracy: Number
    accuracy_low: Number
    accuracy_high: Number
    gain: Number
    gain_low: Number
    gain_high: Number
    metrics: dict[str, Number]
    servers: list[int] | None


class EvalSample(BaseModel):
    """An answer of an eval. `score` is the metric of the eval, null if it has none."""

    attempt: int
    sample_id: str
    item: int
    completion: int
    step: int | None
    score: Number
    stop_reason: str | None
    completion_tokens: int | None
    prompt: str
    answer: str
    golden: dict[str, str]
    tags: dict[str, str]


class GroupSample(BaseModel):
    """A sample as a square of its group."""

    id: str
    reward: Number
    advantage: Number
    status: str
    length: int | None
    completion: str
    metrics: dict[str, Number]


class Group(BaseModel):
    """A prompt that was opened for training, with its samples."""

    attempt: int
    id: int
    environment: str | None
    prompt: str
    status: str | None
    reason: str | None
    step: int | None
    reward_mean: Number
    reward_std: Number
    samples: list[GroupSample]


class InFlight(BaseModel):
    """A sample that is being generated. `start_version` is the policy version when its group was opened."""

    attempt: int
    sample_id: str
    group_id: int | None
    sample_index: int | None
    environment: str | None
    start_version: int | None
    prompt_tokens: int | None
    started_at: Number


class Facet(BaseModel):
    """A value of a column and how many samples of the search have it."""

    value: str
    count: int


class SampleNumbers(BaseModel):
    """What every answer about a sample has: its row of the table `samples`, without texts."""

    attempt: int
    sample_id: str
    group_id: int
    sample_index: int
    environment: str
    status: str
    reason: str | None
    step: int
    reward: Number
    advantage: Number
    metrics: dict[str, Number]
    tags: dict[str, str]
    stop_reason: str | None
    num_turns: int | None
    prompt_tokens: int | None
    completion_tokens: int | None
    start_version: int | None
    end_version: int | None
    age: int | None
    server: int | None
    lane: int | None
    started_at: Number
    generated_at: Number
    finished_at: Number
    failure_kind: str | None
    eval_name: str | None
    penalty: Number
    environment_tokens: int | None
    num_retries: int | None
    wasted_tokens: int | None
    total_tokens: int | None


class SampleRow(SampleNumbers):
    """A sample in a list, with the beginnings of its texts."""

    prompt: str
    completion: str


class Samples(BaseModel):
    """A page of samples, and counts over the whole search."""

    total: int
    rows: list[SampleRow]
    facets: dict[str, list[Facet]]


class Turn(BaseModel):
    """A turn of a conversation, with the arrays of its tokens where they were recorded."""

    attempt: int
    sample_id: str
    turn: int
    role: str
    text: str
    num_tokens: int | None
    started_at: Number
    ended_at: Number
    restarts: bool | None
    divergence: str | None
    tokens: list[str] | None = None
    token_ids: list[int] | None = None
    logprobs: list[Number] | None = None
    trainer_logprobs: list[Number] | None = None
    entropies: list[Number] | None = None
    versions: list[int] | None = None
    mask: list[bool] | None = None


class ToolCall(BaseModel):
    """A call of a tool."""

    attempt: int
    sample_id: str
    turn: int | None
    call: int
    name: str
    arguments: str | None
    result: str | None
    error: str | None
    seconds: Number


class Info(BaseModel):
    """A note that an environment attached to a sample."""

    attempt: int
    sample_id: str
    number: int
    turn: int | None
    key: str
    value: str | None


class SampleSpan(BaseModel):
    """An interval of a sample."""

    name: str
    start: float
    end: float


class Sample(SampleNumbers):
    """Everything about a sample: its row of the table `samples`, and the rows of other tables that belong to it."""

    prompt_text: str | None
    completion_text: str | None
    golden: dict[str, str]
    failure_message: str | None
    divergences: dict[str, Number]
    info_turns: Any
    turns: list[Turn]
    tool_calls: list[ToolCall]
    info: list[Info]
    spans: list[SampleSpan]


class Spans(BaseModel):
    """Intervals as columns. `merged`: rows stand for `count` spans of one lane and kind."""

    merged: bool
    count: list[int]
    attempt: list[int | None]
    component: list[str]
    name: list[str]
    rank: list[int | None]
    server: list[int | None]
    lane: list[int | None]
    step: list[int | None]
    micro_batch: list[int | None]
    sample_id: list[str | None]
    start: list[float]
    end: list[float]


class GaugeSeries(BaseModel):
    """Readings of one gauge: smallest, mean and largest per bucket of time."""

    name: str
    component: str
    node: str | None
    gpu: int | None
    rank: int | None
    server: int | None
    labels: dict[str, str]
    time: list[float]
    min: list[Number]
    mean: list[Number]
    max: list[Number]


class GaugeName(BaseModel):
    """A gauge of the run."""

    name: str
    component: str
    series: int


class LogLine(BaseModel):
    """A log line. `row` is its place in the table, the cursor of `since` and `before`."""

    row: int
    attempt: int
    time: Number
    level: str | None
    component: str | None
    message: str | None
    process: int | None
    place: str | None
    source: str | None


class Logs(BaseModel):
    """Log lines, oldest first. `next` is the cursor for later ones."""

    next: int
    rows: list[LogLine]
    components: list[str]
    sources: list[str]
    levels: list[str]


class ConfigDifference(BaseModel):
    """A setting: one value per run, in the order of the request. `bookkeeping`: a name, folder or port."""

    key: str
    values: list[Any]
    bookkeeping: bool


class Start(BaseModel):
    """Code and machines of the newest attempt of a run."""

    run: str
    started_at: Number
    git_commit: str | None
    git_dirty: bool | None
    host: str | None
    versions: dict[str, str]
    topology: dict[str, str]


class Comparison(BaseModel):
    """Settings of runs, those that differ or all, and the code and machines of their newest attempts."""

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
    """Differences of the code of two runs, in the newest attempts that have code."""

    files: list[FileDifference]
    num_equal: int


class Document(BaseModel):
    """A document that the user keeps. `value` is null and `version` empty if there is none yet."""

    value: Any
    version: str
