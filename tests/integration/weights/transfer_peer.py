"""A process that plays an engine's worker for the transfer tests: receives syncs into a dict, or misbehaves on demand.

Run as `python transfer_peer.py JSON` with the fields of `InitInfo`, `rank`, `updates` (a list of `UpdateInfo` fields)
and `fault`; prints one line of JSON per sync.
"""

import json
import os
import sys
import time

import torch

from telescope.weights.communicator import Communicator
from telescope.weights.control_channel import TransferError
from telescope.weights.fingerprint import fingerprint, to_hex
from telescope.weights.plan import InitInfo, UpdateInfo
from telescope.weights.receiver import NamedTensors, receive


def main() -> None:
    order = json.loads(sys.argv[1])
    info = InitInfo(**order["init"])
    rank, fault = order["rank"], order["fault"]
    device = torch.device(order.get("device", "cpu"))
    communicator = Communicator.connect(
        info.host,
        info.port,
        rank,
        info.world_size,
        backend=info.backend,
        timeout=info.timeout_seconds,
        token=info.token,
        device=device,
    )
    for fields in order["updates"]:
        loaded: dict[str, str] = {}

        def load(tensors: NamedTensors, loaded: dict[str, str] = loaded) -> None:
            loaded.update({name: to_hex(fingerprint(tensor)) for name, tensor in tensors})
            if fault == "die":
                os._exit(9)
            if fault == "hang":
                time.sleep(600)
            if fault == "raise":
                raise ValueError("this layer does not fit")

        if fault == "die before":
            os._exit(9)
        try:
            receive(communicator, UpdateInfo(**fields), load, device=device)
        except (TransferError, ValueError) as error:
            print(json.dumps({"rank": rank, "error": str(error)}), flush=True)
            break
        print(json.dumps({"rank": rank, "loaded": loaded}), flush=True)
    while communicator.failure is None:  # the sender leaves first, as a trainer does
        time.sleep(0.05)
    communicator.close()


main()
