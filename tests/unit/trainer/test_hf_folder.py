"""Model folders: the plan of their files, safetensors that others read, sizes."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from telescope.errors import UserError
from telescope.trainer.hf_folder import parse_size, size_of, with_dtype, write_model_folder
from telescope.utils.data import split_by_size
from telescope.weights.plan import TensorMeta


def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "odd": torch.randn(3).to(torch.bfloat16),
        "matrix": torch.randn(4, 6).t(),  # not contiguous
        "scalar": torch.tensor(7),
        "wide": torch.randn(5, dtype=torch.float64),
        "mask": torch.tensor([True, False, True]),
    }


def _metas(tensors: dict[str, torch.Tensor]) -> list[TensorMeta]:
    return [TensorMeta(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()]


def test_one_file_is_read_by_safetensors_bit_for_bit(tmp_path):
    tensors = _tensors()
    write_model_folder(tmp_path / "m", _metas(tensors), tensors.items(), {"config.json": b"{}"})
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == ["config.json", "model.safetensors"]
    stored = load_file(tmp_path / "m" / "model.safetensors")
    assert stored.keys() == tensors.keys()
    assert all(
        torch.equal(stored[name], tensor) and stored[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    with safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_several_files_have_an_index_and_no_file_is_larger_than_asked(tmp_path):
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(7)}
    seen: list[int] = []
    write_model_folder(tmp_path / "m", _metas(tensors), tensors.items(), {}, max_shard_bytes=80, on_bytes=seen.append)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(seen) == 280
    assert sorted(set(index["weight_map"].values())) == [f"model-{n:05}-of-00004.safetensors" for n in range(1, 5)]
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / "m" / index["weight_map"][name])[name], tensor)


def test_a_tensor_larger_than_a_file_has_one_to_itself():
    metas = [TensorMeta(name, (size,), "float32") for name, size in (("a", 1), ("b", 100), ("c", 1), ("d", 1))]
    assert [[meta.name for meta in shard] for shard in split_by_size(metas, size_of, 16)] == [["a"], ["b"], ["c", "d"]]


def test_a_failed_write_leaves_nothing_and_keeps_the_model_before_it(tmp_path):
    folder = tmp_path / "m"
    tensors = {"a": torch.zeros(4)}
    write_model_folder(folder, _metas(tensors), tensors.items(), {"config.json": b"old"})

    def broken():
        yield "a", torch.zeros(4)
        raise OSError("the other disk is gone")

    metas = [*_metas(tensors), TensorMeta("b", (4,), "float32")]
    with pytest.raises(OSError, match=r"m needs .* GiB: the other disk is gone"):
        write_model_folder(folder, metas, broken(), {})
    assert (folder / "config.json").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_model_larger_than_the_disk_is_refused_before_the_first_byte(tmp_path):
    with pytest.raises(OSError, match=r"needs .* GiB: the disk has .* GiB free"):
        write_model_folder(tmp_path / "m", [TensorMeta("a", (2**50,), "float32")], [], {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_config_names_the_dtype_where_it_named_it_before(name):
    files = with_dtype({"config.json": json.dumps({name: "float32", "a": 1}).encode(), "b": b""}, "bfloat16")
    assert json.loads(files["config.json"]) == {name: "bfloat16", "a": 1}
    assert files["b"] == b""


def test_sizes_have_a_number_and_a_unit():
    sizes = {"5GB": 5 * 10**9, "500 mb": 5 * 10**8, "1.5GiB": 3 * 2**29, "7": 7}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "GB", "0", "-5GB", "5 parsecs", "infGB"):
        with pytest.raises(UserError, match="such as 5GB"):
            parse_size(text)
