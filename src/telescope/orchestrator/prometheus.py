"""Serves the state of a run, as the live view shows it, to Prometheus at `prometheus_address`."""

import math
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from telescope.config.machine import listen_problem, prometheus_error, split_address
from telescope.orchestrator.status import RunStatus

Metric = CounterMetricFamily | GaugeMetricFamily

COUNTERS = {  # name -> field of `RunStatus` and meaning
    "finished_samples": ("num_samples_finished", "Samples that were scored or masked, those of evals included."),
    "tokens": ("num_tokens_generated", "Sampled tokens of ended samples, those of evals included."),
    "discarded_groups": ("num_discarded_groups", "Finished groups that are not trained."),
    "masked_samples": ("num_masked_samples", "Samples that failed or that a filter left out."),
    "long_prompts": ("num_long_prompts", "Prompts that leave no space for a completion."),
}

GAUGES = {  # name -> field of `RunStatus` and meaning
    "step": ("step", "Finished steps."),
    "num_steps": ("num_steps", "Steps of the whole run."),
    "version": ("version", "Policy version of the servers' weights."),
    "num_generating": ("num_generating", "Requests in the engines."),
    "num_slots": ("num_slots", "Request slots of all servers."),
    "num_open_groups": ("num_open_groups", "Groups that are being generated."),
    "num_finished_groups": ("num_finished_groups", "Groups that wait for their batch."),
    "eval_samples_done": ("eval_done", "Finished samples of the eval before or after training."),
    "eval_samples": ("eval_total", "Samples of the eval that runs before or after training; else 0."),
}

STEP_GAUGES = {  # field of `StepSummary` -> meaning
    "reward_mean": "mean reward of all samples scored since the step before",
    "reward_trained": "mean reward of the samples that were trained",
    "seconds": "its duration in seconds",
    "staleness_mean": "mean age of its samples in policy versions",
    "tokens_per_second": "trained tokens per second",
    "kl_inference": "KL between engine and trainer in nats per token",
    "grad_norm": "gradient norm before clipping",
    "waited_share": "share of its time without a batch",
}


class StatusCollector:
    """Reads the numbers of a run at each request."""

    def __init__(self, status: RunStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics that have a finite value."""
        status = self._status
        for name, (field, meaning) in COUNTERS.items():
            yield from self._metric(CounterMetricFamily, name, meaning, getattr(status, field))
        for name, (field, meaning) in GAUGES.items():
            yield from self._metric(GaugeMetricFamily, name, meaning, getattr(status, field))
        speed = "Tokens of samples that ended in the last 10 seconds, per second."
        yield from self._metric(GaugeMetricFamily, "tokens_per_second", speed, status.tokens_per_second())
        left = "Estimated seconds until the last step ends."
        yield from self._metric(GaugeMetricFamily, "seconds_left", left, status.seconds_left())
        for last in status.history[-1:]:
            for field, meaning in STEP_GAUGES.items():
                yield from self._metric(
                    GaugeMetricFamily, f"step_{field}", f"Newest step: {meaning}.", getattr(last, field)
                )

    def _metric(self, family: type[Metric], name: str, meaning: str, value: float | None) -> Iterator[Metric]:
        if value is not None and math.isfinite(value):
            metric = family(f"telescope_{name}", meaning, labels=["run"])
            metric.add_metric([self._status.run_name], value)
            yield metric


def serve_status(address: str, status: RunStatus) -> Callable[[], None]:
    """Serves `status` at `host:port`. Returns a function that stops it. Raises `ConfigError` if it cannot."""
    host, port = split_address(address)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(status))
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise prometheus_error(address, listen_problem(host, port) or str(error)) from error
    return server.shutdown
