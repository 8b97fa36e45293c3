"""An environment that echoes its input and its process id."""

import os
import signal

from telescope.environments.base import RewardResult, Sample, SingleTurnEnvironment


class Echo(SingleTurnEnvironment):
    reward_min, reward_max = 0.0, 1.0

    def __init__(self, asynchronous=False, hold_at=-1, kill_parent_at=-1, **kwargs):
        super().__init__(**kwargs)
        self.asynchronous = asynchronous
        self.hold_at = hold_at
        self.kill_parent_at = kill_parent_at

    def get_sample(self, index):
        if index == self.hold_at:
            return 95**97**99  # blocks the interpreter forever
        if index == self.kill_parent_at:
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
        return super().get_sample(index)

    def load_dataset(self, num_samples=-1, random_order=False):
        count = 1000 if num_samples < 0 else num_samples
        salt = os.urandom(4).hex() if random_order else ""
        return [Sample(f"question {i} {salt}", answer=str(i)) for i in range(count)]

    def compute_reward(self, completion, sample, eos_token=""):
        result = RewardResult(
            total_reward=float(completion == sample.answer),
            sample_metrics={"length": len(completion), "pid": os.getpid()},
            golden_answers={"answer": sample.answer, "none": None},
            info_turns=[{"said": completion}],
            sample_tags={"eos": eos_token},
        )
        return self.later(result) if self.asynchronous else result

    async def later(self, result):
        return result
