"""Tasks for a terminal: the model works in a sandbox with the tool `shell` until it is done, then tests run there.

Tasks are folders in harbor's format (`tasks`), or the twenty that ship with Telescope. The tests are uploaded after the
last answer. `tests/test.sh` writes a reward to `/logs/verifier/reward.txt` or `reward.json`. If it names neither, exit
code 0 means a reward of 1.
"""

from __future__ import annotations

import base64
import contextlib
import json
import random
import shlex
from pathlib import PurePosixPath
from typing import Any

from telescope.environments.base import GOLD, RewardResult, RolloutState, Sample, shares
from telescope.environments.sandbox_tools import SandboxTools
from telescope.environments.terminal_tasks.tasks import Files, Task, own_tasks, read_tasks
from telescope.environments.tool_env import ToolEnvironment, ToolResult
from telescope.errors import UserError
from telescope.sandbox import ExecResult, SandboxCommandTimeoutError, SandboxError, SandboxHandle

REQUIRED_PACKAGES: list[str] = []

SYSTEM_PROMPT = (
    "You work in a Linux machine through a shell. Look around before you change anything, and check your work. When "
    "the task is done, say so without calling the tool."
)
SETUP_SECONDS = 300.0
REWARD_FILES = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"


class TerminalTasksEnvironment(SandboxTools, ToolEnvironment):
    """Tasks that are solved by commands. The task's tests give the reward, usually 0 or 1.

    `tasks` is a folder of tasks (null: our own), `difficulty` selects among them. The model has the tool `shell` for
    `max_turns` answers. The arguments of `SandboxEnvironment` choose the sandbox.
    """

    reward_min, reward_max = 0.0, 1.0
    metrics_ranges = shares("solved", "tests_timed_out", "tool_success_rate")

    def __init__(self, system_prompt: str | None = SYSTEM_PROMPT, max_turns: int = 20, **kwargs: Any) -> None:
        super().__init__(system_prompt=system_prompt, max_turns=max_turns, tools=["shell"], **kwargs)
        # Tasks write to /app, /tests, /logs: the image of a container must be writable.
        self.sandbox_config.extra = {"read_only": False} | self.sandbox_config.extra
        self._tasks: dict[str, Task] = {}

    def load_dataset(
        self,
        num_samples: int = -1,
        tasks: str | None = None,
        difficulty: str | None = None,
        seed: int | None = None,
        **_: Any,
    ) -> list[Sample]:
        """Returns the tasks as samples, shuffled by `seed` if given. Raises `UserError` if there are none."""
        found = own_tasks() if tasks is None else read_tasks(tasks)
        chosen = [task for task in found if difficulty in (None, task.difficulty)]
        if not chosen:
            known = ", ".join(sorted({task.difficulty for task in found}))
            raise UserError(f"{self.name}: no task has difficulty {difficulty!r}; there are: {known}.")
        if seed is not None:
            random.Random(f"terminal_tasks {seed}").shuffle(chosen)
        self._tasks = {task.name: task for task in chosen}
        samples = [
            Sample(task.instruction, metadata={"task": task.name, "difficulty": task.difficulty}) for task in chosen
        ]
        return samples if num_samples < 0 else samples[:num_samples]

    def solution(self, sample: Sample) -> list[str]:
        files = self._tasks[sample.metadata["task"]].solution
        written = "".join(
            f"mkdir -p {shlex.quote(str(PurePosixPath(path).parent))}; echo {base64.b64encode(content).decode()} | "
            f"base64 -d > {shlex.quote(path)}; "
            for path, content in files.items()
        )
        return [self.answer_that_runs(f"{written}bash /solution/solve.sh"), "It is done."] if files else []

    def cheats(self, sample: Sample) -> dict[str, str]:
        files = self._tasks[sample.metadata["task"]].solution
        return super().cheats(sample) | {GOLD: b"\n".join(files.values()).decode("utf-8", "replace")}

    def task_of(self, state: RolloutState) -> Task:
        """Returns a rollout's task."""
        return self._tasks[state.sample.metadata["task"]]

    async def prepare_resources(self) -> None:
        """Starts the pool, with the tasks' image if the provider has images."""
        len(self)  # loads the tasks
        images = {task.image for task in self._tasks.values()}
        if self.provider not in (None, "local") and not self.sandbox_config.image:
            if len(images) > 1:
                raise UserError(f"{self.name}: the tasks have several images ({sorted(images)}); set docker_image.")
            self.sandbox_config.image = images.pop()
        await super().prepare_resources()

    async def set_up_sandbox(self, handle: SandboxHandle, state: RolloutState) -> None:
        task = self.task_of(state)
        await self.sandboxes.provider.execute(handle, f"mkdir -p {shlex.quote(task.working_dir)}", working_dir="/")
        for step in task.set_up:
            if isinstance(step, dict):
                await self.upload(handle, step)
                continue
            done = await self.run_in(handle, task, step, SETUP_SECONDS)
            if done.exit_code:
                raise SandboxError(
                    f"the task {task.name!r} cannot be set up: {step[-200:]!r} ended with exit code {done.exit_code}: "
                    f"{(done.stderr or done.stdout)[-500:]}"
                )

    def working_dir_of(self, state: RolloutState) -> str:
        return self.task_of(state).working_dir

    async def shell(self, command: str, state: RolloutState) -> ToolResult:
        return await super().shell(self.task_of(state).exports + command, state)

    async def upload(self, handle: SandboxHandle, files: Files) -> None:
        """Writes files into a sandbox."""
        for path, content in files.items():
            await self.sandboxes.provider.upload_bytes(handle, path, content)

    async def run_in(self, handle: SandboxHandle, task: Task, command: str, seconds: float) -> ExecResult:
        """Runs a command in the task's folder."""
        wrapped = f"bash -c {shlex.quote(task.exports + command)}"
        return await self.sandboxes.provider.execute(handle, wrapped, timeout=seconds, working_dir=task.working_dir)

    async def compute_reward(self, state: RolloutState, eos_token: str = "") -> RewardResult:
        task, handle = self.task_of(state), await self.sandbox_of(state)
        folder = PurePosixPath(REWARD_FILES[0]).parent
        # Files that the model created there and protected from removal must not replace the tests.
        clean = f"chmod -R u+rwX /tests {folder}; chmod u+rwx / /logs; rm -rf /tests {folder} && mkdir -p {folder}"
        tests = b"".join(task.tests.values())
        named = [file for file in REWARD_FILES if PurePosixPath(file).name.encode() in tests]
        timed_out, reward = False, 0.0
        try:
            done = await self.run_in(handle, task, clean, SETUP_SECONDS)
            if done.exit_code == 0:
                await self.upload(handle, task.tests)
                run = f"{task.verifier_exports}bash /tests/test.sh"
                done = await self.run_in(handle, task, run, task.verifier_seconds)
                reward = float(done.exit_code == 0)
                if named:  # then the exit code is not the verdict
                    written = await self.run_in(handle, task, " || ".join(map("cat {}".format, named)), SETUP_SECONDS)
                    reward = _read_reward(written.stdout)
            output = f"exit code {done.exit_code}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        except SandboxCommandTimeoutError as error:  # something that the model left there is slow or hangs
            timed_out, output = True, str(error)
        return RewardResult(
            total_reward=reward,
            sample_metrics={
                "solved": float(reward >= 1),
                "tests_timed_out": float(timed_out),
                "num_turns": float(state.num_turns),
                **self.get_tool_metrics(state),
            },
            info_turns=[{"turn_order": 0, "info_key": "tests", "info_value": output, "info_type": "text"}],
            sample_tags={"task": task.name, "difficulty": task.difficulty},
        )


def _read_reward(text: str) -> float:
    """Returns the reward in a number, or in harbor's JSON object: `reward`, or else the mean. 0 if there is none."""
    with contextlib.suppress(ValueError, TypeError, AttributeError, ZeroDivisionError):
        if not text.lstrip().startswith("{"):
            return min(1.0, max(0.0, float(text)))  # NaN becomes 0
        rewards: dict[str, float] = json.loads(text)
        return min(1.0, max(0.0, float(rewards.get("reward", sum(rewards.values()) / len(rewards)))))
    return 0.0
