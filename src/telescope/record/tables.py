"""The definition of every table and column of a run's record.

Owns the schemas, the descriptions that `telescope query --tables` and `docs/record.md` print, and which tables drop
rows first when memory runs out. Does not own how rows are written (`recorder`, `table_writer`) or read (`reader`).

Invariants: a column never changes its type or meaning. A new column is added at the end of its table, and earlier rows
read as null. SQL also reads columns that only earlier versions wrote. All times are Unix seconds (UTC, float64), so
that a difference is a duration.
"""

from __future__ import annotations

from telescope.record.schema import (
    BOOLEAN,
    BOOLEAN_LIST,
    FLOAT32_LIST,
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

GROUPS = attempt_table(
    "groups",
    "One row per prompt that was opened for training, written when its outcome is final. Evals have no groups.",
    Column("group_id", INTEGER, "Number of the sampled prompt, its id in the ledger."),
    Column("environment", TEXT, "Name of the environment."),
    Column("index", INTEGER, "Index in the environment's dataset."),
    Column("status", TEXT, "`kept`, `discarded`, or `cancelled` (the run ended first)."),
    Column("reason", TEXT, "Why it was not kept: `zero_advantage`, `max_async`, `run_ended`, ...; null if kept."),
    Column("step", INTEGER, "Step that trained it; for the others, the step the run was at."),
    Column("start_version", INTEGER, "Policy version when it was opened."),
    Column("num_samples", INTEGER, "Samples in it, without masked ones."),
    Column("reward_mean", NUMBER, "Mean reward, without masked samples."),
    Column("reward_std", NUMBER, "Standard deviation of the rewards (ddof 1), without masked samples."),
    Column("opened_at", TIME, "When its first request was sent."),
    Column("finished_at", TIME, "When its last sample was scored or dropped."),
    Column("num_returns", INTEGER, "Number of times its prompt was requeued because the group became too old."),
    key=("group_id",),
    keep=Keep.RESULT,
    by_step=True,
)

SAMPLES = attempt_table(
    "samples",
    "One row per sample, written once, when its outcome is final. The view `in_flight` has the unfinished ones.",
    Column("sample_id", TEXT, "Id of the sample, unique within the attempt."),
    Column("group_id", INTEGER, "Its group; negative in evals, which have no rows in `groups`."),
    Column("sample_index", INTEGER, "Place in the group, from 0."),
    Column("environment", TEXT, "Name of the environment."),
    Column("status", TEXT, "`kept`, `discarded`, `cancelled`, `masked`, `eval`; in `in_flight` also `in_flight`."),
    Column("reason", TEXT, "Why it was not kept; null if kept. For `masked`, the kind of failure or the filter."),
    Column("step", INTEGER, "Step that trained it; for an eval, the last finished one; else the current one."),
    Column("reward", NUMBER, "Total reward; null if it was never scored."),
    Column("advantage", NUMBER, "Advantage that it was trained with; null if it was not trained."),
    Column("prompt_text", TEXT, "The prompt as the model received it, decoded, with the chat template."),
    Column("completion_text", TEXT, "Output of the model in all turns, decoded."),
    Column("golden", TEXTS, "Gold answers from the environment."),
    Column("metrics", NUMBERS, "The environment's metrics of this sample."),
    Column("tags", TEXTS, "The environment's tags of this sample."),
    Column("stop_reason", TEXT, "Why the last turn ended: `stop`, `length`, or the environment's reason."),
    Column("num_turns", INTEGER, "Turns of the model."),
    Column("prompt_tokens", INTEGER, "Tokens of the first prompt."),
    Column("completion_tokens", INTEGER, "Tokens that the model sampled in all turns."),
    Column("start_version", INTEGER, "Policy version of its oldest trained token."),
    Column("end_version", INTEGER, "Policy version of its newest trained token."),
    Column("age", INTEGER, "Policy version of its batch minus that of its oldest trained token."),
    Column("server", INTEGER, "Inference server that generated it."),
    Column("lane", INTEGER, "Request slot of that server."),
    Column("started_at", TIME, "When its first request was sent."),
    Column("generated_at", TIME, "When its last token arrived."),
    Column("finished_at", TIME, "When it was scored or dropped."),
    Column("failure_kind", TEXT, "`model`, `environment` or `infrastructure`; null if nothing failed."),
    Column("failure_message", TEXT, "Error message."),
    Column("eval_name", TEXT, "Its eval; null in training."),
    Column("penalty", NUMBER, "Subtracted from its reward before advantages because the answer is overlong."),
    Column("environment_tokens", INTEGER, "Tokens that the environment added between turns."),
    Column("info_turns", TEXT, "Notes of the environment as a JSON list, in runs of earlier versions; now in `info`."),
    Column("divergences", NUMBERS, "Joins between turns that differ from the chat template, counted by kind."),
    Column("num_retries", INTEGER, "Number of failures of an engine, a worker or a sandbox during it."),
    Column("wasted_tokens", INTEGER, "Tokens of failed requests and lost conversations, not in the others."),
    Column("total_tokens", INTEGER, "Tokens of prompt, answers and what the environment added."),
    key=("sample_id",),
    keep=Keep.RESULT,
    by_step=True,
)

EVAL_SAMPLES = attempt_table(
    "eval_samples",
    "One row per completion of an eval. Its text, reward, metrics and lengths are in `samples`, by `sample_id`.",
    Column("eval_id", TEXT, "Its row in `evals`."),
    Column("sample_id", TEXT, "Its row in `samples`, with the status `eval`, or `masked` if it has no score."),
    Column("step", INTEGER, "As in `evals`."),
    Column("item", INTEGER, "Index of its item in the dataset."),
    Column("completion", INTEGER, "Place among the completions of the item, from 0."),
    Column("sample_uid", TEXT, "Identity of the item: equal items of any dataset have equal ones."),
    key=("sample_id",),
    keep=Keep.RESULT,
    by_step=True,
)

TURNS = attempt_table(
    "turns",
    "One row per turn of a sample, hidden together with the sample.",
    Column("sample_id", TEXT, "Its sample."),
    Column("turn", INTEGER, "Place in the conversation, from 0."),
    Column("role", TEXT, "`system`, `user`, `assistant`, `tool` or `environment`."),
    Column("turn_type", TEXT, "For a reply: what the environment calls the message (`tool_result`, ...); may be null."),
    Column("text", TEXT, "The text, decoded."),
    Column("num_tokens", INTEGER, "Its length in tokens. Of a reply with several messages, the first has all."),
    Column("started_at", TIME, "When its request was sent, or the environment was called."),
    Column("ended_at", TIME, "When the answer arrived."),
    Column("restarts", BOOLEAN, "For a reply: the next prompt was rendered again, and `num_tokens` is its length."),
    Column("divergence", TEXT, "For a reply: how its join differs from the chat template; null if it does not."),
    key=("sample_id", "turn"),
    keep=Keep.DETAIL,
    of_sample=True,
)

TOOL_CALLS = attempt_table(
    "tool_calls",
    "One row per tool call of a sample, hidden together with the sample.",
    Column("sample_id", TEXT, "Its sample."),
    Column("turn", INTEGER, "Answer of the model that made it, from 0."),
    Column("call", INTEGER, "Place among the calls of the sample, from 0."),
    Column("name", TEXT, "Name of the tool."),
    Column("arguments", TEXT, "Its arguments, as JSON, or as the model wrote them if they are not valid."),
    Column("result", TEXT, "The result as the model received it."),
    Column("error", TEXT, "Why it failed; null if it succeeded."),
    Column("seconds", NUMBER, "How long the tool ran."),
    key=("sample_id", "call"),
    keep=Keep.DETAIL,
    of_sample=True,
)

INFO = attempt_table(
    "info",
    "One row per note or output that an environment attached to a sample, hidden together with the sample.",
    Column("sample_id", TEXT, "Its sample."),
    Column("number", INTEGER, "Place in the environment's list `info_turns`, from 0."),
    Column("turn", INTEGER, "Answer of the model that it belongs to: its `turn`, or else its place in the list."),
    Column("key", TEXT, "Key of the note: `guess`, `feedback`, ..."),
    Column("value", TEXT, "Its text; JSON if the value is no text."),
    Column("type", TEXT, "The note's `info_type`; null without one."),
    key=("sample_id", "number", "key"),
    keep=Keep.DETAIL,
    of_sample=True,
)

TOKENS = attempt_table(
    "tokens",
    "One row per sequence of a sample that `record_tokens` chooses: one number per token in each list.",
    Column("sample_id", TEXT, "Its sample."),
    Column("part", INTEGER, "Place among the sequences of the sample, from 0. Turns that restart begin one."),
    Column("step", INTEGER, "Step of the sample."),
    Column("token_ids", INT32_LIST, "Token ids of prompt, answers and what the environment added."),
    Column("trained", BOOLEAN_LIST, "Whether the token has a loss: the mask."),
    Column("engine_logprobs", FLOAT32_LIST, "The engine's logprob; 0 where the model did not sample the token."),
    Column("trainer_logprobs", FLOAT32_LIST, "The trainer's logprob when it was trained; NaN where it was not."),
    Column("entropies", FLOAT32_LIST, "Entropy of the trainer's distribution, in nats; NaN where not trained."),
    Column("versions", INT32_LIST, "Policy version that sampled the token; -1 where the model did not."),
    key=("sample_id", "part"),
    keep=Keep.DETAIL,
    by_step=True,
)

ROLLOUT_TABLES = (GROUPS, SAMPLES, EVAL_SAMPLES, TURNS, TOOL_CALLS, INFO, TOKENS)
"""Tables that grow with the samples."""

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
