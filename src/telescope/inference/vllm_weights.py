"""The vLLM side of a weight sync: an engine for vLLM's weight transfer interface, and the worker's part of the probe.

Owns what happens to a vLLM model between `start_weight_update` and `finish_weight_update`, and knows vLLM's
layer-wise reload. The bytes come through `telescope.weights.receiver`; which slice is which tensor is
`telescope.weights.held`. Imported in vLLM's processes only, by name: `vllm_plugin` registers the engine,
`vllm_launch` names the worker extension.

Invariants:
- Parameters keep their storage across a sync (captured CUDA graphs hold addresses); the probe checks the addresses.
- An update that broke off leaves nothing behind that the next `start_weight_update` does not undo; the engine must not
  sample before that next update ends, because some layers are new by then and others are not.
- A parameter that two layers share is processed for both of them. vLLM's layer-wise reload processes it for the layer
that
  loaded it and puts the other one's old state back; on the CPU that state is a packed copy of old weights, and a tied
  output layer would go on computing with it, without an error.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

from telescope.weights.communicator import Communicator
from telescope.weights.held import held_weights, tied_names
from telescope.weights.lifeline import TransferError
from telescope.weights.plan import InitInfo, UpdateInfo
from telescope.weights.receiver import NamedTensors, ReceiveReport, receive

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig


class TelescopeWeightTransferEngine(WeightTransferEngine[Any, Any]):
    """Receives weights over one communicator per engine (gloo or NCCL) and loads them in place, layer by layer."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.communicator: Communicator | None = None
        self.pin_memory = True
        self.update: UpdateInfo | None = None
        """The last update whose tensors all arrived."""
        self.received: ReceiveReport | None = None
        # Before anything is reloaded: a reload takes the parameters apart, and the tie with them.
        self.tied = tied_names(model)
        self.addresses = storage_addresses(model)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the sender's communicator; a former one is dropped. All workers of the engine do this at once."""
        self.shutdown()
        self.pin_memory = init_info.pin_memory
        self.communicator = Communicator.connect(
            init_info.host,
            init_info.port,
            init_info.rank_offset + self.parallel_config.rank,
            init_info.world_size,
            backend=init_info.backend,
            timeout=init_info.timeout_seconds,
            token=init_info.token,
            device=self.device if init_info.backend == "nccl" else None,
        )

    def start_weight_update(self) -> None:
        """Make the layers ready to be loaded, from the state that a broken-off update may have left."""
        # vLLM 0.26 leaves setting the current config to the engine, 0.32 does it around these calls; layers ask for it.
        with set_current_vllm_config(self.vllm_config):
            undo_unfinished_reload(self.model)
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load what `UpdateInfo` describes. On an accelerator, returns when the device is done with it."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if self.communicator is None:
            raise TransferError("weight transfer: no sender has been connected yet")
        self.update = None
        with set_current_vllm_config(self.vllm_config):
            self.received = receive(
                self.communicator, update_info, self._load, device=self.device, pin_memory=self.pin_memory
            )
        self.update = update_info

    def finish_weight_update(self) -> None:
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model, self.model_config)
            reprocess_tied_layers(self.model)

    def shutdown(self) -> None:
        if self.communicator is not None:
            self.communicator.close()
            self.communicator = None

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> None:
        """vLLM 0.26 wants its engines to hold the trainer's half too; ours is `telescope.weights.sender`."""
        raise NotImplementedError("send weights with telescope.weights.sender.WeightSender")

    def _load(self, tensors: NamedTensors) -> None:
        """Give a bucket to the model's own loader. A second name of a tied parameter needs no loading."""
        model: Any = self.model
        model.load_weights((name, tensor) for name, tensor in tensors if name not in self.tied)


class WeightsWorkerExtension:
    """Methods that vLLM adds to its worker class, called over `/collective_rpc`."""

    def telescope_fingerprints(self) -> dict[str, Any]:
        """What this worker holds of the tensors of its last update; input of `weights.probe.compare`.

        Keys: `version`, `tensors`, `shapes`, `unaccounted`, `moved`, and `seconds` that the reading took.
        """
        start = time.monotonic()
        engine: TelescopeWeightTransferEngine = self.weight_transfer_engine  # type: ignore[attr-defined]
        update = engine.update
        if update is None:
            return {"version": None, "tensors": {}, "shapes": {}, "unaccounted": [], "moved": []}
        with torch.inference_mode():
            answer = held_weights(engine.model, update.metas, getattr(torch, update.dtype))
        now = storage_addresses(engine.model)
        answer["version"] = update.version
        answer["shapes"] = dict(zip(update.names, update.shapes, strict=True))
        answer["moved"] = sorted(name for name, address in engine.addresses.items() if now.get(name) != address)
        answer["seconds"] = time.monotonic() - start
        return answer

    def telescope_sync_timings(self) -> dict[str, float]:
        """Seconds of this worker's last transfer: `seconds`, `wait_seconds`, `load_seconds`."""
        engine: TelescopeWeightTransferEngine = self.weight_transfer_engine  # type: ignore[attr-defined]
        report = engine.received
        if report is None:
            return {}
        return {
            "seconds": report.seconds,
            "wait_seconds": report.wait_seconds,
            "load_seconds": report.load_seconds,
        }


def storage_addresses(model: nn.Module) -> dict[str, int]:
    """Where each parameter that is not empty lies. Packed layers on the CPU keep an empty one."""
    return {name: p.data_ptr() for name, p in model.named_parameters() if p.numel() > 0}


def undo_unfinished_reload(model: nn.Module) -> None:
    """Put back the tensors of layers whose reload began and did not end; does nothing after a whole update."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if not info.can_load():
            continue
        if info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()


def reprocess_tied_layers(model: nn.Module) -> None:
    """Process the weights of every layer that shares its parameter with another, now that the parameter is new.

    For unquantised layers this packs the weight for the CPU's kernels and does nothing on a GPU.
    """
    tied = tied_names(model)
    for name in tied:
        layer = model.get_submodule(name.rpartition(".")[0])
        method = getattr(layer, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(layer)
