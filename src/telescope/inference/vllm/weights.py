"""vLLM's side of a weight sync: the transfer engine, and the worker's part of the probe.

Owns what happens to a vLLM model between `start_weight_update` and `finish_weight_update`, and knows vLLM's layer-wise
reload. Weights come in place, layer by layer inside the pause, or in the background: `begin_background` fills staging
buffers while the engine samples, and `finish_weight_update` copies them over. `telescope.weights.receiver` receives the
bytes; `telescope.weights.engine_weights` maps tensors to slices. Imported in vLLM's processes only, by name: `plugin`
registers the engine, `launch` names the worker extension.

Invariants:
- Parameters keep their storage across a sync (captured CUDA graphs contain addresses); the probe checks the addresses.
- The next `start_weight_update` undoes whatever an unfinished update left. The engine must not sample before that next
  update ends, because some layers are new by then and others are not.
- A parameter that two layers share is processed for both. vLLM's layer-wise reload processes it for the layer that
  loaded it and restores the other's old state. On the CPU that state is a packed copy of old weights, and a tied output
  layer would silently compute with it.
- Experts that a kernel packs are packed again. vLLM packs them once, when it creates the kernel: after a reload
  unpacked weights would silently be where the kernel expects packed ones.
- In a server of several workers no method that vLLM calls on all of them raises: `failure` stores the error, and the
  driver asks for it. vLLM stops reading the workers' results at the first error and returns the unread ones as results
  of the next call, so one failure would shift every later result.
- A background update opens vLLM's update session only after all of it has arrived, and changes no weight before the
  session ends; an aborted one has changed nothing.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
from vllm.utils.deep_gemm import per_block_cast_to_fp8

from telescope.inference.vllm.plugin import TRANSFER_VARIABLE
from telescope.weights import receiver
from telescope.weights.communicator import Communicator
from telescope.weights.control_channel import TransferError
from telescope.weights.engine_quantized import QuantizedReference, is_quantized
from telescope.weights.engine_weights import (
    engine_weights,
    float32_names,
    loaded_names,
    quantized_reference,
    tied_names,
)
from telescope.weights.fingerprint import fingerprint
from telescope.weights.model_folder import open_tensors
from telescope.weights.plan import InitInfo, UpdateInfo, plan_buckets, to_hex

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

GIB = 1 << 30
FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with FP8. On older ones vLLM would multiply in higher precision."""
logger = logging.getLogger("vllm.telescope.weights")


# The warning comes at every sync, because no checkpoint has rotary tables.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(
    lambda record: not record.getMessage().endswith("RotaryEmbedding: Failed to load weights")
)


def stores_failure(method: Callable[..., None]) -> Callable[..., None]:
    """Wraps a worker's method so that its error is stored in `failure`. See the invariants."""

    @functools.wraps(method)
    def call(self: TelescopeWeightTransferEngine, *args: Any) -> None:
        try:
            method(self, *args)
        except Exception as error:  # handed to the driver by `telescope_failure`
            if self.parallel_config.world_size == 1:
                raise
            logger.exception("%s failed", method.__name__)
            self.failure = str(error)

    return call


class TelescopeWeightTransferEngine(WeightTransferEngine[Any, Any]):
    """Receives weights over one communicator per engine, in place or in the background."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.communicator: Communicator | None = None
        self.failure: str | None = None
        """This worker's error since the driver last asked. Only used with several workers."""
        self.pin_memory = True
        self.update: UpdateInfo | None = None
        """The last update whose tensors all arrived."""
        self.received: receiver.ReceiveReport | None = None
        self.fingerprints_of_folder: dict[str, str] = {}
        """Fingerprints of the last update's tensors, if they were read from a model folder."""
        self.reference: QuantizedReference | None = None
        """Recomputed quantization of the last update, if it must be verified and the model is quantized."""
        if any(is_quantized(module) for module in model.modules()) and device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            if capability < FP8_CAPABILITY:
                raise ValueError(f"inference_quantization needs GPUs with FP8; this one has {capability}")
        # Before any reload, which separates tied parameters.
        self.tied = tied_names(model)
        self.other_names: dict[str, str] = {}
        """Maps other names of the current update's parameters to the names under which they are loaded."""
        self.addresses = storage_addresses(model)
        self._expert_kernels: list[tuple[Any, Any]] = []
        """Methods and kernels of expert layers, removed during an update in place."""
        self.staging: receiver.StagingBuffers | None = None
        self.receiving: receiver.OverlappedReceive | None = None
        self.swap_seconds = 0.0
        self._buffers = receiver.ReceiveBuffers()
        self.has_adapter = vllm_config.lora_config is not None
        """Whether syncs replace an adapter (`lora_sync: adapter`). An update then only counts the version."""
        self._wish = os.environ.get(TRANSFER_VARIABLE, "auto")
        self.in_place_because = self._why_in_place()
        """None if weights may come in the background."""
        if self._wish == "background" and self.in_place_because is not None:
            raise ValueError(f"weight_transfer is background, but {self.in_place_because}")

    @stores_failure
    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Joins the sender's communicator and drops an earlier one. All workers of the engine do this at once."""
        self.shutdown()
        self.pin_memory = init_info.pin_memory
        self.communicator = Communicator.connect(init_info, self.parallel_config.rank + 1, self.device)

    def make_staging(self) -> str | None:
        """Allocates the staging buffer if allowed. Returns why weights come in place, or None.

        Raises `RuntimeError` when memory is missing and the config requires background transfer.
        """
        if self.staging is None and self.in_place_because is None:
            try:
                self.staging = receiver.StagingBuffers(self.model)
            except torch.OutOfMemoryError:
                torch.accelerator.empty_cache()
                needed = sum(p.numel() * p.element_size() for p in self.model.parameters()) / GIB
                free = torch.accelerator.get_memory_info(self.device)[0] / GIB
                self.in_place_because = (
                    f"the staging buffer needs {needed:.1f} GiB, and the GPU has {free:.1f} GiB free"
                )
                if self._wish == "background":
                    raise RuntimeError(
                        f"weight_transfer is background, but {self.in_place_because}: lower gpu_memory_utilization, or "
                        "set weight_transfer to in_place"
                    ) from None
        return self.in_place_because

    def begin_background(self, update: UpdateInfo) -> None:
        """Starts to receive `update` into the staging buffer and returns at once. Drops an unfinished earlier one."""
        if self.communicator is None or self.staging is None:
            raise TransferError("weight transfer: no sender has connected yet, or there is no staging buffer")
        self._drop_background("another update begins")
        self.update = None
        self.receiving = receiver.OverlappedReceive(
            self.communicator,
            update,
            self.staging,
            self._buffers,
            device=self.device,
            skip=frozenset(loaded_names(self.tied, set(update.names))),
            pin_memory=self.pin_memory,
        )

    @stores_failure
    def start_weight_update(self) -> None:
        """Prepares the layers for loading in place, even after an unfinished update."""
        if self.has_adapter:
            use_plain_logits(self.model)
        if self.receiving is not None or self.has_adapter:
            return
        # Layers read the current config. vLLM 0.26 leaves setting it to the engine, 0.32 sets it around these calls.
        with set_current_vllm_config(self.vllm_config):
            undo_unfinished_reload(self.model)
            restore_kernels(self._expert_kernels)
            initialize_layerwise_reload(self.model)
            if self.device.type == "cpu":
                self._expert_kernels = remove_expert_kernels(self.model)

    @stores_failure
    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives and loads the update in `UpdateInfo`. On an accelerator, returns when the device is done."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.background:
            # Waits until the staging buffer has this update.
            if self.receiving is None or self.receiving.update.version != update_info.version:
                raise TransferError(f"weight transfer: version {update_info.version} has not begun")
            try:
                self.received = self.receiving.finish()
            except Exception:
                self._drop_background("its transfer failed")
                raise
            return
        self.fingerprints_of_folder = {}
        self.reference = None
        self.other_names = loaded_names(self.tied, set(update_info.names))
        if update_info.verify or update_info.folder:
            # As vLLM's online quantization does.
            quantize = functools.partial(per_block_cast_to_fp8, block_size=[128, 128], use_ue8m0=False)
            self.reference = quantized_reference(self.model, update_info.metas, quantize)
        if update_info.folder:
            self._load_folder(update_info)
            return
        if self.communicator is None:
            raise TransferError("weight transfer: no sender has connected yet")
        self.update = None
        with set_current_vllm_config(self.vllm_config):
            self.received = receiver.receive(
                self.communicator, update_info, self._load, device=self.device, pin_memory=self.pin_memory
            )
        self.update = update_info

    def _load_folder(self, update: UpdateInfo) -> None:
        """Loads a model folder on this machine, a bucket at a time, in the dtypes in which vLLM would load it."""
        self.update = None
        if update.dtype != "float32":
            update = replace(update, wide=float32_names(self.model, update.metas))
        files = open_tensors(Path(update.folder))
        with set_current_vllm_config(self.vllm_config):
            for bucket in plan_buckets(update):
                metas = [meta for meta, _ in bucket.entries]
                tensors = [
                    (m.name, files[m.name].get_tensor(m.name).to(self.device, getattr(torch, m.dtype))) for m in metas
                ]
                self.fingerprints_of_folder |= {name: to_hex(fingerprint(tensor)) for name, tensor in tensors}
                self._load(tensors)
        self.update = update

    @stores_failure
    def finish_weight_update(self) -> None:
        if self.has_adapter:
            return
        if self.receiving is not None:
            assert self.staging is not None
            started = time.monotonic()
            self.staging.swap()
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
            self.swap_seconds = time.monotonic() - started
            self.update, self.receiving = self.receiving.update, None
            return
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model, self.model_config)
            restore_kernels(self._expert_kernels)
            copy_shared_values(self.model, self.other_names)
            reprocess_tied_layers(self.model)

    def shutdown(self) -> None:
        self._drop_background("the sender is reconnecting")
        if self.communicator is not None:
            self.communicator.close()
            self.communicator = None

    @staticmethod
    def trainer_send_weights(*args: Any, **kwargs: Any) -> None:
        """Unused: abstract in vLLM 0.26. Our sender is `telescope.weights.sender`."""
        raise NotImplementedError("send weights with telescope.weights.sender.WeightSender")

    def _why_in_place(self) -> str | None:
        if self.has_adapter:
            return "the base weights do not change"
        if self._wish.startswith("in_place"):
            return self._wish.partition(": ")[2] or "weight_transfer is in_place"
        if self.parallel_config.world_size > 1:
            return "collectives of a tensor-parallel engine must not run beside a transfer"
        for place, layer in self.model.named_modules():
            loaded, _ = get_layerwise_info(layer).restore_metadata
            current = dict(layer.named_parameters(recurse=False))
            if any(name not in current or _form(current[name]) != _form(tensor) for name, tensor in loaded.items()):
                return f"{place} does not compute with its weights in the form in which they are loaded"
        return receiver.why_in_place(self.model)

    def _drop_background(self, reason: str) -> None:
        if self.receiving is not None:
            self.receiving.abandon(reason)
            self.receiving = None
            self._buffers = receiver.ReceiveBuffers()

    def _load(self, tensors: receiver.NamedTensors) -> None:
        """Passes a bucket to the model's own loader. The second name of a tied parameter needs no loading."""
        model: Any = self.model
        if self.reference is not None:
            for name, tensor in tensors:
                self.reference.observe(name, tensor)
        model.load_weights((name, tensor) for name, tensor in tensors if name not in self.other_names)


class WeightsWorkerExtension:
    """Methods that vLLM adds to its worker class. They are called over `/collective_rpc`."""

    weight_transfer_engine: TelescopeWeightTransferEngine

    def telescope_transfer_mode(self) -> dict[str, Any]:
        """Returns whether this worker receives in the `background`, else the `reason`.

        Allocates the staging buffer. Called after a sender has connected, so no update is in progress: a vLLM session
        that is still open belongs to an earlier update. A worker closes it when its own part fails, but not when it
        received everything.
        """
        self._weight_update_active = False
        engine = self.weight_transfer_engine
        reason = engine.make_staging()
        size = engine.staging.num_bytes if engine.staging is not None else 0
        return {"background": reason is None, "reason": reason, "staging_bytes": size}

    def telescope_failure(self) -> dict[str, Any]:
        """Returns this worker's error since the last call under `failure`."""
        failure, self.weight_transfer_engine.failure = self.weight_transfer_engine.failure, None
        return {"failure": failure}

    def telescope_begin_background(self, update: str) -> dict[str, Any]:
        """Starts to receive an `UpdateInfo` (JSON) while the engine works. Returns at once."""
        self.weight_transfer_engine.begin_background(UpdateInfo(**json.loads(update)))
        # An unfinished vLLM session of an earlier update would refuse the next.
        self._weight_update_active = False
        return {"started": True}

    def telescope_fingerprints(self, initial: str | None = None) -> dict[str, Any]:
        """Returns fingerprints of the tensors of this worker's last update, for `weights.probe.compare`.

        `initial` is the `UpdateInfo` (JSON) that describes the weights that the engine has loaded by itself, if there
        was no update yet. Keys: `version`, `tensors`, `shapes`, `unaccounted`, `moved`, `seconds` of the reading, and
        `read`, the fingerprints of a model folder's tensors if the update came from one.
        """
        start = time.monotonic()
        engine = self.weight_transfer_engine
        update = engine.update if initial is None else UpdateInfo(**json.loads(initial))
        if update is None:
            return {"version": None, "tensors": {}, "shapes": {}, "unaccounted": [], "moved": []}
        with torch.inference_mode():
            answer = engine_weights(engine.model, update.metas, engine.reference, engine.tied)
        if initial is not None:
            # If the files are in float32, these (a router) have more digits than the trainer computes with.
            for name in float32_names(engine.model, update.metas):
                for share in answer["tensors"][name]:
                    share["exact"] = True
        now = storage_addresses(engine.model)
        answer["version"] = update.version
        answer["read"] = engine.fingerprints_of_folder
        answer["shapes"] = dict(zip(update.names, update.shapes, strict=True))
        answer["moved"] = sorted(name for name, address in engine.addresses.items() if now.get(name) != address)
        answer["seconds"] = time.monotonic() - start
        return answer

    def telescope_sync_timings(self) -> dict[str, float]:
        """Returns `seconds`, `wait_seconds`, `load_seconds` and `swap_seconds` of this worker's last transfer."""
        engine = self.weight_transfer_engine
        return {} if engine.received is None else asdict(engine.received) | {"swap_seconds": engine.swap_seconds}


def use_plain_logits(model: nn.Module) -> None:
    """Makes the output layer compute as without adapters.

    No adapter has a part for that layer, but vLLM (0.26 to 0.32) adds a product of zeros at every step, with an index
    per running request. For logprobs of a prompt, whose rows are its tokens, the index is wrong: on a CPU the engine
    fails when other requests run (vllm-project/vllm issues 16668, 51594).
    """
    wrappers: list[Any] = [module for module in model.modules() if isinstance(module, LogitsProcessorWithLoRA)]
    for wrapper in wrappers:
        wrapper._get_logits = functools.partial(_plain_logits, wrapper.base_layer)


def _plain_logits(layer: Any, hidden: torch.Tensor, output: Any, *rest: Any) -> torch.Tensor | None:
    # An output layer that is tied to the embedding is inside the wrapper of the embedding's adapter.
    return layer._get_logits(hidden, getattr(output, "base_layer", output), *rest)


def storage_addresses(model: nn.Module) -> dict[str, int]:
    """Returns the address of each non-empty parameter. Layers packed for the CPU keep an empty parameter."""
    return {name: p.data_ptr() for name, p in model.named_parameters() if p.numel() > 0}


def _form(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def undo_unfinished_reload(model: nn.Module) -> None:
    """Restores the tensors of layers whose reload did not finish. Does nothing after a complete update."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if not info.can_load():
            continue
        if info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()


def remove_expert_kernels(model: nn.Module) -> list[tuple[Any, Any]]:
    """Removes the experts' kernels, so that new ones are packed. Returns the methods with their previous kernels.

    Call it only where no CUDA graph refers to a kernel.
    """
    methods: list[Any] = [getattr(layer, "quant_method", None) for layer in model.modules()]
    removed = [(method, method.moe_kernel) for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method, _ in removed:
        method.moe_kernel = None
    return removed


def restore_kernels(removed: list[tuple[Any, Any]]) -> None:
    """Restores the kernels of experts that got no new weights. Clears `removed`."""
    for method, kernel in removed:
        if method.moe_kernel is None:
            method.moe_kernel = kernel
    removed.clear()


@torch.no_grad()
def copy_shared_values(model: nn.Module, loaded: dict[str, str]) -> None:
    """Copies the loaded values to parameters that a reload separated from the loaded one (a router's bias)."""
    now = dict(model.named_parameters(remove_duplicate=False))
    for name, source in loaded.items():
        if now[name] is not now[source] and now[name].shape == now[source].shape:
            now[name].copy_(now[source])


def reprocess_tied_layers(model: nn.Module) -> None:
    """Processes layers with a shared parameter after an update.

    For unquantized layers this packs the weight for the CPU's kernels and does nothing on a GPU.
    """
    tied = tied_names(model)
    for name in tied:
        layer = model.get_submodule(name.rpartition(".")[0])
        method = getattr(layer, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(layer)
