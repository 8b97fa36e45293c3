"""Tables of what happens all the time: spans, gauges and log lines."""

from __future__ import annotations

from telescope.record.schema import ATTEMPT, INTEGER, NUMBER, TEXT, TEXTS, TIME, Column, Keep, Table

SPANS = Table(
    "spans",
    "One row per named interval of wall time. Those of superseded steps stay visible.",
    (
        ATTEMPT,
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
        Column("name", TEXT, "Name, with its unit: `queue_depth`, `memory_bytes`. See `docs/metrics.md`."),
        Column("component", TEXT, "Component: `orchestrator`, `trainer`, `inference`, `gpu`, `host`."),
        Column("value", NUMBER, "The number."),
        Column("node", TEXT, "Its machine; null if it has none."),
        Column("gpu", INTEGER, "Its GPU, as `nvidia-smi` counts on that machine; null elsewhere."),
        Column("rank", INTEGER, "Its trainer rank; null elsewhere."),
        Column("server", INTEGER, "Its inference server; null elsewhere."),
        Column("labels", TEXTS, "Labels that distinguish numbers of one name: `le`, `finished_reason`, ..."),
    ),
    key=("attempt", "time", "component", "name", "node", "gpu", "rank", "server", "labels"),
    keep=Keep.TELEMETRY,
)

LOGS = Table(
    "logs",
    "One row per log line of the processes of a run: driver, trainer ranks, servers and environments.",
    (
        ATTEMPT,
        Column("time", TIME, "When it was logged."),
        Column("level", TEXT, "`DEBUG`, `INFO`, `WARNING`, `ERROR` or `CRITICAL`."),
        Column("component", TEXT, "Process that logged it: `driver`, `trainer-0`, `inference-1`, `environment-2`."),
        Column("message", TEXT, "The line, with its traceback if any."),
        Column("process", INTEGER, "Process id."),
        Column("place", TEXT, "Logger and source line: `telescope.orchestrator.run:120`."),
        Column("source", TEXT, "File below `logs/` that has the line: `trainer-0.log`."),
    ),
    key=("attempt", "time", "component"),
    keep=Keep.TELEMETRY,
)
