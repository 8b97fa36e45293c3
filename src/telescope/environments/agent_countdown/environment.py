"""Countdown played by agents: small examples of `rollout`, for demos on two CPU cores.

The argument `agent` selects one.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, Literal

from telescope.environments.base import RewardResult, Sample
from telescope.environments.context import RefusedCall, RolloutContext
from telescope.environments.countdown.environment import CountdownEnvironment
from telescope.environments.countdown.puzzles import ExpressionError, parse
from telescope.environments.parsers import extract_answer_tags
from telescope.environments.sandbox_tools import SandboxEnvironment
from telescope.errors import EnvironmentFailure

REQUIRED_PACKAGES: list[str] = []
OPTIONAL_PACKAGES = ["datasets"]

NUM_ATTEMPTS = 3
"""Most answers of the compacting agent. They do not all fit a small context."""

SCRIPT = r"""
import json, os, socket, sys

numbers, target = sys.argv[1].split(" -> ")
host, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").split("/", 1)
messages = []
for _ in range(2):
    messages.append({"role": "user", "content": sys.argv[1]})
    body = json.dumps({"messages": messages})
    head = f"POST /{path}/chat/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n"
    head += f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\r\n\r\n"
    with socket.create_connection(host.split(":")) as endpoint:
        endpoint.sendall((head + body).encode())
        response = endpoint.makefile().read()
    message = json.loads(response[response.index("{"):])["choices"][0]["message"]
    messages.append(message)
    expression = message["content"].split("<answer>")[-1].split("</answer>")[0]
    if not set(expression) <= set("0123456789+-() "):
        continue
    open("computed", "w").close()
    os.system(f"echo $(({expression})) > computed")
    if open("computed").read().strip() == target:
        break
print(message["content"], end="")
"""
"""An agent in a sandbox: it computes an answer in a shell, and asks again if it misses the target.

It imports little, since each rollout starts it: `http.client` or an SDK would take longer than all the rest.
"""


class AgentCountdownEnvironment(SandboxEnvironment, CountdownEnvironment):
    """Countdown solved by an `agent`; other arguments are those of `countdown` and of sandboxes.

    - `sdk` asks through the SDK of OpenAI, once more after a wrong answer
    - `checker` has a second conversation, with a reward of its own, solve what the first one missed
    - `compacting` asks up to three times, and drops its history when the context is full
    - `sandboxed` is a program in a sandbox
    """

    def __init__(self, agent: Literal["sdk", "checker", "compacting", "sandboxed"] = "sdk", **kwargs: Any) -> None:
        super().__init__(prompt_style="short", **kwargs)
        self.agent = agent

    async def check_resources(self) -> None:
        if self.agent == "sandboxed":
            await super().check_resources()

    async def prepare_resources(self) -> None:
        if self.agent == "sandboxed":
            await super().prepare_resources()

    async def rollout(self, sample: Sample, context: RolloutContext) -> RewardResult:
        return await getattr(self, f"_{self.agent}")(sample, context)

    async def _sdk(self, sample: Sample, context: RolloutContext) -> RewardResult:
        client, messages = context.openai(), []
        while True:
            messages.append({"role": "user", "content": str(sample.prompt)})
            response = await client.chat.completions.create(model="policy", messages=messages)
            answer = response.choices[0].message.content
            result = self.compute_reward(answer, sample)
            if result.sample_metrics["correct"] or len(messages) > 1:
                return result
            messages.append({"role": "assistant", "content": answer})

    async def _checker(self, sample: Sample, context: RolloutContext) -> RewardResult:
        answer = await context.generate([{"role": "user", "content": sample.prompt}])
        result = self.compute_reward(answer.text, sample)
        numbers = sample.metadata["numbers"][::-1]
        with contextlib.suppress(ExpressionError):  # the checker sees the numbers in the solver's order
            used = parse(extract_answer_tags(answer.text)).numbers
            numbers = used if sorted(used) == sorted(numbers) else numbers
        with context.chat("checker") as checker:
            question = self.question(numbers, sample.metadata["target"])
            checked = await checker.generate([{"role": "user", "content": question}])
            checker.reward = self.compute_reward(checked.text, sample).total_reward
        context.metric("checker_correct", checker.reward)
        return result

    async def _compacting(self, sample: Sample, context: RolloutContext) -> RewardResult:
        messages = [{"role": "user", "content": sample.prompt}]
        for attempt in itertools.count(1):
            try:
                answer = await context.generate(messages)
            except RefusedCall:  # the context is full
                messages = await context.compact(messages, keep=0, by="drop")
                answer = await context.generate(messages)
            result = self.compute_reward(answer.text, sample)
            if result.sample_metrics["correct"] or attempt == NUM_ATTEMPTS:
                break
            messages += [answer.message, {"role": "user", "content": sample.prompt}]
        return result

    async def _sandboxed(self, sample: Sample, context: RolloutContext) -> RewardResult:
        sandbox = await context.sandbox()
        await sandbox.write("agent.py", SCRIPT)
        ended = await sandbox.run(
            f"python3 -I -S agent.py '{sample.prompt}'", env=context.env(), timeout=context.seconds_left
        )
        if ended.exit_code:
            raise EnvironmentFailure(f"the agent failed: {ended.stderr[-500:]}")
        return self.compute_reward(ended.stdout, sample)
