"""Experts leave the trainer under the names of a checkpoint, and are counted in the layers that have them."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

from telescope.config.model_shape import ModelShape
from telescope.trainer.checkpoint_names import CheckpointNames, checkpoint_tensors
from telescope.trainer.model import skeleton_of

CONFIG = Qwen3MoeConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8,
    mlp_only_layers=[1],
)  # fmt: skip


def test_names_and_values_are_those_of_the_files_that_transformers_writes(tmp_path):
    from safetensors.torch import load_file

    logging.disable_progress_bar()
    model = Qwen3MoeForCausalLM(CONFIG)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    ours = dict(checkpoint_tensors(model))
    assert ours.keys() == written.keys()
    assert all(torch.equal(ours[name], written[name]) for name in written)


def test_the_saved_names_load_as_the_same_model(tmp_path):
    from safetensors.torch import save_file

    model = Qwen3MoeForCausalLM(CONFIG)
    tensors = {name: tensor.detach().clone() for name, tensor in checkpoint_tensors(model)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    CONFIG.save_pretrained(tmp_path)
    again = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert all(torch.equal(parameter, again[name]) for name, parameter in model.named_parameters())


def test_every_other_tensor_keeps_its_name_and_is_not_copied():
    names = CheckpointNames(Qwen3MoeForCausalLM(CONFIG))
    tensor = torch.zeros(24, 16)
    ((name, same),) = names.parts("model.layers.1.mlp.gate_proj.weight", tensor)
    assert name == "model.layers.1.mlp.gate_proj.weight"
    assert same is tensor


@pytest.mark.parametrize("kind", ["gate_up_proj", "down_proj"])
def test_shapes_are_known_without_the_values(kind):
    name, shape = f"model.layers.0.mlp.experts.{kind}", (3, 16, 8)
    names = CheckpointNames(Qwen3MoeForCausalLM(CONFIG))
    on_meta = dict(names.parts(name, torch.empty(shape, device="meta")))
    values = dict(names.parts(name, torch.zeros(shape)))
    assert {n: t.shape for n, t in on_meta.items()} == {n: t.shape for n, t in values.items()}


def test_a_model_of_other_code_keeps_its_names():
    assert skeleton_of({"model_type": "of_their_own"}) is None
    tensor = torch.zeros(2)
    assert list(CheckpointNames(None).parts("blocks.0.w", tensor)) == [("blocks.0.w", tensor)]


EXPERTS_AND_DENSE = [
    # decoder_sparse_step, mlp_only_layers, layers with experts of seven
    (1, [], 7),
    (1, [0, 3], 5),
    (2, [], 3),
    (3, [2, 4, 9], 1),
    (8, [], 0),
]


@pytest.mark.parametrize(("step", "dense", "sparse"), EXPERTS_AND_DENSE)
@pytest.mark.parametrize("tied", [False, True])
def test_experts_are_counted_in_the_layers_that_have_them(step, dense, sparse, tied):
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 7, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "tie_word_embeddings": tied, "decoder_sparse_step": step, "mlp_only_layers": dense,
    }  # fmt: skip
    model = Qwen3MoeConfig(**sizes)
    with torch.device("meta"):
        wanted = Qwen3MoeForCausalLM(model).num_parameters()
    shape = ModelShape.from_config(model.to_dict())
    assert shape.num_parameters == wanted
    assert shape.num_sparse_layers() == sparse
    of_each = [(layer + 1) % step == 0 and layer not in dense for layer in range(7)]
    assert [shape.num_sparse_layers(first) for first in range(8)] == [sum(of_each[first:]) for first in range(8)]
    assert [shape.num_dense_layers(first) for first in range(8)] == [of_each[first:].count(False) for first in range(8)]
