"""The definition of every table and column of a run's record.

Owns the schemas, the descriptions that `telescope query --tables` and `docs/record.md` print, and which tables drop
rows first when memory runs out. Does not own how rows are written (`recorder`, `table_writer`) or read (`reader`).

Invariants: a column never changes its type or meaning. A new column is added at the end of its table, and earlier rows
read as null. SQL also reads columns that only earlier versions wrote. All times are Unix seconds (UTC, float64), so
that a difference is a duration.
"""

from __future__ import annotations

from telescope.record.rollout_tables import EVAL_SAMPLES, GROUPS, INFO, SAMPLES, TOKENS, TOOL_CALLS, TURNS
from telescope.record.schema import (
    BOOLEAN,
    INT32_LIST,
    INTEGER,
    NUMBER,
    NUMBER_LIST,
    NUMBERS,
    TEXT,
    TEXT_LIST,
    TEXTS,
    TIME,
    Column,
    Keep,
    Table,
    attempt_table,
)

RUNS = Table(
    "runs",
    "One row per run. `telescope query` shows the current status, not the one last written.",
    (
        Column("run_id", TEXT, "Id of the run, the same in all attempts."),
        Column("name", TEXT, "`wandb_run_name` of the config."),
        Column("started_at", TIME, "Start of the first attempt."),
        Column("config_hash", TEXT, "First 12 hex digits of the hash of the resolved config."),
        Column("config_json", TEXT, "The resolved config, as JSON."),
        Column("project", TEXT, "`wandb_project` of the config."),
        Column("tags", TEXT_LIST, "`wandb_tags` of the config."),
        Column(
            "status", TEXT, "`live`, `finished`, `stopped`, `failed`, or `dead` (its process exited without an end)."
        ),
        Column("ended_at", TIME, "End of the last attempt; null while live or after a kill."),
        Column("error", TEXT, "First line of the error of a failed run; null otherwise."),
    ),
    key=("run_id",),
    keep=Keep.ALWAYS,
    latest_wins=True,
)

ATTEMPTS = attempt_table(
    "attempts",
    "One row per start of a run: the first start and each resume.",
    Column("started_at", TIME, "When this attempt started."),
    Column("config_hash", TEXT, "Hash of the config of this attempt."),
    Column("git_commit", TEXT, "Commit of the code; null outside a checkout."),
    Column("git_dirty", BOOLEAN, "Whether the checkout had uncommitted changes."),
    Column("versions", TEXTS, "Versions of Python and of the main packages."),
    Column("topology", TEXTS, "Nodes, devices and the place of each process."),
    Column("notes", TEXT_LIST, "Notes at the start: adjusted defaults, settings without effect, notices."),
    Column("first_step", INTEGER, "First step that this attempt trains. Earlier rows from it on are hidden."),
    Column("model_config", TEXT, "`config.json` of the model, as JSON; null if it is not on the driver's machine."),
    Column("host", TEXT, "Machine of the driver."),
    Column("pid", INTEGER, "Process of the driver."),
    key=(),
    keep=Keep.ALWAYS,
    latest_wins=True,
)

NODES = attempt_table(
    "nodes",
    "One row per machine of an attempt, written with its first gauges.",
    Column("time", TIME, "When it was read."),
    Column("node", TEXT, "Its name."),
    Column("cpu", TEXT, "Model of its processor."),
    Column("num_cores", INTEGER, "Logical cores."),
    Column("memory_bytes", INTEGER, "Main memory."),
    Column("os", TEXT, "Operating system and kernel."),
    Column("gpus", TEXT_LIST, "Models of its GPUs, in the order of `nvidia-smi`."),
    Column("gpu_driver", TEXT, "Versions of the driver and of the newest CUDA that it supports; null without GPUs."),
    Column("links", TEXT_LIST, "NVLink, InfiniBand and network interfaces that are up, with their speed."),
    key=("node",),
    keep=Keep.ALWAYS,
)

ENVIRONMENTS = attempt_table(
    "environments",
    "One row per environment and eval of an attempt: its description, for the scales of charts.",
    Column("key", TEXT, "Key in this run: the name, unless two entries share a name."),
    Column("name", TEXT, "Name in the config."),
    Column("purpose", TEXT, "`training` or `eval`; `training` for both."),
    Column("weight", NUMBER, "Sampling weight; null for an eval."),
    Column("num_samples", INTEGER, "Items of its dataset."),
    Column("is_multi_turn", BOOLEAN, "Whether a rollout can have several turns."),
    Column("reward_min", NUMBER, "Smallest expected reward; null if unknown."),
    Column("reward_max", NUMBER, "Largest expected reward; null if unknown."),
    Column("metrics_ranges", TEXT, 'Ranges of its metrics, as JSON: `{"correct": {"min": 0.0, "max": 1.0}}`.'),
    Column("tags_options", TEXT, "Possible values of its tags, as JSON."),
    Column("not_extendable", TEXT, "Why the chat template cannot be extended turn by turn; null if it can."),
    key=("key",),
    keep=Keep.ALWAYS,
)

STEPS = attempt_table(
    "steps",
    "One row per training step.",
    Column("step", INTEGER, "The training step."),
    Column("version", INTEGER, "Policy version that the step produced and the engines received."),
    Column("started_at", TIME, "When the step began, including the wait for its batch."),
    Column("ended_at", TIME, "When the step and its weight sync had finished."),
    Column("reward_mean", NUMBER, "Mean reward of all samples scored since the last step, discarded groups too."),
    Column("reward_trained", NUMBER, "Mean reward of the samples trained on."),
    Column("learning_rate", NUMBER, "Learning rate of this step."),
    Column("num_samples", INTEGER, "Samples trained on."),
    Column("num_groups", INTEGER, "Groups trained on."),
    Column("num_tokens_trained", INTEGER, "Tokens with a loss."),
    Column("num_tokens_generated", INTEGER, "Tokens sampled since the previous step, including discarded ones."),
    Column("next_draw", INTEGER, "Prompts sampled so far. Those below it are final, except the unfinished ones."),
    Column("unfinished_draws", INT32_LIST, "Numbers of sampled prompts that are neither trained nor dropped."),
    Column("metrics", NUMBERS, "Every step metric by name: `entropy`, `grad_norm`, `timing_step_total`, ..."),
    key=("step",),
    keep=Keep.ALWAYS,
    by_step=True,
)

STEP_STATS = attempt_table(
    "step_stats",
    "One row per step, environment and number of a sample: its distribution over the samples trained on.",
    Column("step", INTEGER, "The training step."),
    Column("environment", TEXT, "Name of the environment; empty for all samples of the step."),
    Column(
        "metric",
        TEXT,
        "`reward`, `advantage`, `prompt_tokens`, `completion_tokens`, `environment_tokens`, `total_tokens`, "
        "`num_turns`, `age`, `sample_metrics/<name>`, or `discarded/<name>` of the samples discarded since then.",
    ),
    Column("n", INTEGER, "Samples that have it, without values that are not finite."),
    Column("mean", NUMBER, "Mean."),
    Column("std", NUMBER, "Standard deviation (ddof 1); 0 for one sample."),
    Column("min", NUMBER, "Smallest value."),
    Column("max", NUMBER, "Largest value."),
    Column("p5", NUMBER, "5th percentile, interpolated linearly."),
    Column("p25", NUMBER, "25th percentile."),
    Column("p50", NUMBER, "Median."),
    Column("p75", NUMBER, "75th percentile."),
    Column("p95", NUMBER, "95th percentile."),
    Column("histogram", INT32_LIST, "Samples in each of 20 bins of equal width."),
    Column("bin_edges", NUMBER_LIST, "The 21 edges of the bins. Only the last bin includes its upper edge."),
    Column("gini", NUMBER, "Mean Gini coefficient of the groups; null for `advantage`, `age`, prompts, discards."),
    key=("step", "environment", "metric"),
    keep=Keep.RESULT,
    by_step=True,
)

EVALS = attempt_table(
    "evals",
    "One row per eval of one policy version, written when it has ended. Its samples are in `eval_samples`.",
    Column("eval_id", TEXT, "Id of this evaluation, unique within the attempt: `eval0-math500-v10`."),
    Column("name", TEXT, "Name in the config."),
    Column("number", INTEGER, "Place among the evals of the config, from 0. Evals of one name differ in it."),
    Column("source", TEXT, "`live` (by the run itself) or `standalone` (`telescope eval`)."),
    Column("status", TEXT, "`finished`, `failed`, `skipped` (its servers were busy) or `cancelled`."),
    Column("error", TEXT, "Why it did not finish; null if it did."),
    Column("step", INTEGER, "Last finished training step, whose weights it measures; -1 before training."),
    Column("version", INTEGER, "Policy version of all its tokens: the number N of `checkpoints/step_N`."),
    Column("started_at", TIME, "When its first request was sent."),
    Column("ended_at", TIME, "When its last sample was scored."),
    Column("num_items", INTEGER, "Items of it."),
    Column("num_completions", INTEGER, "Completions of each item."),
    Column("num_scored", INTEGER, "Completions that were scored. The others count as wrong."),
    Column("temperature", NUMBER, "Sampling temperature."),
    Column("top_p", NUMBER, "Nucleus sampling; null if off."),
    Column("max_tokens", INTEGER, "Longest answer of a turn, in tokens."),
    Column("held_out", BOOLEAN, "Whether training never uses its items (`separate_eval_samples`)."),
    Column("metric", TEXT, "Metric that is the accuracy: `correct`, or `reward` where there is none."),
    Column("accuracy", NUMBER, "Mean of `metric` over the items."),
    Column("accuracy_low", NUMBER, "Lower end of its 95 % interval, a bootstrap over items."),
    Column("accuracy_high", NUMBER, "Upper end of its interval."),
    Column("gain", NUMBER, "Paired difference to the run's first result of this eval; null for that one."),
    Column("gain_low", NUMBER, "Lower end of the 95 % interval of the gain."),
    Column("gain_high", NUMBER, "Upper end of the interval of the gain."),
    Column("metrics", NUMBERS, "Mean of each metric over the items, with `pass@8/correct` and `pass^8/correct`."),
    Column("servers", INT32_LIST, "Inference servers that it used."),
    key=("eval_id",),
    keep=Keep.ALWAYS,
    by_step=True,
)

ALERTS = attempt_table(
    "alerts",
    "One row per thing that a person should know about the run.",
    Column("time", TIME, "When it was noticed."),
    Column("level", TEXT, "`info`, `warning` or `error`."),
    Column("kind", TEXT, "What it is about: `server`, `trainer`, `eval`, `entropy`, `log`, ... See above."),
    Column("message", TEXT, "What happened: one or two sentences, with numbers."),
    Column("step", INTEGER, "The step that it is about, or that the run was at."),
    Column("advice", TEXT, "What to try; null if the message says it, or nothing is to be done."),
    Column("metrics", TEXT_LIST, "Metrics that it is about, the one to look at first; null if none."),
    key=("time", "kind"),
    keep=Keep.ALWAYS,
)

SPANS = attempt_table(
    "spans",
    "One row per named interval of wall time. Those of superseded steps stay visible.",
    Column("name", TEXT, "Operation: `generate`, `reward`, `forward`, `weight_sync`, ..."),
    Column("component", TEXT, "Component: `orchestrator`, `trainer`, `inference`, `environment`, ..."),
    Column("rank", INTEGER, "Trainer rank; null elsewhere."),
    Column("server", INTEGER, "Inference server; null elsewhere."),
    Column("step", INTEGER, "Its training step, if any."),
    Column("micro_batch", INTEGER, "Its micro-batch, if any."),
    Column("sample_id", TEXT, "Its sample, if any."),
    Column("start", TIME, "Start."),
    Column("end", TIME, "End."),
    Column("attributes", TEXTS, "Other properties."),
    key=("component", "name", "start"),
    keep=Keep.TELEMETRY,
)

GAUGES = attempt_table(
    "gauges",
    "One row per sampled number.",
    Column("time", TIME, "When it was read."),
    Column("name", TEXT, "Name, with its unit: `queue_depth`, `memory_bytes`. See `docs/metrics.md`."),
    Column("component", TEXT, "Component: `orchestrator`, `trainer`, `inference`, `gpu`, `host`."),
    Column("value", NUMBER, "The number."),
    Column("node", TEXT, "Its machine; null if it has none."),
    Column("gpu", INTEGER, "Its GPU, as `nvidia-smi` counts on that machine; null elsewhere."),
    Column("rank", INTEGER, "Its trainer rank; null elsewhere."),
    Column("server", INTEGER, "Its inference server; null elsewhere."),
    Column("labels", TEXTS, "Labels that distinguish numbers of one name: `le`, `finished_reason`, ..."),
    key=("time", "component", "name", "node", "gpu", "rank", "server", "labels"),
    keep=Keep.TELEMETRY,
)

LOGS = attempt_table(
    "logs",
    "One row per log line of the processes of a run: driver, trainer ranks, servers and environments.",
    Column("time", TIME, "When it was logged."),
    Column("level", TEXT, "`DEBUG`, `INFO`, `WARNING`, `ERROR` or `CRITICAL`."),
    Column("component", TEXT, "Process that logged it: `driver`, `trainer-0`, `inference-1`, `environment-2`."),
    Column("message", TEXT, "The line, with its traceback if any."),
    Column("process", INTEGER, "Process id."),
    Column("place", TEXT, "Logger and source line: `telescope.orchestrator.run:120`."),
    Column("source", TEXT, "File below `logs/` that has the line: `trainer-0.log`."),
    key=("time", "component"),
    keep=Keep.TELEMETRY,
)

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        *(RUNS, ATTEMPTS, NODES, ENVIRONMENTS, LOGS, ALERTS, GAUGES, SPANS, TURNS, TOOL_CALLS, INFO, TOKENS),
        *(SAMPLES, EVAL_SAMPLES, EVALS, GROUPS, STEP_STATS, STEPS),
    )
}
"""All tables, in the order of writing: the row of a step or an eval follows its samples, so that a reader that lists
the tables in the opposite order never sees one without its samples."""

COLUMN_NAMES: dict[str, frozenset[str]] = {name: frozenset(table.column_names) for name, table in TABLES.items()}
"""Column names of each table."""

IN_FLIGHT = "in_flight"
"""Name of the view over the samples that are being generated, with the columns of `samples`."""
