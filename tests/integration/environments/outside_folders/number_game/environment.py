"""Guess a number. The last of the guesses counts as much as the first."""

import random

from telescope.environments import MultiTurnEnvironment, RewardResult, Sample


class NumberGame(MultiTurnEnvironment):
    reward_min, reward_max = 0.0, 1.0

    def __init__(self, max_turns=3, system_prompt=None, **kwargs):
        super().__init__(max_turns=max_turns, system_prompt=system_prompt, **kwargs)

    def load_dataset(self, num_samples=-1, seed=0, **kwargs):
        rng = random.Random(seed)
        self._samples = [Sample(prompt="Guess a number from 1 to 9.", answer=str(rng.randint(1, 9))) for _ in range(20)]
        if num_samples > 0:
            self._samples = self._samples[:num_samples]
        return self._samples

    def create_initial_state(self, sample):
        state = super().create_initial_state(sample)
        state.custom["won"] = False
        return state

    async def env_response(self, messages, state):
        guess = state.trajectory[-1].completion[0]["content"].strip()
        state.guesses = [*getattr(state, "guesses", []), guess]
        if guess == state.sample.answer:
            state.custom["won"] = True
            return []
        return [{"role": "user", "content": "No. Guess again.", "turn_type": "feedback"}]

    def is_done(self, state):
        if state.custom["won"]:
            return True, "won"
        return super().is_done(state)

    def compute_reward(self, state, eos_token=""):
        won = state.custom["won"]
        return RewardResult(
            total_reward=float(won),
            sample_metrics={"won": float(won), "num_tokens": float(len(state.get_full_completion_ids()))},
            golden_answers={"number": state.sample.answer},
            info_turns=[{"turn": turn, "guess": guess} for turn, guess in enumerate(state.guesses)],
            sample_tags={"environment": state.sample.metadata["_env_name"], "end": state.stop_reason},
        )
