"""Tables of rollouts: groups, samples, and what belongs to a sample."""

from __future__ import annotations

from telescope.record.schema import (
    ATTEMPT,
    BOOLEAN,
    BOOLEAN_LIST,
    FLOAT32_LIST,
    INT32_LIST,
    INTEGER,
    NUMBER,
    NUMBERS,
    TEXT,
    TEXTS,
    TIME,
    Column,
    Keep,
    Table,
)

GROUPS = Table(
    "groups",
    "One row per prompt that was opened for training, written when its outcome is final. Evals have no groups.",
    (
        ATTEMPT,
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
    ),
    key=("attempt", "group_id"),
    keep=Keep.RESULT,
    by_step=True,
)

SAMPLES = Table(
    "samples",
    "One row per sample, written once, when its outcome is final. The view `in_flight` has the unfinished ones.",
    (
        ATTEMPT,
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
        Column(
            "info_turns", TEXT, "Notes of the environment as a JSON list, in runs of earlier versions; now in `info`."
        ),
        Column("divergences", NUMBERS, "Joins between turns that differ from the chat template, counted by kind."),
        Column("num_retries", INTEGER, "Number of failures of an engine, a worker or a sandbox during it."),
        Column("wasted_tokens", INTEGER, "Tokens of failed requests and lost conversations, not in the others."),
        Column("total_tokens", INTEGER, "Tokens of prompt, answers and what the environment added."),
    ),
    key=("attempt", "sample_id"),
    keep=Keep.RESULT,
    by_step=True,
)

EVAL_SAMPLES = Table(
    "eval_samples",
    "One row per completion of an eval. Its text, reward, metrics and lengths are in `samples`, by `sample_id`.",
    (
        ATTEMPT,
        Column("eval_id", TEXT, "Its row in `evals`."),
        Column("sample_id", TEXT, "Its row in `samples`, with the status `eval`, or `masked` if it has no score."),
        Column("step", INTEGER, "As in `evals`."),
        Column("item", INTEGER, "Index of its item in the dataset."),
        Column("completion", INTEGER, "Place among the completions of the item, from 0."),
        Column("sample_uid", TEXT, "Identity of the item: equal items of any dataset have equal ones."),
    ),
    key=("attempt", "sample_id"),
    keep=Keep.RESULT,
    by_step=True,
)

TURNS = Table(
    "turns",
    "One row per turn of a sample, hidden together with the sample.",
    (
        ATTEMPT,
        Column("sample_id", TEXT, "Its sample."),
        Column("turn", INTEGER, "Place in the conversation, from 0."),
        Column("role", TEXT, "`system`, `user`, `assistant`, `tool` or `environment`."),
        Column(
            "turn_type", TEXT, "For a reply: what the environment calls the message (`tool_result`, ...); may be null."
        ),
        Column("text", TEXT, "The text, decoded."),
        Column("num_tokens", INTEGER, "Its length in tokens. Of a reply with several messages, the first has all."),
        Column("started_at", TIME, "When its request was sent, or the environment was called."),
        Column("ended_at", TIME, "When the answer arrived."),
        Column("restarts", BOOLEAN, "For a reply: the next prompt was rendered again, and `num_tokens` is its length."),
        Column("divergence", TEXT, "For a reply: how its join differs from the chat template; null if it does not."),
    ),
    key=("attempt", "sample_id", "turn"),
    keep=Keep.DETAIL,
    of_sample=True,
)

TOOL_CALLS = Table(
    "tool_calls",
    "One row per tool call of a sample, hidden together with the sample.",
    (
        ATTEMPT,
        Column("sample_id", TEXT, "Its sample."),
        Column("turn", INTEGER, "Answer of the model that made it, from 0."),
        Column("call", INTEGER, "Place among the calls of the sample, from 0."),
        Column("name", TEXT, "Name of the tool."),
        Column("arguments", TEXT, "Its arguments, as JSON, or as the model wrote them if they are not valid."),
        Column("result", TEXT, "The result as the model received it."),
        Column("error", TEXT, "Why it failed; null if it succeeded."),
        Column("seconds", NUMBER, "How long the tool ran."),
    ),
    key=("attempt", "sample_id", "call"),
    keep=Keep.DETAIL,
    of_sample=True,
)

INFO = Table(
    "info",
    "One row per note or output that an environment attached to a sample, hidden together with the sample.",
    (
        ATTEMPT,
        Column("sample_id", TEXT, "Its sample."),
        Column("number", INTEGER, "Place in the environment's list `info_turns`, from 0."),
        Column("turn", INTEGER, "Answer of the model that it belongs to: its `turn`, or else its place in the list."),
        Column("key", TEXT, "Key of the note: `guess`, `feedback`, ..."),
        Column("value", TEXT, "Its text; JSON if the value is no text."),
        Column("type", TEXT, "The note's `info_type`; null without one."),
    ),
    key=("attempt", "sample_id", "number", "key"),
    keep=Keep.DETAIL,
    of_sample=True,
)

TOKENS = Table(
    "tokens",
    "One row per sequence of a sample that `record_tokens` chooses: one number per token in each list.",
    (
        ATTEMPT,
        Column("sample_id", TEXT, "Its sample."),
        Column("part", INTEGER, "Place among the sequences of the sample, from 0. Turns that restart begin one."),
        Column("step", INTEGER, "Step of the sample."),
        Column("token_ids", INT32_LIST, "Token ids of prompt, answers and what the environment added."),
        Column("trained", BOOLEAN_LIST, "Whether the token has a loss: the mask."),
        Column("engine_logprobs", FLOAT32_LIST, "The engine's logprob; 0 where the model did not sample the token."),
        Column("trainer_logprobs", FLOAT32_LIST, "The trainer's logprob when it was trained; NaN where it was not."),
        Column("entropies", FLOAT32_LIST, "Entropy of the trainer's distribution, in nats; NaN where not trained."),
        Column("versions", INT32_LIST, "Policy version that sampled the token; -1 where the model did not."),
    ),
    key=("attempt", "sample_id", "part"),
    keep=Keep.DETAIL,
    by_step=True,
)

ROLLOUT_TABLES = (GROUPS, SAMPLES, EVAL_SAMPLES, TURNS, TOOL_CALLS, INFO, TOKENS)
"""Tables that grow with the samples."""
