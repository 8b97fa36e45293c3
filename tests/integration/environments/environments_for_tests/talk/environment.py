"""A conversation in which each answer names the environment's next action."""

import asyncio
import ctypes
import os
import time

from telescope.environments.base import MultiTurnEnvironment, RewardResult, RolloutState, Sample
from telescope.errors import InfrastructureError


class Talk(MultiTurnEnvironment):
    reward_min, reward_max = 0.0, 1.0

    def __init__(self, asynchronous=False, diary=None, **kwargs):
        super().__init__(**kwargs)
        self.diary = diary
        self.asynchronous = asynchronous
        self.resources = 0
        self.ended = []
        """Items of the rollouts for which `end_rollout` was called."""

    def load_dataset(self, num_samples=-1):
        return [Sample(f"item {i}", answer=str(i)) for i in range(50)]

    def create_initial_state(self, sample):
        state = RolloutState(sample, self.name, custom={"heard": []})
        return self.later(state) if self.asynchronous else state

    def env_response(self, messages, state):
        content = messages[-1]["content"]
        state.custom["heard"].append(content)
        action, _, argument = content.partition(" ")
        return getattr(self, f"do_{action}", self.echo)(state, argument)

    def is_done(self, state):
        heard = state.custom["heard"]
        if heard and heard[-1] == "enough":
            verdict = True, "had enough"
        elif state.trajectory[-1].text == "stop at once":
            verdict = True, "requested"
        else:
            verdict = super().is_done(state)
        return self.later(verdict) if self.asynchronous else verdict

    def compute_reward(self, state, eos_token=""):
        step = state.trajectory[-1]
        result = RewardResult(
            total_reward=float(len(state.trajectory)),
            sample_metrics={
                "pid": os.getpid(),
                "prompt_tokens": len(step.prompt_token_ids),
                "completion_tokens": len(step.completion_token_ids),
                "logprobs": sum(step.completion_logprobs),
                "truncated": step.is_truncated,
                "ended": len(self.ended),
            },
            golden_answers={"answer": state.sample.answer},
            info_turns=[{"heard": state.custom["heard"]}, {"item": state.sample.answer}],
            sample_tags={"eos": eos_token, "reason": str(state.stop_reason)},
        )
        return self.later(result) if self.asynchronous else result

    def end_rollout(self, state):
        self.ended.append(state.sample.answer)
        if self.diary is not None:
            with open(self.diary, "a", encoding="utf-8") as file:
                file.write(f"{state.sample.answer}\n")
        return self.later(None) if self.asynchronous else None

    async def later(self, result):
        await asyncio.sleep(0.001)
        return result

    def echo(self, state, argument):
        reply = [{"role": "user", "content": f"{state.sample.answer}: {', '.join(state.custom['heard'])}"}]
        return self.later(reply) if self.asynchronous else reply

    def do_run(self, state, argument):
        asyncio.run(asyncio.sleep(0.001))  # raises when a loop is running
        return self.echo(state, argument)

    async def do_wait(self, state, argument):
        await asyncio.sleep(float(argument))
        return await self.later([{"role": "user", "content": "waited"}])

    def do_sleep(self, state, argument):
        time.sleep(float(argument))
        return [{"role": "user", "content": "slept"}]

    def do_raise(self, state, argument):
        raise ValueError("no luck")

    def do_lose(self, state, argument):
        raise InfrastructureError("the sandbox is gone")

    def do_crash(self, state, argument):
        ctypes.string_at(0)

    def do_exit(self, state, argument):
        os._exit(7)

    def do_malformed(self, state, argument):
        return ["not a message"]

    def do_count(self, state, argument):
        return [{"role": "user", "content": f"ended {' '.join(self.ended)}"}]
