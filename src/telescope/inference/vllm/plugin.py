"""Entry point of the `vllm.general_plugins` group: vLLM calls `register` once in every process of an engine.

Registers the weight transfer engine by name, so that it is imported only where it is used, and ties the process to its
supervisor. Must stay cheap and safe: it also runs for a vLLM that has nothing to do with Telescope.
"""

from __future__ import annotations

import os

from telescope.utils.child_guard import SUPERVISOR_PID_VARIABLE, die_with

BACKEND = "telescope"
"""Name of the weight transfer backend in `--weight-transfer-config`."""

TRANSFER_VARIABLE = "TELESCOPE_WEIGHT_TRANSFER"
"""In the environment of a server, as vLLM's config has no room for it: `auto`, `background` or `in_place: reason`."""


def register() -> None:
    """Make the backend known to vLLM, and end this process when its supervisor ends."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:  # plugins may be loaded twice in one process
        WeightTransferEngineFactory.register_engine(
            BACKEND, "telescope.inference.vllm.weights", "TelescopeWeightTransferEngine"
        )
    supervisor = os.environ.get(SUPERVISOR_PID_VARIABLE)
    if supervisor:
        die_with(int(supervisor))
