"""Every table of a run's record, column by column: the one place where they are defined and described.

Owns the schemas, the descriptions that `telescope query --tables` and `docs/record.md` print, and how dear the rows of
a table are when memory runs out. Does not own how rows reach the disk (`recorder`, `table_writer`) or come back
(`reader`).

Invariants: a column never changes its type or meaning; a new one is added at the end of its table, and rows that were
written before it read as null. All times are Unix seconds (UTC, float64), so that a difference is a duration.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import pyarrow as pa

TEXT = pa.string()
INTEGER = pa.int64()
NUMBER = pa.float64()
BOOLEAN = pa.bool_()
TIME = pa.float64()
NUMBERS = pa.map_(pa.string(), pa.float64())
TEXTS = pa.map_(pa.string(), pa.string())
TEXT_LIST = pa.list_(pa.string())
INT32_LIST = pa.list_(pa.int32())
FLOAT32_LIST = pa.list_(pa.float32())


class Keep(IntEnum):
    """How long a pending row is kept when the disk cannot take rows as fast as they come; the lowest goes first."""

    TELEMETRY = 0
    """Spans, gauges and log lines: useful, plentiful, and gone first."""
    DETAIL = 1
    """Turns: long texts whose sum is also in the sample."""
    RESULT = 2
    """Samples and groups: dropped only when nothing cheaper is left."""
    ALWAYS = 3
    """Runs, attempts and steps: never dropped. At most a few rows a second, so that memory stays bounded."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column: name, Arrow type, and what a reader has to know about it."""

    name: str
    type: pa.DataType
    doc: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the record. `key` identifies a row; `by_step` says that a later attempt can supersede its rows."""

    name: str
    doc: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    keep: Keep
    by_step: bool = False
    latest_wins: bool = False
    """Several rows of one key are versions of it, and readers show the newest alone."""

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of a segment that is written today."""
        return pa.schema([pa.field(column.name, column.type) for column in self.columns])

    @property
    def column_names(self) -> tuple[str, ...]:
        """The names, in the order of the schema."""
        return tuple(column.name for column in self.columns)


ATTEMPT = Column("attempt", INTEGER, "Which start of the run wrote this row, from 1. Filled in by the recorder.")

RUNS = Table(
    "runs",
    "One row per run. `telescope query` shows its status as it is now, not as it was last written.",
    (
        Column("run_id", TEXT, "Identity of the run, the same over all attempts."),
        Column("name", TEXT, "`wandb_run_name` of the config."),
        Column("started_at", TIME, "Start of the first attempt."),
        Column("config_hash", TEXT, "First 12 hex digits of the hash of the resolved config."),
        Column("config_json", TEXT, "The resolved config, as JSON."),
        Column("project", TEXT, "`wandb_project` of the config."),
        Column("tags", TEXT_LIST, "`wandb_tags` of the config."),
        Column("status", TEXT, "`live`, `finished`, `stopped`, `failed`, or `dead` (no end written, process gone)."),
        Column("ended_at", TIME, "End of the last attempt; null while live or when the process was killed."),
        Column("error", TEXT, "Why the run failed, first line; null otherwise."),
    ),
    key=("run_id",),
    keep=Keep.ALWAYS,
    latest_wins=True,
)

ATTEMPTS = Table(
    "attempts",
    "One row per start of a run: the first one, and one for each resume.",
    (
        ATTEMPT,
        Column("started_at", TIME, "When this attempt started."),
        Column("config_hash", TEXT, "Hash of the config of this attempt."),
        Column("git_commit", TEXT, "Commit that the code was at; null outside a checkout."),
        Column("git_dirty", BOOLEAN, "Whether the checkout had uncommitted changes."),
        Column("versions", TEXTS, "Versions of Python and of the packages that matter."),
        Column("topology", TEXTS, "Nodes, devices and which process ran where, as the run saw them."),
        Column(
            "notes",
            TEXT_LIST,
            "What the run said at its start: adjusted defaults, settings without effect, notices of environments.",
        ),
        Column(
            "first_step",
            INTEGER,
            "First step that this attempt trains. Rows of earlier attempts at this step or later are superseded, "
            "and readers hide them.",
        ),
        Column("host", TEXT, "Machine of the driver."),
        Column("pid", INTEGER, "Process of the driver."),
    ),
    key=("attempt",),
    keep=Keep.ALWAYS,
    latest_wins=True,
)

ENVIRONMENTS = Table(
    "environments",
    "One row per environment and eval of an attempt: what it says of itself, for the scales of charts.",
    (
        ATTEMPT,
        Column("key", TEXT, "What the run calls it; the name, unless two entries share one."),
        Column("name", TEXT, "Name in the config."),
        Column("purpose", TEXT, "`training` or `eval`; of one that serves both, `training`."),
        Column("weight", NUMBER, "Sampling weight; null for an eval."),
        Column("num_samples", INTEGER, "Items of its dataset."),
        Column("is_multi_turn", BOOLEAN, "Whether the model and it take turns."),
        Column("reward_min", NUMBER, "Smallest reward to expect; null where not known."),
        Column("reward_max", NUMBER, "Largest reward to expect; null where not known."),
        Column("metrics_ranges", TEXT, 'Ranges of its metrics, as JSON: `{"correct": {"min": 0.0, "max": 1.0}}`.'),
        Column("tags_options", TEXT, "Values that its tags take, as JSON."),
        Column("not_extendable", TEXT, "Why the chat template cannot be extended turn by turn; null when it can."),
    ),
    key=("attempt", "key"),
    keep=Keep.ALWAYS,
)

STEPS = Table(
    "steps",
    "One row per training step.",
    (
        ATTEMPT,
        Column("step", INTEGER, "The training step."),
        Column("version", INTEGER, "Policy version that the step made and the engines then received."),
        Column("started_at", TIME, "When the trainer started on the batch."),
        Column("ended_at", TIME, "When the step was over."),
        Column("reward_mean", NUMBER, "Mean reward of the samples trained on."),
        Column("learning_rate", NUMBER, "Rate that this step used."),
        Column("num_samples", INTEGER, "Samples trained on."),
        Column("num_groups", INTEGER, "Groups trained on."),
        Column("num_tokens_trained", INTEGER, "Tokens with a loss."),
        Column(
            "num_tokens_generated",
            INTEGER,
            "Tokens that the engines sampled since the step before, thrown away ones included.",
        ),
        Column("next_draw", INTEGER, "Prompts drawn so far: all draws below this are settled, but for the unfinished."),
        Column("unfinished_draws", INT32_LIST, "Draws that are neither trained nor given up, in any queue or lane."),
        Column(
            "metrics",
            NUMBERS,
            "Every step metric by name: `entropy`, `grad_norm`, `timing_step_total`, `section/group/metric`, ...",
        ),
    ),
    key=("attempt", "step"),
    keep=Keep.ALWAYS,
    by_step=True,
)

GROUPS = Table(
    "groups",
    "One row per prompt that was opened for training, written when its fate is final. The items of evals are not "
    "drawn and have no baseline among them: their samples, of status `eval`, are found by `eval_name` and `step`.",
    (
        ATTEMPT,
        Column("group_id", INTEGER, "Number n of the draw: the identity of the prompt in the ledger."),
        Column("environment", TEXT, "Name of the environment."),
        Column("index", INTEGER, "Which item of the environment's dataset."),
        Column("status", TEXT, "`kept`, `discarded`, or `cancelled`: the run ended first."),
        Column("reason", TEXT, "Why it was not kept: `zero_advantage`, `max_async`, `run_ended`, ...; null for kept."),
        Column("step", INTEGER, "Step that trained it; for the others, the step the run was at."),
        Column("start_version", INTEGER, "Policy version when it was opened."),
        Column("num_samples", INTEGER, "Samples in it, masked ones not counted."),
        Column("reward_mean", NUMBER, "Mean reward, masked samples left out."),
        Column("reward_std", NUMBER, "Standard deviation of the rewards (ddof 1), masked samples left out."),
        Column("opened_at", TIME, "When its first request was sent."),
        Column("finished_at", TIME, "When its last sample was scored or given up."),
        Column("num_returns", INTEGER, "Times that its prompt was asked before and given back, having become too old."),
    ),
    key=("attempt", "group_id"),
    keep=Keep.RESULT,
    by_step=True,
)

SAMPLES = Table(
    "samples",
    "One row per sample, written once, when its fate is final. What is still in flight is the view `in_flight`.",
    (
        ATTEMPT,
        Column("sample_id", TEXT, "Identity of the sample, unique within the attempt."),
        Column("group_id", INTEGER, "Group that it belongs to; negative in evals, which have no `groups` rows."),
        Column("sample_index", INTEGER, "Place in the group, from 0."),
        Column("environment", TEXT, "Name of the environment."),
        Column("status", TEXT, "`kept`, `discarded`, `cancelled`, `masked`, `eval`; in `in_flight` also `in_flight`."),
        Column(
            "reason",
            TEXT,
            "Why it was not kept; null for kept. For `masked` the kind of its failure, or the filter that left it out.",
        ),
        Column("step", INTEGER, "Step that trained it; for the others, the step the run was at."),
        Column("reward", NUMBER, "Total reward; null if it was never scored."),
        Column("advantage", NUMBER, "Advantage that it was trained with; null if it was not."),
        Column("prompt_text", TEXT, "The prompt as the model read it: decoded, with the markers of its chat template."),
        Column("completion_text", TEXT, "What the model wrote, all turns, decoded."),
        Column("golden", TEXTS, "Gold answers that the environment named."),
        Column("metrics", NUMBERS, "The environment's metrics of this sample."),
        Column("tags", TEXTS, "The environment's tags of this sample."),
        Column("stop_reason", TEXT, "Why the last turn ended: `stop`, `length`, or the environment's reason."),
        Column("num_turns", INTEGER, "Turns of the model."),
        Column("prompt_tokens", INTEGER, "Tokens of the first prompt."),
        Column("completion_tokens", INTEGER, "Tokens that the model sampled, all turns."),
        Column("start_version", INTEGER, "Policy version of its oldest trained token."),
        Column("end_version", INTEGER, "Policy version of its newest trained token."),
        Column("age", INTEGER, "Versions between its oldest trained token and the batch that took it."),
        Column("server", INTEGER, "Inference server that generated it."),
        Column("lane", INTEGER, "Lane of that server."),
        Column("started_at", TIME, "When its first request was sent."),
        Column("generated_at", TIME, "When its last token arrived."),
        Column("finished_at", TIME, "When it was scored or given up."),
        Column("failure_kind", TEXT, "`model`, `environment` or `infrastructure`; null if nothing failed."),
        Column("failure_message", TEXT, "What failed."),
        Column("eval_name", TEXT, "The eval that it belongs to; null in training."),
        Column("penalty", NUMBER, "What was taken off its reward before advantages because the answer is overlong."),
        Column("environment_tokens", INTEGER, "Tokens that the environment added between turns."),
        Column("info_turns", TEXT, "What the environment noted of each turn, as a JSON list; null if nothing."),
        Column(
            "divergences",
            NUMBERS,
            "Joins between turns that differ from what the chat template writes, counted by name.",
        ),
        Column("num_retries", INTEGER, "Times that an engine, a worker or a sandbox failed under it."),
        Column(
            "wasted_tokens",
            INTEGER,
            "Tokens sampled for it in failed requests and lost conversations; not in `completion_tokens`.",
        ),
    ),
    key=("attempt", "sample_id"),
    keep=Keep.RESULT,
    by_step=True,
)

TURNS = Table(
    "turns",
    "One row per turn of a sample. Hidden together with its sample.",
    (
        ATTEMPT,
        Column("sample_id", TEXT, "Sample that it belongs to."),
        Column("turn", INTEGER, "Place in the conversation, from 0."),
        Column("role", TEXT, "`system`, `user`, `assistant`, `tool` or `environment`."),
        Column("text", TEXT, "The text, decoded."),
        Column("num_tokens", INTEGER, "Its length in tokens."),
        Column(
            "token_ids",
            INT32_LIST,
            "Token ids; null unless kept for this sample. Those of a reply of several messages are in its first row.",
        ),
        Column("logprobs", FLOAT32_LIST, "The engine's logprob of each sampled token; null unless kept."),
        Column("versions", INT32_LIST, "Policy version of each sampled token; null unless kept."),
        Column("started_at", TIME, "When its request was sent, or the environment was asked."),
        Column("ended_at", TIME, "When the answer was there."),
        Column("restarts", BOOLEAN, "Of a reply: the next prompt was rendered anew, and the ids are all of it."),
        Column("divergence", TEXT, "Of a reply: how its join differs from the chat template; null if it does not."),
    ),
    key=("attempt", "sample_id", "turn"),
    keep=Keep.DETAIL,
)

SPANS = Table(
    "spans",
    "One row per named interval. They describe wall time, so those of superseded steps stay visible.",
    (
        ATTEMPT,
        Column("name", TEXT, "What happened: `generate`, `reward`, `forward`, `weight_sync`, ..."),
        Column("component", TEXT, "Which part: `orchestrator`, `trainer`, `inference`, `environment`, ..."),
        Column("rank", INTEGER, "Trainer rank; null elsewhere."),
        Column("server", INTEGER, "Inference server; null elsewhere."),
        Column("step", INTEGER, "Training step that it served, if any."),
        Column("micro_batch", INTEGER, "Micro-batch of the step, if any."),
        Column("sample_id", TEXT, "Sample that it served, if any."),
        Column("start", TIME, "Start."),
        Column("end", TIME, "End."),
        Column("attributes", TEXTS, "Anything else."),
    ),
    key=("attempt", "component", "name", "start"),
    keep=Keep.TELEMETRY,
)

GAUGES = Table(
    "gauges",
    "One row per sampled number.",
    (
        ATTEMPT,
        Column("time", TIME, "When it was read."),
        Column("name", TEXT, "What was read, with its unit where that is not plain: `queue_depth`, `memory_bytes`."),
        Column("component", TEXT, "Where it was read: `orchestrator`, `trainer`, `inference`, `gpu`, `host`."),
        Column("value", NUMBER, "The number."),
        Column("node", TEXT, "Machine that it is of; null where that says nothing."),
        Column("gpu", INTEGER, "GPU that it is of, as `nvidia-smi` counts on that machine; null elsewhere."),
        Column("rank", INTEGER, "Trainer rank that it is of; null elsewhere."),
        Column("server", INTEGER, "Inference server that it is of; null elsewhere."),
        Column("labels", TEXTS, "What tells apart numbers of one name: `le`, `finished_reason`, ..."),
    ),
    key=("attempt", "time", "component", "name", "node", "gpu", "rank", "server", "labels"),
    keep=Keep.TELEMETRY,
)

LOGS = Table(
    "logs",
    "One row per log line of the processes that log through the driver.",
    (
        ATTEMPT,
        Column("time", TIME, "When it was said."),
        Column("level", TEXT, "`DEBUG`, `INFO`, `WARNING`, `ERROR` or `CRITICAL`."),
        Column("component", TEXT, "Which part said it."),
        Column("message", TEXT, "The line, with its traceback if it has one."),
        Column("process", INTEGER, "Process id."),
        Column("place", TEXT, "Logger and source line: `telescope.orchestrator.run:120`."),
    ),
    key=("attempt", "time", "component"),
    keep=Keep.TELEMETRY,
)

TABLES: dict[str, Table] = {
    table.name: table for table in (RUNS, ATTEMPTS, ENVIRONMENTS, LOGS, GAUGES, SPANS, TURNS, SAMPLES, GROUPS, STEPS)
}
"""All tables. The order is the order of writing: a step's row follows the samples that it was trained on, so that a
reader who lists the tables in the opposite order never sees a step without them."""

COLUMN_NAMES: dict[str, frozenset[str]] = {name: frozenset(table.column_names) for name, table in TABLES.items()}
"""The columns of each table, for quick checks."""

IN_FLIGHT = "in_flight"
"""Name of the view over the samples that are being generated now. It has the columns of `samples`."""
