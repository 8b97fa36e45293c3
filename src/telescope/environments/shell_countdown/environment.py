"""Countdown with expressions as commands: a shell in a sandbox computes what the model writes.

The smallest environment with a sandbox, for demos on two CPU cores and as an example.
"""

from __future__ import annotations

import re
from typing import Any

from telescope.environments.base import RewardResult, Sample
from telescope.environments.countdown.environment import CountdownEnvironment
from telescope.environments.countdown.puzzles import parse
from telescope.environments.parsers import answer_text, extract_answer_tags, strip_think_tags
from telescope.environments.sandbox_tools import SandboxEnvironment
from telescope.errors import UserError

REQUIRED_PACKAGES: list[str] = []
OPTIONAL_PACKAGES = ["datasets"]


class ShellCountdownEnvironment(SandboxEnvironment, CountdownEnvironment):
    """Countdown, scored by the output of `echo $((expression))`. `operations` are some of + - *.

    The other arguments are those of `countdown` and of `SandboxEnvironment`.
    """

    def __init__(self, operations: str = "+-*", **kwargs: Any) -> None:
        if "/" in operations:
            raise UserError("shell_countdown: operations has '/', which a shell rounds; use some of + - *.")
        super().__init__(operations=operations, **kwargs)

    def answer_that_runs(self, command: str) -> str:
        return f"<answer>$({command})</answer>"

    async def compute_reward(  # type: ignore[override]  # the base is not async
        self, completion: str, sample: Sample, eos_token: str = ""
    ) -> RewardResult:
        result = super().compute_reward(completion, sample, eos_token)
        answer = extract_answer_tags(strip_think_tags(answer_text(completion.removesuffix(eos_token))))
        output = ""
        if result.sample_metrics["format"] and sorted(parse(answer).numbers) == sorted(sample.metadata["numbers"]):
            command = f"echo $(({re.sub('[0-9]+', lambda digits: str(int(digits[0])), answer)}))"  # 010 would be octal
            handle = await self.sandboxes.acquire()
            try:
                output = (await self.sandboxes.provider.execute(handle, command, timeout=10)).stdout.strip()
            except BaseException:
                await self.sandboxes.remove(handle)
                raise
            # Numbers, operators and parentheses leave nothing behind, so that the next answer may have this sandbox.
            await self.sandboxes.release(handle, reuse=True)
        correct = output == sample.answer
        result.total_reward += self.correct_reward * (correct - result.sample_metrics["correct"])
        result.sample_metrics["correct"] = float(correct)
        if output:
            result.info_turns.append(
                {"turn_order": 0, "info_key": "output", "info_value": output, "info_type": "stdout"}
            )
        return result
