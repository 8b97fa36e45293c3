"""A real vLLM server for the tests of this folder and of `tests/gpu`, and a plain transformers model as the trainer."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from tests.integration.trainer.trainer_cases import reserved_ports
from transformers import (
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import telescope
from telescope.config import load_config
from telescope.config.machine import visible_gpu_memory
from telescope.inference.base import Address
from telescope.inference.client import EngineClient
from telescope.inference.process import EngineProcess
from telescope.inference.vllm.launch import WORKER_EXTENSION, launch_command
from telescope.orchestrator.eval_run import load_folder
from telescope.tiny_model.build import build_tokenizer
from telescope.trainer.checkpoint_names import checkpoint_tensors
from telescope.weights.communicator import backend_for
from telescope.weights.model_folder import folder_metas, weight_files
from telescope.weights.plan import SendReport, TensorMeta, UpdateInfo, make_update
from telescope.weights.probe import ProbeReport, compare
from telescope.weights.sender import WeightSender

START_SECONDS = 300.0
LOG_LINES = 40
KV_CACHE_BYTES = 1 << 31
"""On a GPU. vLLM would measure what is free, and take for its own what other tests there take meanwhile."""
OTHER_INTERPRETER = "TELESCOPE_TEST_VLLM_PYTHON"
"""Environment variable: a Python that has another vLLM, to run these tests against that one."""

FAULTY_EXTENSION = "faulty_extension.FaultyWorkerExtension"
UNPACKED_VARIABLE = "TELESCOPE_TEST_UNPACKED"
"""Read by the extension in the worker (see there)."""
PROBE_TOKENS = [(7 * i + 3) % 290 for i in range(48)]


def make_model(
    folder: Path,
    *,
    tied: bool,
    num_heads: int = 4,
    architecture: str = "qwen2",
    head_dim: int = 32,
    expert_size: int = 96,
    hidden_size: int = 128,
) -> PreTrainedModel:
    """A small random model with grouped heads, weights that are not symmetric anywhere, and a vocabulary that vLLM has
    to pad: a Qwen2 (with biases), Qwen3 or Qwen3-MoE.

    The Qwen3-MoE has experts in its first layer and none in its second. Kernels of GPUs want heads of 64 numbers or
    more: `num_heads` times that as `hidden_size`, or `head_dim` (of a Qwen3). The CPU's kernel for experts pads an
    `expert_size` that leaves a rank no multiple of 32.
    """
    tokenizer = build_tokenizer(["item 1 2 3", "12 7 3 -> 22"] * 4, 384)
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": hidden_size, "intermediate_size": 176, "num_hidden_layers": 2,
        "num_attention_heads": num_heads, "num_key_value_heads": num_heads // 2, "max_position_embeddings": 512,
        "tie_word_embeddings": tied, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    if architecture != "qwen2":
        common["head_dim"] = head_dim
    if architecture == "qwen3_moe":
        common |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": expert_size}
        common |= {"norm_topk_prob": True, "mlp_only_layers": [1]}
    kinds: dict[str, tuple[Any, Any]] = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    }
    config, kind = kinds[architecture]
    torch.manual_seed(5)
    model = kind(config(**common)).float().eval()
    disturb(model, seed=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def names_of(model: PreTrainedModel) -> list[str]:
    """The names of what a trainer sends of `model`."""
    return [name for name, _ in checkpoint_tensors(model)]


def python_path(*folders: Path) -> str:
    """These folders before those that are searched already."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def visible_gpus() -> list[str]:
    """The names of the GPUs that torch counts here, for another process."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


def version_of(interpreter: str) -> str:
    """The vLLM version that an interpreter would run."""
    code = "from telescope.inference.vllm.support import installed_version; print(installed_version())"
    environment = os.environ | {"PYTHONPATH": python_path(Path(telescope.__file__).parents[1])}
    return subprocess.check_output([interpreter, "-c", code], text=True, env=environment).strip()


@torch.no_grad()
def disturb(model: PreTrainedModel, seed: int, scale: float = 0.05) -> None:
    """Change every parameter, as a (very large) optimizer step would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter += (torch.randn(parameter.shape, generator=generator) * scale).to(parameter.device)


@torch.no_grad()
def model_logprobs(model: PreTrainedModel, token_ids: list[int]) -> list[float]:
    """Logprobs of tokens 1 .. L-1, float32."""
    tokens_L = torch.tensor(token_ids, device=model.device)
    logits_LV = model(tokens_L[None]).logits[0, :-1].float()
    return logits_LV.log_softmax(-1).gather(1, tokens_L[1:, None])[:, 0].tolist()


def distance(left: list[float], right: list[float]) -> float:
    """The largest difference of two lists of logprobs, in nats."""
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def in_background(update: UpdateInfo) -> UpdateInfo:
    return replace(update, background=True)


@dataclass
class Sync:
    """What one sync gave: the sender's report, the engine's pause in seconds, and the probe's verdict."""

    report: SendReport
    pause_seconds: float
    probe: ProbeReport
    failure: str | None = None


@dataclass
class Server:
    """A vLLM server, the trainer that sends to it, and one event loop for the client."""

    model: PreTrainedModel
    folder: Path
    dtype: str = "float32"
    version: int = 0
    vllm_version: str = ""
    tensor_parallel: int = 1
    """Workers of the server."""
    unpacked: bool = False
    """Linear layers keep their plain weights, so that they can be received in the background, as on a GPU."""
    background: bool = False
    """Whether the worker reported that it receives weights in the background."""
    gpu: int | None = None
    """The (last) GPU of the server; None: the CPU. The model stays on its own device."""
    staged: bool = False
    """Weights travel through host memory, so that both may be on one GPU."""
    router_replay: bool = False
    """Its answers have routed experts."""
    modes: list[dict[str, Any]] = field(init=False)
    """How each worker reported to receive its weights."""
    sender: WeightSender = field(init=False)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def __post_init__(self) -> None:
        self.sender = WeightSender(device=self.model.device, cpu_staging=self.staged)

    def start(self, port: int) -> None:
        on_cpu = self.gpu is None
        overrides = [
            *("--model", str(self.folder), "--max_model_len", "256", "--max_num_seqs", "8", "--max_tokens", "64"),
            *("--inference_dtype", self.dtype, "--environments", "[{name: countdown}]"),
            *("--inference_tensor_parallel_size", str(self.tensor_parallel)),
            *("--inference_num_workers", str(self.tensor_parallel)),
            *("--router_replay", str(self.router_replay).lower()),
            *(("--device", "cpu") if on_cpu else ("--device", "cuda")),
            *(("--inference_kv_cache_gib", "1") if on_cpu else ("--gpu_memory_utilization", "0.2")),
        ]
        config = load_config(None, overrides).config
        interpreter = os.environ.get(OTHER_INTERPRETER, sys.executable)
        version = self.vllm_version = version_of(interpreter)
        command = launch_command(
            config, Address(0, "127.0.0.1", port, "s" * 32), model=str(self.folder), directory=self.folder,
            vllm_version=version, on_cpu=on_cpu, gpu_memory_bytes=None if on_cpu else min(visible_gpu_memory()),
            kv_cache_bytes=None if on_cpu else KV_CACHE_BYTES,
        )  # fmt: skip
        arguments = [FAULTY_EXTENSION if a == WORKER_EXTENSION else a for a in command.arguments]
        arguments[0] = interpreter
        folders = [Path(__file__).parent, Path(telescope.__file__).parents[1]]
        environment = command.environment | {"PYTHONPATH": python_path(*folders), "OMP_NUM_THREADS": "1"}
        if not on_cpu:
            first = (self.gpu or 0) - self.tensor_parallel + 1
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus()[first : first + self.tensor_parallel])
        environment[UNPACKED_VARIABLE] = "1" if self.unpacked else "0"
        self.process = EngineProcess(arguments, environment, self.folder / "server.log")
        self.client = EngineClient(f"http://127.0.0.1:{port}", "s" * 32, 0, num_workers=self.tensor_parallel)
        deadline = time.monotonic() + START_SECONDS
        while not self.run(self.client.health()):
            assert self.process.poll() is None, "\n".join(self.process.log_tail(60))
            assert time.monotonic() < deadline, "\n".join(self.process.log_tail(60))
            time.sleep(0.3)

    def stop(self) -> None:
        self.sender.close()
        self.run(self.client.close())
        self.loop.close()
        self.process.terminate(10)

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def connect(self) -> None:
        backend = backend_for(torch.device("cpu" if self.gpu is None else "cuda"), cpu_staging=self.staged)
        info = self.sender.listen(
            0, num_workers=self.tensor_parallel, host="127.0.0.1", backend=backend, timeout_seconds=60
        )

        async def both() -> None:
            await asyncio.gather(asyncio.to_thread(self.sender.connect, 0), self.client.init_weight_transfer(info))

        self.run(both())
        self.modes = self.run(self.client.call_worker("telescope_transfer_mode"))
        self.background = all(mode["background"] for mode in self.modes)

    def fault(self, kind: str, name: str = "", rank: int | None = None) -> None:
        """Corrupts the next update in the worker of that rank; None: in all of them."""
        self.run(self.client.call_worker("telescope_test_fault", [kind, name, rank]))

    def corrupted_sync(self, fault: str, name: str, rank: int | None = None) -> ProbeReport:
        """Returns the probe's report of a sync with that fault, after a correct one.

        Every parameter changes by 1e-6, as at such a learning rate: only fingerprints can detect the fault.
        """
        self.remember()
        self.verified_sync()
        disturb(self.model, seed=self.version + 1, scale=1e-6)
        self.fault(fault, name, rank)
        return self.sync().probe

    def remember(self) -> None:
        self.run(self.client.call_worker("telescope_test_remember"))

    def next_update(self, *, mode: str = "flattened_bucket", bucket_mb: int = 8) -> UpdateInfo:
        self.version += 1
        metas = [TensorMeta(name, tuple(t.shape)) for name, t in checkpoint_tensors(self.model)]
        return make_update(
            metas,
            version=self.version,
            dtype=self.dtype,
            mode=mode,  # type: ignore[arg-type]
            bucket_mb=bucket_mb,
            timeout_seconds=60.0,
        )

    def sync(self, *, mode: str = "flattened_bucket", bucket_mb: int = 8) -> Sync:
        """One whole sync of the model's parameters, and the probe."""
        update = self.next_update(mode=mode, bucket_mb=bucket_mb)
        if self.background:
            report = self.receive(update, checkpoint_tensors(self.model))
            assert report.errors == {}
            pause_seconds = self.run(self.swap(update))
            return Sync(report, pause_seconds, self.probe(report))
        report, pause_seconds = self.run(self.in_place(update))
        return Sync(report, pause_seconds, self.probe(report))

    def verified_sync(self) -> None:
        """A whole sync that the probe must find right."""
        probe = self.sync().probe
        assert probe.ok, str(probe)

    def load_folder(self, folder: Path) -> None:
        """Saves the model in several files, which the engine loads itself, verified."""
        self.model.save_pretrained(folder, max_shard_size="200KB")
        assert len(weight_files(folder)) > 1
        self.version += 1
        update = make_update(
            folder_metas(folder), version=self.version, dtype=self.dtype, bucket_mb=8, timeout_seconds=60.0,
            folder=str(folder),
        )  # fmt: skip
        self.run(load_folder(self.client, update))

    async def in_place(self, update: UpdateInfo, *, drop_caches: bool = False) -> tuple[SendReport, float]:
        """A sync inside one pause. Returns the report and the seconds of the pause."""
        paused = time.monotonic()
        await self.client.pause(drop_caches=drop_caches)
        await self.client.start_update()
        send = asyncio.to_thread(self.sender.send, checkpoint_tensors(self.model), update, [0], fingerprints=True)
        report, _ = await asyncio.gather(send, self.client.update_weights(update))
        await self.client.finish_update(update.version)
        await self.client.resume()
        assert report.errors == {}
        return report, time.monotonic() - paused

    def receive(self, update: UpdateInfo, weights: Iterator[tuple[str, torch.Tensor]]) -> SendReport:
        """Send an update that the worker receives in the background, to its end. No weight has changed after it."""

        async def go() -> SendReport:
            send = asyncio.to_thread(self.sender.send, weights, update, [0], fingerprints=True)
            begin = self.client.begin_background(in_background(update))
            report, _ = await asyncio.gather(send, begin)
            return report

        return self.run(go())

    async def swap(self, update: UpdateInfo) -> float:
        """Make a received update the engine's weights. Returns the seconds of its pause."""
        await self.client.start_update()
        await self.client.update_weights(in_background(update))
        paused = time.monotonic()
        await self.client.pause()
        await self.client.finish_update(update.version)
        await self.client.resume()
        return time.monotonic() - paused

    def probe(self, report: SendReport) -> ProbeReport:
        return compare(
            sent=report.fingerprints, loaded=self.run(self.client.fingerprints()),
            trainer_logprobs=model_logprobs(self.model, PROBE_TOKENS),
            engine_logprobs=self.run(self.client.prompt_logprobs(PROBE_TOKENS)), precisions=[self.dtype],
        )  # fmt: skip

    def logprobs(self) -> list[float]:
        """The engine's logprobs of the probe's text."""
        return self.run(self.client.prompt_logprobs(PROBE_TOKENS))

    def has(self, logprobs: list[float]) -> bool:
        """Whether the engine computes these. On a GPU its attention multiplies in TF32."""
        return distance(self.logprobs(), logprobs) < (1e-4 if self.gpu is None else 2e-2)

    def has_the_models_weights(self) -> bool:
        return self.has(model_logprobs(self.model, PROBE_TOKENS))

    def check_new_weights(self, mode: str, bucket_mb: int) -> Sync:
        """After a sync of changed weights the engine computes with them."""
        before = self.logprobs()
        disturb(self.model, seed=self.version + 1)
        done = self.sync(mode=mode, bucket_mb=bucket_mb)
        assert done.probe.ok, str(done.probe)
        assert done.probe.num_tensors == len(names_of(self.model))
        assert self.has_the_models_weights()
        assert distance(self.logprobs(), before) > 0.1
        return done

    def check_corrupted(self, fault: str, name: str, rank: int | None = None) -> None:
        """The probe names the wrong tensors of a sync with a fault, and the next sync repairs it."""
        corrupted = self.corrupted_sync(fault, name, rank)
        assert not corrupted.ok
        other = name.replace("q_proj", "k_proj").replace("gate_proj", "up_proj").replace(".0.down_proj", ".1.down_proj")
        wrong = {"nothing": names_of(self.model), "no swap": names_of(self.model), "swapped": [name, other]}
        assert set(corrupted.mismatched) == set(wrong.get(fault, [name]))
        self.verified_sync()

    def break_off(self) -> None:
        """Begin a sync and give it up half way: the sender is aborted while the engine waits for a bucket."""
        failure, _ = self._corrupted_half_way(lambda: self.sender.abort(0, "half way, on purpose"))
        if failure is not None:
            raise failure

    def killed_in_a_sync(self) -> tuple[BaseException | None, SendReport]:
        """Begin a sync and kill all of the server's processes half way. Returns the client's error and the report."""
        return self._corrupted_half_way(self.process.kill)

    def worker_killed_in_a_sync(self) -> tuple[BaseException | None, SendReport]:
        """The same with the process of the last worker alone."""
        pid = self.run(self.client.call_worker("telescope_test_pid"))[-1]["pid"]
        return self._corrupted_half_way(lambda: os.kill(pid, signal.SIGKILL))

    def core_killed_in_a_sync(self, once_paused: Callable[[], object]) -> tuple[BaseException | None, SendReport]:
        """The same with the process that runs the engine's steps, whose workers it may have with it. `once_paused` is
        called in the loop when the server has paused."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        (core,) = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
        return self._corrupted_half_way(core.kill, once_paused)

    def _corrupted_half_way(
        self, corrupt: Callable[[], object], once_paused: Callable[[], object] = lambda: None
    ) -> tuple[BaseException | None, SendReport]:
        update = self.next_update(mode="per_tensor")

        def half() -> Iterator[tuple[str, torch.Tensor]]:
            for index, item in enumerate(checkpoint_tensors(self.model)):
                if index == 7:
                    corrupt()
                yield item

        async def go() -> tuple[BaseException | None, SendReport]:
            await self.client.pause()
            once_paused()
            await self.client.start_update()
            send = asyncio.to_thread(self.sender.send, half(), update, [0])
            failure, report = await asyncio.gather(self.client.update_weights(update), send, return_exceptions=True)
            assert isinstance(report, SendReport)
            return failure, report

        return self.run(go())


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """The server, started and connected; stopped at the end. Its last words are for the report of a test that fails."""
    with reserved_ports(1) as (port,):
        server.start(port)
    try:
        server.connect()
        yield server
    finally:
        print("The end of the log of the vLLM server:", *server.process.log_tail(LOG_LINES), sep="\n")
        server.stop()
