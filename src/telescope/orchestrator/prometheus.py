"""Serves the state of a run to Prometheus at `prometheus_address`, with the numbers of the live view as gauges."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily

from telescope.errors import UserError
from telescope.orchestrator.status import RunStatus


class StatusCollector:
    """Reads the numbers of a run at each request."""

    def __init__(self, status: RunStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yields current numbers as `telescope_<number>` and those of the newest step as `telescope_step_<number>`."""
        status = self._status
        now = status.now() | {"samples_finished": status.num_samples_finished, "tokens": status.num_tokens_generated}
        steps = {f"step_{name}": value for last in status.history[-1:] for name, value in asdict(last).items()}
        for name, value in (now | steps).items():
            if isinstance(value, int | float) and math.isfinite(value):
                gauge = GaugeMetricFamily(f"telescope_{name}", name.replace("_", " "), labels=["run"])
                gauge.add_metric([status.run_name], value)
                yield gauge


def serve_status(address: str, status: RunStatus) -> Callable[[], None]:
    """Serves `status` at `host:port`. Returns a function that stops it. Raises `UserError` for an unusable address."""
    host, _, port = address.rpartition(":")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(status))
    try:
        server, _ = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        raise UserError(
            f"prometheus_address: {address} cannot be used: {error.strerror}. Choose another one"
        ) from error
    return server.shutdown
