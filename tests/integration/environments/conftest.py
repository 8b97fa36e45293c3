"""A tokenizer over bytes, and the environments in `environments_for_tests` and `outside_folders`."""

from pathlib import Path

import pytest
import pytest_asyncio
from tests.fakes.play import Player

from telescope.environments.types import EnvironmentInfo, EnvironmentSpec
from telescope.rollout.loaded_environment import LoadedEnvironment
from telescope.rollout.rendering import Renderer, RendererSpec

ENVIRONMENTS = Path(__file__).parent / "environments_for_tests"
OUTSIDE = Path(__file__).parent / "outside_folders"
"""Folders as users of the published interface write them."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)


def save_byte_tokenizer(folder: Path, *, chat_template: str | None = CHATML, bos: bool = False) -> Path:
    """A tokenizer whose vocabulary is the bytes and some special tokens; with `bos`, it opens texts with `<s>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|im_end|>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory) -> str:
    return str(save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_path)


@pytest.fixture
def encode(tokenizer):
    """Token ids of a completion that ends with the end token."""
    return lambda text: [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


class Loaded(Player):
    """A player of environments, and their descriptions by key."""

    infos: dict[str, EnvironmentInfo]

    async def describe(self, key):
        return self.infos[key]

    def __getattr__(self, name):
        return getattr(self.environments, name)


@pytest_asyncio.fixture(loop_scope="session")
async def load(tokenizer_path):
    """Loads environments; all are closed at the end of the test."""
    loaded = []

    async def make(*specs, timeout_seconds=20.0):
        specs = [EnvironmentSpec(spec) if isinstance(spec, str) else spec for spec in specs]
        renderer = Renderer(RendererSpec(tokenizer_path))
        environments = [LoadedEnvironment(spec, renderer, [str(ENVIRONMENTS), str(OUTSIDE)]) for spec in specs]
        infos = {each.spec.identity: each.describe() for each in environments}
        loaded.append(Loaded(environments, timeout_seconds=timeout_seconds))
        for each in environments:
            await each.prepare_own_resources()
        loaded[-1].infos = infos
        return loaded[-1]

    yield make
    for one in loaded:
        await one.close()
