"""Checkpoints become Hugging Face models with the trainer's logprobs, bit for bit, in bounded memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.integration.trainer.trainer_cases import (
    build_model,
    make_config,
    make_samples,
    run_here,
    weights,
    write_meta,
)
from transformers import AutoModelForCausalLM

from telescope.cli.main import main
from telescope.errors import RunError, UserError
from telescope.orchestrator.checkpoints import META
from telescope.orchestrator.conversion import convert, is_converted
from telescope.trainer.checkpoint_names import checkpoint_tensors
from telescope.trainer.hf_folder import new_folder
from telescope.trainer.packing import pack_step
from telescope.trainer.worker import Trainer
from telescope.weights.model_folder import MARKER, read_origin

TEXT = [1, 5, 9, 2, 60, 33, 7, 7]
SHARD_BYTES = 4_000


def train_and_save(trainer: Trainer, checkpoint: Path) -> dict[str, Any]:
    """Trains a step, so that the weights are not the model's, and saves them."""
    inputs = pack_step(
        make_samples([9, 14, 3, 20]), step=0, version=0, seq_len=32, num_ranks=1, pad_to_multiple_of=8,
        num_minibatches=1,
    )  # fmt: skip
    trainer.train_step(inputs[0])
    trainer.backend.save_checkpoint(2, checkpoint)
    trainer.backend.finish_checkpoint()
    return {"weights": weights(trainer), "logprobs": trainer.backend.sequence_logprobs(TEXT)}


def logprobs(trainer: Trainer) -> list[float]:
    return trainer.backend.sequence_logprobs(TEXT)


@pytest.fixture(scope="module", params=["tied", "qwen3", "experts"])
def trained(request, models, tmp_path_factory) -> tuple[Path, str, dict[str, Any]]:
    """A checkpoint after one step, the model that it started from, and the trainer's weights and logprobs."""
    root = tmp_path_factory.mktemp(request.param)
    model = models.get(request.param) or build_model(root / "model", family="qwen3", tied=False)
    found = run_here((train_and_save, make_config(model, model_dtype="float32"), (root / "step_2",)))
    write_meta(root / "step_2", model, run="r1")
    return root / "step_2", model, found


def test_the_model_has_the_trainer_s_logprobs_bit_for_bit(trained, tmp_path):
    checkpoint, _, found = trained
    convert(checkpoint, tmp_path / "m", max_shard_bytes=SHARD_BYTES)
    assert len(list((tmp_path / "m").glob("model-*.safetensors"))) > 2
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "float32"
    assert run_here((logprobs, make_config(str(tmp_path / "m"), model_dtype="float32"), ())) == found["logprobs"]


def test_a_cast_model_has_the_logprobs_of_the_cast_weights(trained, tmp_path):
    checkpoint, _, found = trained
    convert(checkpoint, tmp_path / "m", dtype="bfloat16")
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.dtype == torch.bfloat16
    for name, tensor in checkpoint_tensors(loaded):
        assert torch.equal(tensor, found["weights"][name].to(torch.bfloat16)), name
    logits = loaded.float()(torch.tensor([TEXT])).logits[0].detach().log_softmax(-1)
    assert [float(logits[i, token]) for i, token in enumerate(TEXT[1:])] == pytest.approx(found["logprobs"], abs=0.1)


def test_the_command_converts_all_and_skips_what_is_complete(trained, tmp_path, capsys):
    checkpoint, _, _ = trained
    command = ["convert", "--checkpoint-root", str(checkpoint.parent), "--output-root", str(tmp_path / "models")]
    assert main(command) == 0
    written = (tmp_path / "models" / "step_2" / "model.safetensors").stat().st_mtime_ns
    assert main(command) == 0
    assert "is complete: skipped" in capsys.readouterr().out
    assert (tmp_path / "models" / "step_2" / "model.safetensors").stat().st_mtime_ns == written
    assert main([*command, "--dtype", "bfloat16"]) == 2
    assert "dtype as saved instead of bfloat16" in capsys.readouterr().err


def test_a_checkpoint_that_lacks_a_file_is_damaged_and_leaves_nothing(trained, tmp_path):
    checkpoint, _, _ = trained
    copy = tmp_path / "step_2"
    copy.mkdir()
    for path in checkpoint.iterdir():
        if path.suffix != ".distcp":
            (copy / path.name).write_bytes(path.read_bytes())
    with pytest.raises(UserError, match=r"step_2 is damaged: __0_0.distcp does not exist"):
        convert(copy, tmp_path / "m")
    meta = json.loads((copy / META).read_text())
    (copy / META).write_text(json.dumps(meta | {"files": {}}))  # as earlier versions wrote it
    with pytest.raises(RunError, match=r"step_2 is damaged: .*Use another step"):
        convert(copy, tmp_path / "m")
    (copy / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(RunError, match=r"\.metadata cannot be read"):
        convert(copy, tmp_path / "m")
    (copy / ".metadata").unlink()
    with pytest.raises(UserError, match="Only checkpoints of the backends fsdp and megatron"):
        convert(copy, tmp_path / "m")
    (copy / META).unlink()
    with pytest.raises(UserError, match=f"is not a complete checkpoint: it has no {META}"):
        convert(copy, tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


def test_a_folder_with_other_content_is_not_overwritten(trained, tmp_path):
    checkpoint, _, _ = trained
    (tmp_path / "empty").mkdir()
    assert not is_converted(checkpoint, tmp_path / "empty")
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(UserError, match="exists and is not this checkpoint"):
        is_converted(checkpoint, tmp_path)


DAMAGES = {
    "a deleted file of weights": lambda weights: weights[1].unlink(),
    "a truncated file of weights": lambda weights: os.truncate(weights[0], 900),
    "one bit": lambda weights: weights[-1].write_bytes(weights[-1].read_bytes()[:-1] + b"\0"),
    "no index": lambda weights: weights[0].with_name("model.safetensors.index.json").unlink(),
    "no config": lambda weights: weights[0].with_name("config.json").unlink(),
    "a truncated config": lambda weights: weights[0].with_name("config.json").write_text('{"model_type": '),
    "an earlier version's": lambda weights: (
        weights[0]
        .with_name(MARKER)
        .write_text(
            json.dumps(
                {name: json.loads(weights[0].with_name(MARKER).read_text())[name] for name in ("checkpoint", "dtype")}
            )
        )
    ),
}


def test_a_damaged_model_is_not_complete_and_is_converted_again(trained, tmp_path):
    checkpoint, _, _ = trained
    target = tmp_path / "m"
    command = ["convert", "--checkpoint-dir", str(checkpoint), "--output-dir", str(target)]
    command += ["--max-shard-size", f"{SHARD_BYTES}B"]
    for what, damage in DAMAGES.items():
        assert main(command) == 0
        assert is_converted(checkpoint, target)
        assert str(read_origin(target)).startswith("step 2 of run r1, weights ")
        with (target / "config.json").open("a") as config:
            config.write("\n")
        assert is_converted(checkpoint, target), "a user may edit it"
        damage(sorted(target.glob("model-*.safetensors")))
        assert not is_converted(checkpoint, target), what


def test_a_linked_folder_stays_a_link_and_what_killed_conversions_left_is_removed(trained, tmp_path):
    checkpoint, _, _ = trained
    (tmp_path / "disk").mkdir()
    (tmp_path / "m").symlink_to(tmp_path / "disk" / "m")
    left, busy = (tmp_path / "disk" / f".unfinished-{name}" for name in ("step_1", "step_3"))
    left.mkdir()
    (left / "model.safetensors").touch()
    with new_folder(tmp_path / "disk" / "step_3"):
        for _ in range(2):
            convert(checkpoint, tmp_path / "m")
            assert is_converted(checkpoint, tmp_path / "m")
        assert busy.is_dir(), "another process writes it"
        with pytest.raises(RunError, match="File exists"):
            convert(checkpoint, tmp_path / "disk" / "step_3")
    assert (tmp_path / "m").is_symlink()
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["m", "step_3"]


CONVERT = """
import sys
from pathlib import Path
import transformers, telescope.trainer.model, torch.distributed.checkpoint
from telescope.orchestrator.conversion import convert
def resident(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024
convert(Path(sys.argv[4]), Path(sys.argv[2] + "-small"))  # imports what it needs
before = resident("VmRSS")
convert(Path(sys.argv[1]), Path(sys.argv[2]), max_shard_bytes=int(sys.argv[3]), dtype="bfloat16")
print(resident("VmHWM") - before)
"""


def test_memory_holds_one_file_of_a_model_of_many(models, tmp_path):
    shard = 64 << 20
    for name, size in (("step_1", 2 << 20), ("step_2", 1)):
        tensors = {f"causal_lm.layer{i}": torch.full((size,), float(i)) for i in range(24)}  # 8 MB each in step_1
        dcp.save({"model": tensors}, storage_writer=dcp.FileSystemWriter(tmp_path / name), no_dist=True)
        write_meta(tmp_path / name, models["tied"])
    arguments = [str(tmp_path / "step_1"), str(tmp_path / "m"), str(shard), str(tmp_path / "step_2")]
    command = [sys.executable, "-c", CONVERT, *arguments]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert peak < 2 * shard, f"{peak / 2**20:.0f} MiB for files of 64 MiB, of a model of 192 MiB"
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == 2
