"""What the API returns of samples, evals, spans, gauges and log lines. Times are Unix seconds; unmeasured is null."""

from __future__ import annotations

from typing import Any

from telescope.dashboard.curves import STATISTICS
from telescope.dashboard.models import Number, model
from telescope.dashboard.rollouts import IN_FLIGHT
from telescope.dashboard.store import LONG_COLUMNS
from telescope.dashboard.timeline import SPAN_COLUMNS
from telescope.record.rollout_tables import GROUPS, INFO, SAMPLES, TOOL_CALLS, TURNS
from telescope.record.tables import EVALS, GAUGES, LOGS, SPANS, STEP_STATS

# Fields of a model share lines.
# fmt: off

Distribution: Any = model(
    "Distribution",
    "The distribution of a number of the samples, per step. `histogram`: samples in equal bins from low to high.",
    of=STEP_STATS, names=("step", *STATISTICS), known="step n", in_lists=True,
    low=list[Number], high=list[Number], histogram=list[list[int] | None],
)
EvalRow: Any = model(
    "EvalRow", "The result of one eval: a row of the table `evals`.", of=EVALS,
    known="attempt eval_id name source status step version num_items num_completions num_scored",
)
EvalSample: Any = model(
    "EvalSample", "An answer of an eval. `score` is the metric of the eval, null if it has none.", attempt=int,
    sample_id=str, item=int, completion=int, step=int | None, score=Number, stop_reason=str | None,
    completion_tokens=int | None, prompt=str, answer=str, golden=dict[str, str], tags=dict[str, str],
)
GroupSample: Any = model(
    "GroupSample", "A sample as a square of its group.", id=str, reward=Number, advantage=Number, status=str,
    length=int | None, completion=str, metrics=dict[str, Number],
)
Group: Any = model(
    "Group", "A prompt that was opened for training, with its samples.", of=GROUPS, known="attempt",
    names=("attempt", "environment", "status", "reason", "step", "reward_mean", "reward_std"),
    id=int, prompt=str, samples=list[GroupSample],
)
InFlight: Any = model(
    "InFlight", "A sample that is being generated. `start_version` is the policy version when its group was opened.",
    of=SAMPLES, names=IN_FLIGHT, known="attempt sample_id",
)
Facet: Any = model("Facet", "A value of a column, and the number of its samples.", value=str, count=int)
SampleNumbers: Any = model(
    "SampleNumbers", "What every answer about a sample has: its row of the table `samples`, without texts.",
    of=SAMPLES, names=[name for name in SAMPLES.column_names if name not in LONG_COLUMNS["samples"]],
    known="attempt sample_id group_id sample_index environment status step",
)
SampleRow: Any = model(
    "SampleRow", "A sample in a list, with the beginnings of its texts.", base=SampleNumbers, prompt=str,
    completion=str,
)
Samples: Any = model(
    "Samples", "A page of samples, and counts over the whole search.", total=int, rows=list[SampleRow],
    facets=dict[str, list[Facet]],
)
Turn: Any = model(
    "Turn", "A turn of a conversation, with arrays of recorded tokens.", of=TURNS,
    known="attempt sample_id turn role text", tokens=(list[str] | None, None), token_ids=(list[int] | None, None),
    logprobs=(list[Number] | None, None), trainer_logprobs=(list[Number] | None, None),
    entropies=(list[Number] | None, None), versions=(list[int] | None, None), mask=(list[bool] | None, None),
)
ToolCall: Any = model("ToolCall", "A call of a tool.", of=TOOL_CALLS, known="attempt sample_id call name")
Info: Any = model(
    "Info", "A note that an environment attached to a sample.", of=INFO, known="attempt sample_id number key",
)
SampleSpan: Any = model(
    "SampleSpan", "An interval of a sample. `first_token_seconds`: of a `prefill`, from the arrival of its request.",
    name=str, start=float, end=float, first_token_seconds=Number,
)
Sample: Any = model(
    "Sample",
    "Everything about a sample: its row of the table `samples`, and the rows of other tables that belong to it.",
    base=SampleNumbers, prompt_text=str | None, completion_text=str | None, golden=dict[str, str],
    failure_message=str | None, divergences=dict[str, Number], turns=list[Turn], tool_calls=list[ToolCall],
    info=list[Info], spans=list[SampleSpan],
)
Spans: Any = model(
    "Spans",
    "Intervals as columns. `merged`: rows stand for `count` spans of one lane and kind, and last as long as these.",
    of=SPANS, names=SPAN_COLUMNS, known="component name start end", in_lists=True, merged=bool, count=list[int],
    lane=list[int | None],
)
GaugeSeries: Any = model(
    "GaugeSeries", "Readings of one gauge: smallest, mean and largest per bucket of time.", of=GAUGES,
    names=("name", "component", "node", "gpu", "rank", "server", "labels"), known="name component",
    time=list[float], min=list[Number], mean=list[Number], max=list[Number],
)
GaugeName: Any = model("GaugeName", "A gauge of the run.", name=str, component=str, series=int)
LogLine: Any = model(
    "LogLine", "A log line. `row` is its place in the table, the cursor of `since`, `before` and `after`.", of=LOGS,
    known="attempt", row=int,
)
Logs: Any = model(
    "Logs", "Log lines by time. `next` is the cursor `since` of those that come later.", next=int, rows=list[LogLine],
    components=list[str], sources=list[str],
)
