"""The gauges of one machine, sampled: the host's, and its GPUs' where there are any."""

from __future__ import annotations

import logging
import socket

from telescope.record.gauges import Sampler, Taken
from telescope.record.host import host_reader
from telescope.record.nvidia import GpuReader, NoGpusError

logger = logging.getLogger(__name__)


class MachineSampler:
    """Samples this machine every `interval` seconds from its making to `stop`.

    Host and GPUs have a thread each, so that a driver that hangs in NVML leaves the rest. What cannot be read here is
    said in one line of the log.
    """

    def __init__(self, interval: float) -> None:
        self._samplers = []
        try:
            self._samplers.append(Sampler("machine", interval, host_reader()))
        except ImportError as error:
            logger.warning("The gauges of this machine are not recorded: %s", error)
        try:
            self._samplers.append(Sampler("gpus", interval, GpuReader()))
        except NoGpusError as error:
            logger.info("There are no gauges of GPUs: %s", error)
        for sampler in self._samplers:
            sampler.start()

    def take(self) -> Taken:
        """What was read since the last call."""
        taken = [sampler.take() for sampler in self._samplers]
        return Taken(
            readings=[reading for part in taken for reading in part.readings],
            problems=[problem for part in taken for problem in part.problems],
            node=socket.gethostname(),
        )

    def stop(self) -> None:
        """End the threads."""
        for sampler in self._samplers:
            sampler.stop()
