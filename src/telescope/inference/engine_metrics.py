"""Reads an engine's Prometheus metrics as gauges, under vLLM's names.

Gauges and counters are one reading each (`vllm:num_requests_running`, `vllm:generation_tokens_total`; a counter's name
always ends in `_total`). A histogram is its `_sum` and `_count`, whose differences give a mean over any interval, and
every `BUCKET_SECONDS` its cumulative buckets (`_bucket` with the label `le`) for quantiles. Labels that are the same
for all metrics of a server are left out. Needs prometheus_client, as vLLM does.
"""

import time
from collections.abc import Callable

from telescope.record.gauges import Reading

PREFIXES = ("vllm:", "telescope:")
"""Prefixes of vLLM's metrics and of the step meter's. Metrics of the server's Python process are left out."""

WANTED = (*PREFIXES, *(f"# TYPE {prefix}" for prefix in PREFIXES))
"""Prefixes of the lines that are read."""

BUCKET_SECONDS = 10.0
"""Interval between readings of histogram buckets."""


def metrics_reader(fetch: Callable[[], str | None]) -> Callable[[], list[Reading]]:
    """Returns a reader of a server's metrics. `fetch` returns their text, or None while the server is down."""
    buckets_due = 0.0

    def read() -> list[Reading]:
        nonlocal buckets_due
        text = fetch()
        if text is None:
            return []
        with_buckets = time.monotonic() >= buckets_due
        if with_buckets:
            buckets_due = time.monotonic() + BUCKET_SECONDS
        return parse(text, time.time(), with_buckets=with_buckets)

    return read


def parse(text: str, now: float, *, with_buckets: bool = True) -> list[Reading]:
    """Parses one response of the metrics route. Raises `ValueError` for other text."""
    from prometheus_client.parser import text_string_to_metric_families

    # Parsing is the expensive part, so other families and unwanted buckets are removed first.
    lines = [line for line in text.splitlines() if line.startswith(WANTED) and (with_buckets or "_bucket{" not in line)]
    readings = []
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        if family.name.endswith("_info"):  # settings in labels, with the value 1
            continue
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            constant = {"model_name": sample.labels.get("model_name"), "engine": "0"}
            labels = tuple(sorted(sample.labels.items() - constant.items()))
            readings.append(Reading(now, sample.name, float(sample.value), labels))
    return readings
