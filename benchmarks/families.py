"""Proves families of models: trainer, engine and weight transfer against transformers.

    python benchmarks/families.py --quick                  a few families (two minutes on two CPU cores)
    python benchmarks/families.py --json families.json     all of them (some 15 s each)
    python benchmarks/families.py qwen3 mixtral            these families
    python benchmarks/families.py --tensor-parallel 2      with engines of two workers
    python benchmarks/families.py --docs                   writes docs/models.md from the stored results

Every family is a tiny model with random weights, norms and biases (`tests/families.py`), whose windows are shorter than
the samples. Five columns, each the largest difference of a logprob, in nats:

- trainer: the samples together in float64, as the trainer computes them, and each alone by transformers;
- engine: vLLM, which loaded the model's files, and the trainer, in float32 on a CPU and bfloat16 on a GPU;
- transfer: the same after every weight has changed and been sent through Telescope's loader;
- moved: by how much that change moved the trainer's logprobs, so that old weights would show;
- tensors: how many the engine holds bit for bit as sent.

A family passes when the first three are within the bounds and every tensor is as sent.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from command_line import parser_of, positive, show, write_json
from measure import REPOSITORY, provenance
from safetensors.torch import save_file
from tests.families import FAMILIES, VOCABULARY, WINDOW, Family
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from telescope.inference.vllm.launch import WORKER_EXTENSION
from telescope.inference.vllm.plugin import TRANSFER_VARIABLE
from telescope.inference.vllm.support import installed_version
from telescope.trainer.backends.fsdp.sharding import kernel_of
from telescope.trainer.capability import Execution, choose_execution
from telescope.trainer.checkpoint_names import named_tensors
from telescope.trainer.model import PREFIX, PolicyModel, auto_class, load_causal_lm
from telescope.trainer.model_input import model_input
from telescope.trainer.packing import lay_out, untrained_sample
from telescope.utils.timeline import Timeline
from telescope.weights.fingerprint import fingerprint
from telescope.weights.plan import TensorMeta, make_update, to_hex
from telescope.weights.probe import TOLERANCES, compare

STORED = REPOSITORY / "benchmarks" / "results"
RESULTS = [STORED / name for name in ("families.json", "families_gpu.json", "families_gpu_tp2.json")]
DOCS = REPOSITORY / "docs" / "models.md"
LENGTHS = (50, 23, 37, 9, 64)
TRAINER_BOUND = 1e-5
"""transformers computes norms and rotary positions in float32 whatever the model's dtype."""
ENGINE_BOUNDS = {"float32": 1e-3, "bfloat16": TOLERANCES["bfloat16"].maximum}
"""Measured in float32: 1e-6 to 1e-5 on a CPU. An error of a window or a scale by one causes 1e-2 and more."""
STEP_OF_WEIGHTS = 0.05


@dataclass
class Result:
    """What one family gave. `problem` is empty if it passed."""

    name: str
    model_type: str
    execution: str = ""
    trainer: float | None = None
    engine: float | None = None
    transfer: float | None = None
    moved: float | None = None
    tensors: int = 0
    problem: str = ""
    seconds: float = 0.0


def prove(family: Family, device: torch.device, dtype: str, num_workers: int) -> Result:
    """Compares trainer, engine and weight transfer, with an engine of `num_workers` workers. Raises what they raise."""
    result = Result(family.name, family.model_type)
    samples = make_samples()
    with tempfile.TemporaryDirectory(prefix="telescope-family-") as folder:
        config = AutoConfig.for_model(family.model_type, **family.fields)
        torch.manual_seed(5)
        model = auto_class(config).from_config(config, attn_implementation="eager").to(getattr(torch, dtype))
        disturb(model, seed=0)
        model.save_pretrained(folder)
        tokens = sum(LENGTHS) - len(LENGTHS)
        way = choose_execution(folder, WINDOW, plain_too=True)
        result.execution = "packed" if way.packs else "side by side"
        result.trainer = largest(alone(folder, samples), together(load(folder, torch.float64, way), samples))
        # All of it before the engine starts: vLLM changes classes of transformers in its process.
        policy = load(folder, getattr(torch, dtype), way).to(device)
        first_N = together(policy, samples)
        disturb(policy, seed=9)
        second_N = together(policy, samples)
        result.moved = largest(first_N, second_N)
        sent = [
            (part, value)
            for name, tensor in named_tensors(policy, PREFIX)
            for part, value in policy.checkpoint_names.parts(name, tensor.detach())
        ]
        result.tensors = len(sent)
        with Engine(folder, dtype, num_workers) as engine:
            result.engine = largest(first_N, engine.logprobs(samples))
            problem = engine.load(sent, dtype)
            result.transfer = largest(second_N, engine.logprobs(samples))
    bound = ENGINE_BOUNDS[dtype]
    assert len(first_N) == tokens
    if result.trainer > TRAINER_BOUND:
        result.problem = "the trainer differs from transformers"
    elif not result.engine <= bound:
        result.problem = "the engine differs from the trainer"
    elif problem or not result.transfer <= bound:
        result.problem = problem or "after a transfer the engine differs from the trainer"
    return result


def make_samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


@torch.no_grad()
def disturb(model: torch.nn.Module, seed: int) -> None:
    """Changes every parameter, norms and biases too."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_((torch.randn(parameter.shape, generator=generator) * STEP_OF_WEIGHTS).to(parameter))


def load(folder: str, dtype: torch.dtype, way: Execution) -> PolicyModel:
    """The trainer's model, as a rank has it."""
    causal_lm = load_causal_lm(folder, dtype, with_weights=True, attention=way.attention)
    return PolicyModel(causal_lm, VOCABULARY, packs=way.packs)


@torch.no_grad()
def alone(folder: str, samples: list[torch.Tensor]) -> torch.Tensor:
    """transformers' logprobs, a sample at a time, with its own attention."""
    options: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    kind = auto_class(AutoConfig.from_pretrained(folder))
    model: PreTrainedModel = kind.from_pretrained(folder, dtype=torch.float64, **options).eval()
    found = []
    for tokens_L in samples:
        logits_LV = model(tokens_L[None], use_cache=False).logits[0, :-1].double()
        found.append(logits_LV.log_softmax(-1).gather(1, tokens_L[1:, None])[:, 0])
    return torch.cat(found)


@torch.no_grad()
def together(policy: PolicyModel, samples: list[torch.Tensor]) -> torch.Tensor:
    """The trainer's logprobs of all samples in one micro-batch."""
    row = lay_out([untrained_sample(str(index), tokens.numpy()) for index, tokens in enumerate(samples)])
    parameter = next(policy.parameters())
    device = parameter.device
    inputs = model_input(row, device, kernel_of(policy, parameter.dtype, device))
    logprob_N, _ = policy(inputs, 1.0, Timeline(device, 0, enabled=False))
    return logprob_N.cpu()


def largest(one_N: torch.Tensor, other_N: torch.Tensor) -> float:
    return float((one_N.double() - other_N.double()).abs().max())


class Engine:
    """vLLM in this process, with Telescope's part of the weight transfer. It reads new weights from a folder."""

    def __init__(self, folder: str, dtype: str, num_workers: int) -> None:
        from vllm import LLM

        memory = {} if on_cpu() else {"kv_cache_memory_bytes": 1 << 28}
        settings: dict[str, Any] = {"dtype": dtype, **memory}
        self._llm: Any = LLM(
            model=folder, enforce_eager=True, skip_tokenizer_init=True, max_model_len=128, max_num_seqs=8,
            worker_extension_cls=WORKER_EXTENSION, weight_transfer_config={"backend": "telescope"},
            enable_prefix_caching=False, gpu_memory_utilization=0.3, tensor_parallel_size=num_workers,
            limit_mm_per_prompt=dict.fromkeys(("image", "video", "audio"), 0),
            **settings,
        )  # fmt: skip

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()
        cleanup_dist_env_and_memory()

    def logprobs(self, samples: list[torch.Tensor]) -> torch.Tensor:
        from vllm import SamplingParams

        settings = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": tokens.tolist()} for tokens in samples]
        answers = self._llm.generate(prompts, settings, use_tqdm=False)
        pairs = [
            (at, int(token))
            for answer, tokens in zip(answers, samples, strict=True)
            for at, token in zip(answer.prompt_logprobs[1:], tokens[1:], strict=True)
        ]
        return torch.tensor([at[token].logprob for at, token in pairs])

    def load(self, sent: list[tuple[str, torch.Tensor]], dtype: str) -> str:
        """Loads tensors as an update does. Returns what is not as sent."""
        metas = [TensorMeta(name, tuple(tensor.shape)) for name, tensor in sent]
        with tempfile.TemporaryDirectory(prefix="telescope-weights-") as folder:
            save_file({name: tensor.cpu().contiguous() for name, tensor in sent}, Path(folder) / "model.safetensors")
            update = make_update(metas, version=1, dtype=dtype, bucket_mb=1, folder=folder)

            def load(worker: Any) -> dict[str, Any]:
                engine = worker.weight_transfer_engine
                with torch.no_grad():
                    engine.start_weight_update()
                    engine.update_weights(update.to_dict())
                    engine.finish_weight_update()
                answer: dict[str, Any] = worker.telescope_fingerprints()
                return answer

            loaded = self._llm.collective_rpc(load)
        report = compare(sent={name: to_hex(fingerprint(tensor)) for name, tensor in sent}, loaded=loaded)
        return "" if report.ok else str(report)


def on_cpu() -> bool:
    return not torch.cuda.is_available()


def run(families: list[Family], device: torch.device, dtype: str, num_workers: int, path: Path | None) -> list[Result]:
    """Proves one family after the other, and writes the results so far to `path`. A failed one does not end it."""
    results: list[Result] = []
    for family in families:
        started = time.monotonic()
        try:
            result = prove(family, device, dtype, num_workers)
        except Exception as error:
            traceback.print_exc()
            result = Result(family.name, family.model_type, problem=f"{type(error).__name__}: {error}"[:500])
        result.seconds = round(time.monotonic() - started, 1)
        results.append(result)
        print(f"{result.name}: {result.problem or 'passed'} ({result.seconds:.0f} s)", file=sys.stderr, flush=True)
        content: dict[str, Any] = {"dtype": dtype, "device": device.type, "tensor_parallel": num_workers}
        content["results"] = [asdict(each) for each in results]
        content["measured"] = provenance(["torch", "transformers"]) | {"vllm": installed_version()}
        write_json(path, content)
    return results


def cells(each: Result) -> list[str]:
    """Returns a row of the table."""
    numbers = ("" if x is None else f"{x:.1e}" for x in (each.trainer, each.engine, each.transfer, each.moved))
    return [each.name, each.execution, *numbers, str(each.tensors), f"{each.seconds:.0f}", each.problem[:60]]


def main() -> int:
    parser = parser_of(__doc__, "the fast families only")
    parser.add_argument("names", nargs="*", help="families by name (default: all)")
    parser.add_argument("--tensor-parallel", type=positive, default=1, metavar="N", help="workers of the engine")
    parser.add_argument("--docs", action="store_true", help="write docs/models.md from the stored results, and end")
    arguments = parser.parse_args()
    if arguments.docs:
        DOCS.write_text(docs([json.loads(path.read_text()) for path in RESULTS if path.is_file()]), encoding="utf-8")
        return 0
    unknown = sorted(set(arguments.names) - {family.name for family in FAMILIES})
    if unknown:
        parser.error(f"no family {unknown[0]!r}; there are {', '.join(family.name for family in FAMILIES)}")
    chosen = [
        family
        for family in FAMILIES
        if (family.name in arguments.names if arguments.names else family.is_fast or not arguments.quick)
        and not (family.needs_gpu and on_cpu())
    ]
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0", TRANSFER_VARIABLE: "auto",
    }  # fmt: skip
    transformers_logging.disable_progress_bar()
    device = torch.device("cpu" if on_cpu() else "cuda")
    dtype = "float32" if on_cpu() else "bfloat16"
    results = run(chosen, device, dtype, arguments.tensor_parallel, arguments.json)
    titles = ("family", "samples", "trainer", "engine", "transfer", "moved", "tensors", "seconds", "problem")
    show(titles, map(cells, results), texts=2)
    return int(any(each.problem for each in results))


HEADER = """# Models

<!-- Written by `python benchmarks/families.py --docs`. Do not edit by hand. -->

Telescope trains causal language models that transformers and vLLM both know. What is in these tables has been compared
from end to end with tiny models of the family (`tests/families.py`): the trainer with transformers, packed samples with
single ones, the engine with the trainer, and the engine after a weight transfer, tensor by tensor. Numbers are the
largest differences of a logprob in nats. `make test` repeats some of them, `make test-all` all.

Every model is tried at the dry run on the machine of the run: the headers of its weight files are compared with the
architecture, and, unless it is a plain decoder, a copy with few layers is computed as the trainer would, and compared
with transformers. It is refused with the reason when no way is right. Samples share a row where only attention mixes
tokens (*packed*); otherwise, as in hybrids, each has a row of its own (*side by side*), which needs more memory and
time for samples of different lengths: `seq_len` then bounds their number times the longest. In the first steps of every
run the engine's logprobs are compared with the trainer's (`compare_first_steps`), so that no difference trains in
silence.

Not supported: rotary positions of `rope_type: dynamic`; lengths beyond `original_max_position_embeddings` with longrope
or Ministral 3's scaled queries, and beyond the window of Cohere 2, where vLLM and transformers differ; Mamba layers;
mixtures of experts that are not in the table; quantized models; encoders. Wrappers such as Gemma 3 get text only: their
towers stay as they are. To try a released model on a CPU: `telescope tiny-model --from smollm2-135m`.
"""


PLACES = {("cpu", 1): "a CPU", ("cuda", 1): "a GPU", ("cuda", 2): "two GPUs that share the engine's weights"}


def docs(tables: list[dict[str, Any]]) -> str:
    """Returns docs/models.md."""
    parts = [HEADER]
    for stored in tables:
        measured = stored["measured"]
        versions = ", ".join(f"{name} {version}" for name, version in measured["packages"].items())
        parts += [
            f"## Proven on {PLACES[stored['device'], stored.get('tensor_parallel', 1)]}, in {stored['dtype']}\n",
            f"vLLM {measured['vllm']}, {versions}, commit {measured['commit']}.\n",
            "| `model_type` | released models | samples | trainer | engine | after a transfer |",
            "|---|---|---|---|---|---|",
        ]
        reads = {family.name: family.reads for family in FAMILIES}
        for each in stored["results"]:
            if each["problem"] or each["name"] not in reads:
                continue
            numbers = " | ".join(f"{each[kind]:.0e}" for kind in ("trainer", "engine", "transfer"))
            parts.append(f"| `{each['name']}` | {reads[each['name']]} | {each['execution']} | {numbers} |")
        parts[-1] += "\n"
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
