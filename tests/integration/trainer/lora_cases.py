"""What peft computes for one tiny model with adapters, stored in `golden/lora_peft.safetensors`.

`python -m tests.integration.trainer.lora_cases` writes the file again. It needs peft, which nothing else
here does; the file was written by peft 0.21.2. It has, for each choice of modules in `CASES`: the adapter that peft
saved, after two random matrices for each layer (`adapter/`), the logprobs of `TOKENS` (`logprobs`), the gradient of
their sum (`gradient/`), and the weights after `merge_and_unload` (`merged/`).
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.integration.trainer.trainer_cases import VOCAB, build_model, packed_share, relative_error, step_gradient
from torch import nn
from transformers import AutoModelForCausalLM

from telescope.trainer.batch import TrainSample
from telescope.trainer.lora import A, B
from telescope.trainer.model import PREFIX
from telescope.trainer.worker import Trainer

GOLDEN = Path(__file__).parent / "golden" / "lora_peft.safetensors"
TOKENS = [1, 5, 9, 2, 60, 33, 17, 17, 4]
FIELDS: dict[str, Any] = {"lora_rank": 3, "lora_alpha": 7.5}
CASES: dict[str, str | list[str]] = {
    "all": "all-linear",
    "list": ["q_proj", "self_attn.v_proj"],
    "regex": r".*layers\.1\.(mlp\.c_fc|self_attn\.o_proj)",
}
SHAPE: dict[str, Any] = {"family": "starcoder2", "tied": True}


def fill(model: nn.Module) -> None:
    """Sets all weights and biases to numbers that do not depend on the version of torch or transformers."""
    for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
        values = torch.arange(parameter.numel(), dtype=torch.float64)
        drawn = torch.sin(values * 12.9898 + number * 78.233) * 0.3
        parameter.data = (drawn + (parameter.ndim == 1)).view(parameter.shape)


def build(folder: Path) -> str:
    """The model of the stored numbers."""
    path = build_model(folder, **SHAPE)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    fill(model)
    model.save_pretrained(path)
    return path


def golden(case: str, part: str) -> dict[str, torch.Tensor]:
    """The stored tensors of a part of a case."""
    prefix = f"{case}/{part}/"
    return {name.removeprefix(prefix): tensor for name, tensor in load_file(GOLDEN).items() if name.startswith(prefix)}


def adapter_job(
    trainer: Trainer, samples: list[TrainSample]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The gradient of one optimizer step, and the matrices A, by the layers' names. Collective."""
    named = trainer.backend.policy.named_parameters()  # type: ignore[attr-defined]
    a = {name.removeprefix(PREFIX).removesuffix(A): p.full_tensor().cpu() for name, p in named if name.endswith(A)}
    return step_gradient(trainer, packed_share(trainer, samples)), a


def follows_full_gradient(
    gradient: dict[str, torch.Tensor], a: dict[str, torch.Tensor], full: dict[str, torch.Tensor], bound: float
) -> None:
    """Checks the gradient of new adapters by that of full training: B is zero, so that A has none."""
    scaling = FIELDS["lora_alpha"] / FIELDS["lora_rank"]
    assert not any(tensor.any() for name, tensor in gradient.items() if name.endswith(A))
    of_b = {name.removesuffix(B): tensor for name, tensor in gradient.items() if name.endswith(B)}
    wanted = {name: scaling * full[f"{name}.weight"] @ a_RI.t().to(full[f"{name}.weight"]) for name, a_RI in a.items()}
    assert len(gradient) == 2 * len(wanted) > 0
    assert relative_error(of_b, wanted) < bound


def write() -> None:
    """Computes everything with peft."""
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]

    stored: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        source = build(Path(folder) / "model")
        for case, targets in CASES.items():
            base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64)
            settings = LoraConfig(
                r=FIELDS["lora_rank"], lora_alpha=FIELDS["lora_alpha"], target_modules=targets, task_type="CAUSAL_LM"
            )
            model = get_peft_model(base, settings, autocast_adapter_dtype=False)
            trained = nn.ParameterDict()
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.double()
                    trained[name.replace(".", "/")] = parameter
            fill(trained)
            model.save_pretrained(Path(folder) / case)
            saved = load_file(Path(folder) / case / "adapter_model.safetensors")
            ids_T = torch.tensor(TOKENS)
            logprobs_TV = torch.log_softmax(model(ids_T[None]).logits[0], dim=-1)
            logprobs_N = logprobs_TV[:-1].gather(1, ids_T[1:, None]).squeeze(1)
            logprobs_N.sum().backward()
            stored |= {f"{case}/adapter/{name}": tensor for name, tensor in saved.items()}
            stored[f"{case}/logprobs/"] = logprobs_N.detach()
            for name, parameter in trained.items():
                own = name.replace("/", ".").replace(".default.", ".")
                stored[f"{case}/gradient/{own}"] = parameter.grad.clone()
            merged = dict(model.merge_and_unload().named_parameters())
            changed = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64).state_dict()
            stored |= {
                f"{case}/merged/{name}": tensor.detach().clone()
                for name, tensor in merged.items()
                if not torch.equal(tensor, changed[name])
            }
    assert max(TOKENS) < VOCAB
    save_file(stored, GOLDEN)


if __name__ == "__main__":
    write()
