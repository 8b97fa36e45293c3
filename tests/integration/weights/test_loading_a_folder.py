"""vLLM's worker loads a model folder in the dtypes in which vLLM itself would load it."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from telescope.inference.vllm import weights
from telescope.weights.engine_weights import engine_weights
from telescope.weights.fingerprint import fingerprint, to_hex
from telescope.weights.plan import TensorMeta, make_update


class Router(nn.Module):
    """A router in bfloat16 with a correction in float32, as GLM-4.5 has in vLLM."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
        self.correction = nn.Parameter(torch.zeros(2))

    def load_weights(self, tensors: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in tensors:
            parameters[name].data.copy_(tensor)


def test_what_an_engine_keeps_in_float32_is_not_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "set_current_vllm_config", lambda _: nullcontext())
    stored = {"weight": torch.full((2, 2), 1 + 2**-20), "correction": torch.tensor([1.0, 1 + 2**-20])}
    save_file(stored, tmp_path / "model.safetensors")
    engine: Any = weights.TelescopeWeightTransferEngine.__new__(weights.TelescopeWeightTransferEngine)
    engine.model, engine.device, engine.vllm_config, engine.tied = Router(), torch.device("cpu"), None, {}
    metas = [TensorMeta(name, tuple(tensor.shape)) for name, tensor in stored.items()]
    engine.receive_weights(make_update(metas, version=1, dtype="bfloat16", folder=str(tmp_path)))
    assert torch.equal(engine.model.correction, stored["correction"])
    assert engine.model.weight.unique().tolist() == [1.0]
    read = engine.fingerprints_of_folder
    assert read["correction"] == to_hex(fingerprint(stored["correction"]))
    found = engine_weights(engine.model, engine.update.metas)["tensors"]
    assert {name: share["fingerprint"] for name, (share,) in found.items()} == read
