"""Generates the samples that the checks need, with a run's engines and environments.

Owns their number and their conversion to training samples. They are rolled out like any others (`rollout.sample`),
through request slots and on all servers. Invariant: advantages are random and never 0, so that every sample
contributes to a gradient, even where all rewards of a group are equal.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import zlib
from collections.abc import Callable

import numpy as np

from telescope.errors import RunError
from telescope.orchestrator.prompt_sampler import request_seed
from telescope.orchestrator.run_components import RunComponents
from telescope.rollout.sample import Rollout, RolloutTask
from telescope.rollout.trajectory import Trajectory
from telescope.trainer.batch import TrainSample
from telescope.trainer.packing import truncate_to

NUM_SAMPLES = 32
"""Minimum number of samples: enough tokens to detect a fault within a short time."""

FIRST_GROUP = -1_000_000_000
"""Group ids below those of prompts and evals."""


async def sample_groups(
    components: RunComponents, *, top_p: float | None, on_sample: Callable[[], None] = lambda: None
) -> list[TrainSample]:
    """Samples whole groups at the run's temperature, at least one per server; `top_p` replaces the run's.

    Raises RunError when too few samples were scored.
    """
    config = components.config
    num_groups = max(config.num_inference_servers, math.ceil(NUM_SAMPLES / config.group_size))
    settings = dataclasses.replace(
        components.settings, sampling=dataclasses.replace(components.settings.sampling, top_p=top_p)
    )
    key = components.keys.training[0]
    num_items = (await components.environments.describe(key)).num_samples

    async def one(group: int, index: int, prompt_token_ids: list[int]) -> Trajectory:
        group_id = FIRST_GROUP + group
        task = RolloutTask(
            sample_id=f"verify-{top_p}-{group}-{index}",
            group_id=group_id,
            sample_index=index,
            environment=config.environments[0].name,
            environment_key=key,
            item_index=group % num_items,
            prompt_token_ids=prompt_token_ids,
            seed_of_turn=lambda turn: request_seed(config.seed, "verify", group, index, turn),
        )
        trajectory = await Rollout(
            task,
            slots=components.slots,
            engine_of=lambda server: components.servers.clients[server],
            environments=components.environments,
            settings=settings,
            on_engine_failure=components.servers.report_failure,
        ).run()
        on_sample()
        return trajectory

    prompts = await asyncio.gather(
        *(components.environments.prepare(key, group % num_items) for group in range(num_groups))
    )
    trajectories = await asyncio.gather(
        *(
            one(group, index, prompt.token_ids)
            for group, prompt in enumerate(prompts)
            for index in range(config.group_size)
        )
    )
    for group in range(num_groups):
        components.slots.forget_group(FIRST_GROUP + group)
    scored = [trajectory for trajectory in trajectories if trajectory.reward is not None]
    samples = [sample for trajectory in scored for sample in trajectory.to_train_samples()]
    samples, _ = truncate_to([sample for sample in samples if sample.num_trained], config.seq_len)
    if 2 * len(scored) < len(trajectories) or len(samples) < 3:
        reasons = {trajectory.failure_message for trajectory in trajectories if trajectory.reward is None}
        raise RunError(
            f"too few samples to verify with: {len(scored)} of {len(trajectories)} were scored, {len(samples)} have "
            f"trained tokens ({'; '.join(map(str, reasons)) or 'no failure'})"
        )
    for sample in samples:
        rng = np.random.default_rng(zlib.crc32(sample.sample_id.encode()))
        sample.advantage = float(rng.choice([-1.0, 1.0]) * rng.uniform(0.5, 1.5))
    return samples


def engine_logprobs(samples: list[TrainSample]) -> np.ndarray:
    """Returns the engine's logprobs of all trained tokens, sample by sample."""
    return np.concatenate([sample.engine_logprob_L[sample.trained_L] for sample in samples])
