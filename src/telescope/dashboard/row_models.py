"""What the API returns of samples, evals, spans, gauges and log lines. Times are Unix seconds; unmeasured is null."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from telescope.dashboard.models import Number


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
    server: int | None
    lane: int | None
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
    """An interval of a sample. `first_token_seconds`: of a `prefill`, from the arrival of its request."""

    name: str
    start: float
    end: float
    first_token_seconds: Number


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
