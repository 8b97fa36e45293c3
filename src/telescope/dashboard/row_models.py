"""Models of API responses about samples, evals, spans, gauges and logs. Times are Unix seconds; null is unmeasured."""

from typing import Any

from pydantic import BaseModel

from telescope.dashboard.curves import STATISTICS
from telescope.dashboard.models import Number, columns_of
from telescope.dashboard.rollouts import IN_FLIGHT
from telescope.dashboard.tables import LONG_COLUMNS
from telescope.dashboard.timeline import SPAN_COLUMNS
from telescope.record.tables import TABLES


@columns_of("step_stats", known="step n", names=" ".join(("step", "histogram", *STATISTICS)), as_lists=True)
class Distribution(BaseModel):
    """The distribution of a number of the samples, per step. `histogram`: samples in equal bins from low to high."""

    low: list[Number]
    high: list[Number]


@columns_of("evals", known="attempt eval_id name source status step version num_items num_completions num_scored")
class EvalRow(BaseModel):
    """The result of one eval: a row of the table `evals`.

    `name` has the eval's number where the run has several of that name; `eval_name` is the name in `samples`.
    """

    eval_name: str | None


@columns_of(
    "samples", known="attempt sample_id", names="attempt sample_id step stop_reason completion_tokens golden tags"
)
class EvalSample(BaseModel):
    """An answer of an eval. `score` is the metric of the eval, null if it has none."""

    item: int
    completion: int
    score: Number
    prompt: str
    answer: str


@columns_of("samples", known="status", names="reward advantage status metrics")
class GroupSample(BaseModel):
    """A sample as a square of its group. `ratio` is the trainer's probability of its tokens over the engine's."""

    id: str
    length: int | None
    logprob_sum: Number
    ratio: Number
    completion: str


@columns_of("groups", known="attempt", names="attempt environment status reason step reward_mean reward_std")
class Group(BaseModel):
    """A prompt that was opened for training, with its samples."""

    id: int
    prompt: str
    samples: list[GroupSample]


@columns_of("samples", known="attempt sample_id", names=" ".join(IN_FLIGHT))
class InFlight(BaseModel):
    """A sample that is being generated. `start_version` is the policy version when its group was opened."""


class Facet(BaseModel):
    """A value of a column, and the number of its samples."""

    value: str
    count: int


@columns_of(
    "samples",
    known="attempt sample_id group_id sample_index environment status step",
    names=" ".join(name for name in TABLES["samples"].column_names if name not in LONG_COLUMNS["samples"]),
)
class SampleNumbers(BaseModel):
    """What every answer about a sample has: its row of the table `samples`, without texts."""

    prompt_key: str | None = None


class SampleRow(SampleNumbers):
    """A sample in a list, with the beginnings of its texts."""

    prompt: str
    completion: str
    snippet: str | None


class Samples(BaseModel):
    """A page of samples, and counts over the whole search."""

    total: int
    rows: list[SampleRow]
    facets: dict[str, list[Facet]]
    metrics: list[str]


class Prompt(BaseModel):
    """A prompt: the number of its scored and right answers, in total and at each of `steps`, and its first answer."""

    prompt_key: str
    environment: str
    prompt: str
    n: int
    num_right: int
    pass_rate: float
    reward_mean: Number
    first_step: int
    last_step: int
    first_right: int | None
    attempt: int
    sample_id: str
    group_id: int | None
    steps: list[int]
    counts: list[int]
    rights: list[int]


class Prompts(BaseModel):
    """A page of prompts, and how many were never, always or sometimes answered right."""

    total: int
    never: int
    always: int
    sometimes: int
    rows: list[Prompt]


@columns_of("turns", known="attempt sample_id turn role text")
class Turn(BaseModel):
    """A turn of a conversation, with arrays of recorded tokens."""

    tokens: list[str] | None = None
    token_ids: list[int] | None = None
    logprobs: list[Number] | None = None
    trainer_logprobs: list[Number] | None = None
    entropies: list[Number] | None = None
    versions: list[int] | None = None
    mask: list[bool] | None = None


@columns_of("tool_calls", known="attempt sample_id call name")
class ToolCall(BaseModel):
    """A call of a tool."""


@columns_of("info", known="attempt sample_id number key")
class Info(BaseModel):
    """A note that an environment attached to a sample."""


@columns_of("spans", known="name start end", names="name start end")
class SampleSpan(BaseModel):
    """An interval of a sample. `first_token_seconds`: of a `prefill`, from the arrival of its request."""

    first_token_seconds: Number


@columns_of("spans", known="name start end", names="name start end")
class SandboxSpan(BaseModel):
    """A call of a sandbox's provider for a sample. `error`: the class of the error that it raised."""

    sandbox: str | None
    error: str | None


class Conversation(BaseModel):
    """A conversation of an agent's rollout. `turns` are its messages, without those of an earlier one of its chat.

    `depth` is that in the tree. `about` says why it begins, how much it has, and whether it is trained.
    """

    name: str
    depth: int
    about: str
    turns: list[int]


class PromptMessage(BaseModel):
    """A message of a prompt. The role `prompt` is one of a prompt that no chat template rendered."""

    role: str
    content: str | None = None
    tool_calls: Any = None


class Sample(SampleNumbers):
    """Everything about a sample: its row of the table `samples`, and the rows of other tables that belong to it."""

    prompt_text: str | None
    messages: list[PromptMessage]
    golden: dict[str, str]
    failure_message: str | None
    divergences: dict[str, Number]
    turns: list[Turn]
    conversations: list[Conversation]
    tool_calls: list[ToolCall]
    info: list[Info]
    spans: list[SampleSpan]
    sandbox_spans: list[SandboxSpan]


@columns_of("spans", known="component name start end", names=" ".join(SPAN_COLUMNS), as_lists=True)
class Spans(BaseModel):
    """Intervals as columns.

    `merged`: spans shorter than `part_seconds` are rows that stand for `count` spans of a lane, kind and status, and
    last as long as the lane shows these. `slots`: the request slots of each server, over the whole run.
    """

    merged: bool
    part_seconds: float
    slots: dict[int, int]
    count: list[int]
    lane: list[int | None]
    status: list[str | None]


class PathStep(BaseModel):
    """A step with a critical path."""

    step: int
    start: float
    end: float


@columns_of("samples", known="step sample_id group_id", names="step sample_id group_id server lane finished_at")
class PathAnswer(BaseModel):
    """The last answer of a group that a step trained on."""


@columns_of("spans", known="component name start end", names="component name rank server step sample_id start end")
class PathSpan(BaseModel):
    """An interval that overlaps the step `of_step`."""

    of_step: int
    lane: int | None


class Paths(BaseModel):
    """The parts of the critical paths of steps."""

    steps: list[PathStep]
    answers: list[PathAnswer]
    spans: list[PathSpan]


@columns_of("gauges", known="name component", names="name component node gpu rank server labels")
class GaugeSeries(BaseModel):
    """Readings of one gauge: smallest, mean and largest per bucket of time."""

    time: list[float]
    min: list[Number]
    mean: list[Number]
    max: list[Number]


class SandboxTimes(BaseModel):
    """Calls of the providers of sandboxes by operation, and their seconds: median and 95th percentile."""

    name: str
    count: int
    p50: float
    p95: float


class GaugeName(BaseModel):
    """A gauge of the run."""

    name: str
    component: str
    series: int


@columns_of("logs", known="attempt")
class LogLine(BaseModel):
    """A log line. `row` is its index in the table, the cursor of `since`, `before` and `after`."""

    row: int


class Logs(BaseModel):
    """Log lines by time. `next` is the cursor `since` for later lines."""

    next: int
    rows: list[LogLine]
    components: list[str]
    sources: list[str]


class ChangedCell(BaseModel):
    """Samples of one environment with the same tags: `mix` and `within` of all cells add up to the change."""

    environment: str | None
    cell: str
    n_before: int
    n_after: int
    mean_before: Number
    mean_after: Number
    mix: Number
    within: Number


class Effect(BaseModel):
    """A step metric, or the seconds of a kind of span: its means, and their difference in standard deviations."""

    name: str
    kind: str
    before: Number
    after: Number
    effect: float


@columns_of("alerts", known="attempt", names="attempt step time level kind message")
class ChangedEvent(BaseModel):
    """An alert near the step."""


@columns_of(
    "samples",
    known="attempt sample_id step",
    names="attempt sample_id group_id step environment reward completion_tokens stop_reason",
)
class ChangedAnswer(BaseModel):
    """An answer that differs much from those before. `mean_before` is the mean of its environment and tags."""

    cell: str
    value: Number
    mean_before: Number
    answer: str


class Changes(BaseModel):
    """Changes at a step. `decomposed` is the metric of the cells: the requested one, or the reward."""

    decomposed: str
    cells: list[ChangedCell]
    effects: list[Effect]
    events: list[ChangedEvent]
    answers: list[ChangedAnswer]
