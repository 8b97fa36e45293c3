"""vLLM plugin: vLLM calls `register` once in every process of an engine.

Registers the weight transfer engine by name, so that it is imported only where it is used, and ties the process to its
supervisor. Must stay cheap and safe: it also runs in a vLLM that is unrelated to Telescope.
"""

import os

from telescope.utils.child_guard import SUPERVISOR_PID_VARIABLE, die_with

BACKEND = "telescope"
"""Name of the weight transfer backend in `--weight-transfer-config`."""

TRANSFER_VARIABLE = "TELESCOPE_WEIGHT_TRANSFER"
"""Variable of a server, since vLLM's config has no field for it: `auto`, `background` or `in_place: reason`."""


def register() -> None:
    """Registers the backend, and ends this process with its supervisor."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # plugins may be loaded twice in one process
        WeightTransferEngineFactory.register_engine(
            BACKEND, "telescope.inference.vllm.weights", "TelescopeWeightTransferEngine"
        )
    supervisor = os.environ.get(SUPERVISOR_PID_VARIABLE)
    if supervisor:
        die_with(int(supervisor))
