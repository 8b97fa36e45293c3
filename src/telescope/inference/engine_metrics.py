"""An engine's metrics as gauges: Prometheus text in, readings out, under the names that vLLM gives.

Owns which of them are kept. Gauges and counters are one reading each (`vllm:num_requests_running`,
`vllm:generation_tokens_total`; a counter's name always ends so). A histogram is its `_sum` and `_count`, whose ratio of
differences is a mean over any time, and now and then its cumulative buckets (`_bucket` with the label `le`), which are
many and serve for quantiles. Labels that are the same for all metrics of a server are left out. Needs
prometheus_client, which vLLM needs too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from telescope.record.gauges import Reading

PREFIXES = ("vllm:", "telescope:")
"""Of vLLM's own metrics, and of the meter's (`step_meter`). The server also reports on its Python process."""

WANTED = (*PREFIXES, *(f"# TYPE {prefix}" for prefix in PREFIXES))
"""How lines begin that are read."""

BUCKET_SECONDS = 10.0
"""How often the buckets of histograms are read."""


def metrics_reader(fetch: Callable[[], str | None]) -> Callable[[], list[Reading]]:
    """A function that reads a server's metrics. `fetch` returns their text, None while there is no server to ask."""
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
    """The readings of one answer of the metrics route. Raises `ValueError` for text that is no such answer."""
    from prometheus_client.parser import text_string_to_metric_families

    # Other families, and buckets that nobody wants, are left out before they are parsed, which is the dear part.
    lines = [line for line in text.splitlines() if line.startswith(WANTED) and (with_buckets or "_bucket{" not in line)]
    readings = []
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        if family.name.endswith("_info"):  # settings in labels, with the value 1
            continue
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = tuple(sorted(label for label in sample.labels.items() if not _is_constant(label)))
            readings.append(Reading(now, sample.name, float(sample.value), labels))
    return readings


def _is_constant(label: tuple[str, str]) -> bool:
    return label[0] == "model_name" or label == ("engine", "0")
