"""A tokenizer over bytes, and pools over the environments in `environments_for_tests` and `outside_folders`."""

from pathlib import Path

import pytest
import pytest_asyncio

from telescope.environments.types import EnvironmentSpec
from telescope.rollout.rendering import RendererSpec
from telescope.rollout.worker_pool.launcher import Launcher
from telescope.rollout.worker_pool.pool import EnvironmentPool

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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def launcher(tokenizer_path, tmp_path_factory):
    """One fork server for all tests: starting it takes seconds, starting a worker from it does not."""
    launcher = Launcher(RendererSpec(tokenizer_path), tmp_path_factory.mktemp("server"))
    await launcher.start(120)
    yield launcher
    await launcher.close()


@pytest_asyncio.fixture(loop_scope="session")
async def make_pool(launcher, tokenizer_path, tmp_path):
    """Start pools; all are closed at the end of the test."""
    pools = []

    async def make(*specs, num_workers=1, timeout_seconds=20.0, **options):
        specs = [EnvironmentSpec(spec) if isinstance(spec, str) else spec for spec in specs]
        pool = EnvironmentPool(
            specs,
            renderer=RendererSpec(tokenizer_path),
            num_workers=num_workers,
            timeout_seconds=timeout_seconds,
            environments_path=[ENVIRONMENTS, OUTSIDE],
            log_dir=tmp_path / f"logs-{len(pools)}",
            launcher=launcher,
            **options,
        )
        pools.append(pool)
        await pool.start()
        return pool

    yield make
    for pool in pools:
        await pool.close()
