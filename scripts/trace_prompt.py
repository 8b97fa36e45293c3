"""Prints the files that a Countdown prompt runs through, from the dataset's item to the gradient.

    python scripts/trace_prompt.py

A group of two is sampled, scored and trained in this process: the loops of a run, a rollout worker, the client and the
server's middlewares over an engine without a model, and one trainer rank. Left out is what starts, records, counts and
times a run (`ASIDE`). The actors of Ray, around the worker and the rank in a run, are added (`ACTORS`).
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[1]))  # the fakes belong to the tests

from tests.fakes.engine import FakeEngineSettings
from tests.fakes.run import FakeTrainer, fake_run
from tests.fakes.server import FakeEngineServer

from telescope.config import TelescopeConfig
from telescope.config.yaml_file import read_yaml_file
from telescope.inference.client import EngineClient
from telescope.orchestrator.supervision import Supervisor
from telescope.tiny_model.build import build_model, build_tokenizer
from telescope.tiny_model.cache import TinyModelSettings
from telescope.trainer.batch import StepInput, StepResult
from telescope.trainer.worker import Trainer

ROOT = Path(__file__).parents[1]
PACKAGE = f"{ROOT / 'src' / 'telescope'}/"
FIRST = "orchestrator/prompt_sampler.py"
ASIDE = (
    "record/", "health/", "utils/", "config/", "weights/", "orchestrator/budget.py", "orchestrator/record_rows.py",
    "orchestrator/status.py", "orchestrator/step_metrics.py", "orchestrator/step_recorder.py",
    "orchestrator/supervision.py", "rollout/sample_rows.py", "trainer/first_rollouts.py", "trainer/metrics.py",
)  # fmt: skip
"""What watches a run: it reads numbers of the prompt and changes nothing of them."""
ACTORS = {
    "rollout/worker.py": ["cluster/rollout_group.py"],
    "trainer/worker.py": ["cluster/trainer_group.py", "cluster/actors.py"],
}
"""Files that stand before others in a run, where those are in processes of their own."""


class Walk:
    """The files of the package, in the order in which functions of them are first called, from `FIRST` to `stop`."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self._is_over = False

    def start(self) -> None:
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def stop(self) -> None:
        sys.setprofile(None)
        self._is_over = True  # for other threads

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event != "call" or self._is_over or not path.startswith(PACKAGE):
            return
        file = path.removeprefix(PACKAGE)
        is_new = file not in self.files and (self.files or file == FIRST) and not file.startswith(ASIDE)
        if is_new and not _imports(frame):
            self.files |= dict.fromkeys([*ACTORS.get(file, ()), file])

    @property
    def num_changes(self) -> int:
        """How often two successive files are in different packages."""
        packages = [file.partition("/")[0] for file in self.files]
        return sum(one != other for one, other in itertools.pairwise(packages))


def _imports(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


class LocalTrainer(FakeTrainer):
    """One rank in this process."""

    def __init__(self, config: TelescopeConfig, walk: Walk) -> None:
        super().__init__()
        self.walk = walk
        self.rank = Trainer(config, 0, 1, "127.0.0.1", 0)
        self.rank.setup()

    async def train_step(self, inputs: list[StepInput]) -> StepResult:
        self.version += 1
        try:
            return self.rank.train_step(inputs[0])
        finally:
            self.walk.stop()


async def trace(folder: Path) -> Walk:
    """Trains one group, and returns the files on its way."""
    walk = Walk()
    settings = TinyModelSettings()
    tokenizer = build_tokenizer(["1 2 3 -> 4", "<answer>1+2-3</answer>"], settings.vocab_size)
    build_model(settings, tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    values = read_yaml_file(ROOT / "configs" / "examples" / "demo_countdown.yaml")[0] | {
        "model": str(folder / "model"), "evals": [], "group_size": 2, "prompts_batch_size_for_trainer": 1,
        "number_of_steps": 1, "max_async_rollout": 0, "trainer_num_workers": 1, "enable_prompt_prefetch": False,
        "discard_group_zero_advantage": False, "compile_blocks": False, "use_wandb": False,
    }  # fmt: skip
    config = TelescopeConfig.model_validate(values)
    trainer = LocalTrainer(config, walk)
    async with FakeEngineServer(FakeEngineSettings(mean_tokens=8.0, vocabulary=200)) as server:
        client = EngineClient(server.url, server.secret, 0)
        async with fake_run(config, folder / "run", [cast(Any, server)], [client], trainer=trainer) as run:
            supervisor = Supervisor()
            walk.start()
            await supervisor.run_until(run.orchestrator.run(supervisor))
        await client.close()
    return walk


def main() -> None:
    """Prints the files with their package, and both counts."""
    with tempfile.TemporaryDirectory(prefix="telescope-walk-") as folder:
        walk = asyncio.run(trace(Path(folder)))
    print("\n".join(walk.files))
    print(f"\n{len(walk.files)} files, {walk.num_changes} changes of package")


if __name__ == "__main__":
    main()
