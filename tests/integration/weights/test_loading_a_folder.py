"""vLLM's worker with tensors that it keeps in float32 while it computes in bfloat16."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from telescope.inference.vllm import weights
from telescope.weights.engine_weights import engine_weights
from telescope.weights.fingerprint import fingerprint
from telescope.weights.plan import TensorMeta, make_update, to_hex
from telescope.weights.probe import compare


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


def make_engine() -> Any:
    engine: Any = weights.TelescopeWeightTransferEngine.__new__(weights.TelescopeWeightTransferEngine)
    engine.model, engine.device, engine.vllm_config, engine.tied = Router(), torch.device("cpu"), None, {}
    engine.addresses, engine.fingerprints_of_folder, engine.reference = {}, {}, None
    return engine


def test_what_an_engine_keeps_in_float32_is_not_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "set_current_vllm_config", lambda _: nullcontext())
    stored = {"weight": torch.full((2, 2), 1 + 2**-20), "correction": torch.tensor([1.0, 1 + 2**-20])}
    save_file(stored, tmp_path / "model.safetensors")
    engine = make_engine()
    metas = [TensorMeta(name, tuple(tensor.shape)) for name, tensor in stored.items()]
    engine.receive_weights(make_update(metas, version=1, dtype="bfloat16", folder=str(tmp_path)))
    assert torch.equal(engine.model.correction, stored["correction"])
    assert engine.model.weight.unique().tolist() == [1.0]
    read = engine.fingerprints_of_folder
    assert read["correction"] == to_hex(fingerprint(stored["correction"]))
    found = engine_weights(engine.model, engine.update.metas)["tensors"]
    assert {name: share["fingerprint"] for name, (share,) in found.items()} == read


@pytest.mark.parametrize(("loaded", "ok"), [(1 + 2**-20, True), (2.0, False)])
def test_an_engine_that_keeps_more_digits_starts_with_the_trainers_weights(loaded: float, ok: bool) -> None:
    worker: Any = weights.WeightsWorkerExtension()
    worker.weight_transfer_engine = make_engine()
    worker.weight_transfer_engine.model.correction.data.fill_(loaded)
    update = make_update([TensorMeta("weight", (2, 2)), TensorMeta("correction", (2,))], version=0, dtype="bfloat16")
    sent = {"weight": torch.zeros(2, 2), "correction": torch.full((2,), 1 + 2**-20)}
    found = worker.telescope_fingerprints(json.dumps(update.to_dict()))
    assert compare(sent={n: to_hex(fingerprint(t.bfloat16())) for n, t in sent.items()}, loaded=[found]).ok is ok
