"""Stored rollouts replayed through the trainer, one case per algorithm and modifier, and the curves that must come out.

The fixture beside this file is made by `python -m tests.integration.trainer.golden.make_rollouts`: a model of 39,000
parameters, and `NUM_STEPS` batches that it sampled before any training. Each case trains that model on these batches,
in order, on one rank in float32: what it loses, and how, depends on the algorithm alone. As the weights move away from
those that sampled, importance ratios leave 1, and clips and caps begin to bind.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tests.processes import free_port

from telescope.algorithms import compute_advantages
from telescope.config import TelescopeConfig
from telescope.trainer.batch import TrainSample
from telescope.trainer.packing import pack_step
from telescope.trainer.worker import Trainer

FOLDER = Path(__file__).parent
MODEL = FOLDER / "model"
ROLLOUTS = FOLDER / "rollouts.npz"
CURVES = FOLDER / "curves.json"

NUM_STEPS = 6
VALUES = ("loss/policy", "grad_norm", "entropy", "kl_divergence_inference")

RELATIVE_TOLERANCE = 1e-3
"""Rounding alone (another packing, which sums in another order) moves these curves by 2e-5 at most; another processor
also chooses other kernels, and a token at a bound can fall on its other side."""
ABSOLUTE_TOLERANCE = 1e-6
"""For losses near 0: a loss is a sum of thousands of terms of order 1 over their number."""

CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "rloo": {"algorithm": "rloo"},
    "reinforce_pp": {"algorithm": "reinforce_pp", "advantage_norm": "batch"},
    "dr_grpo": {"algorithm": "dr_grpo"},
    "cispo": {"algorithm": "cispo"},
    "gspo": {"algorithm": "gspo", "clip_low": 0.02, "clip_high": 0.03},
    "sapo": {"algorithm": "sapo"},
    "grpo, 2 minibatches": {"number_of_minibatches": 2},
    "grpo, PPO clip": {"use_ppo_clip": True, "clip_low": 0.1, "clip_high": 0.15},
    "grpo, PPO clip to batch logprobs, 4 minibatches": {
        "use_ppo_clip": True, "ppo_clip_ref_logprobs": "batch", "clip_low": 0.05, "clip_high": 0.05,
        "number_of_minibatches": 4,
    },
    "rloo, dual clip": {
        "algorithm": "rloo", "use_ppo_clip": True, "clip_low": 0.1, "clip_high": 0.1, "clip_ratio_c": 1.2,
    },
    "grpo, TIS": {"use_tis": True, "tis_cap": 1.05},
    "grpo, IcePop": {"use_tis": True, "tis_mode": "icepop", "tis_floor": 0.9, "tis_cap": 1.1},
    "grpo, sequence mask": {"seq_is_masking": True, "seq_is_mask_low": 0.97, "seq_is_mask_high": 1.03},
    "grpo, KL penalty and entropy bonus": {"kl_penalty_tau": 0.2, "kl_estimator": "k3", "entropy_coef": 0.02},
    "dr_grpo, token_sum_norm": {"algorithm": "dr_grpo", "dr_grpo_loss_agg_mode": "token_sum_norm"},
    "gspo to batch logprobs, 4 minibatches": {
        "algorithm": "gspo", "clip_low": 3e-3, "clip_high": 4e-3, "ppo_clip_ref_logprobs": "batch",
        "number_of_minibatches": 4,
    },
    "sapo, sharper": {"algorithm": "sapo", "sapo_tau_pos": 4.0, "sapo_tau_neg": 6.0},
    "grpo, weight decay, warm-up and cosine": {
        "weight_decay": 10.0, "lr_scheduler": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.1,
    },
}  # fmt: skip
"""Name to the fields in which the case differs from `make_config` and the defaults."""


def make_config(**changes: Any) -> TelescopeConfig:
    """The config of a case. Groups, lengths and temperature are those of the stored rollouts."""
    fields: dict[str, Any] = {
        "model": str(MODEL),
        "environments": [{"name": "countdown"}],
        "model_dtype": "float32",
        "mixed_precision_dtype": None,
        "gradient_checkpointing": False,
        "device": "cpu",
        "trainer_threads": 1,
        "trainer_num_workers": 1,
        "inference_num_workers": 1,
        "group_size": 4,
        "prompts_batch_size_for_trainer": 8,
        "number_of_steps": NUM_STEPS,
        "compare_first_steps": 0,  # the rollouts are of an earlier model
        "learning_rate": 5e-4,
        "temperature": 0.9,
        "max_tokens": 20,
        "max_model_len": 64,
        "seq_len": 256,
        "use_wandb": False,
    }
    return TelescopeConfig.model_validate(fields | changes)


def load_rollouts() -> list[list[TrainSample]]:
    """Loads the stored samples of each step; every call makes new ones, since advantages are written into them."""
    with np.load(ROLLOUTS) as stored:
        arrays = {name: stored[name] for name in stored.files}
    ends = np.cumsum(arrays["length_M"])
    steps: list[list[TrainSample]] = [[] for _ in range(NUM_STEPS)]
    for index, end in enumerate(ends):
        tokens = slice(end - arrays["length_M"][index], end)
        trained_L = arrays["trained"][tokens]
        steps[arrays["step_M"][index]].append(
            TrainSample(
                sample_id=f"s{index}",
                group_id=int(arrays["group_M"][index]),
                environment="countdown",
                token_ids_L=arrays["token_ids"][tokens].astype(np.int64),
                trained_L=trained_L,
                engine_logprob_L=arrays["engine_logprob"][tokens].astype(np.float64),
                version_L=np.where(trained_L, 0, -1),
                reward=float(arrays["reward_M"][index]),
            )
        )
    return steps


def replay(case: str, **changes: Any) -> list[dict[str, float]]:
    """Trains a case on the stored rollouts. Returns `VALUES` of each step."""
    config = make_config(**CASES[case] | changes)
    trainer = Trainer(config, 0, 1, "127.0.0.1", free_port())
    try:
        trainer.setup()
        curve = []
        for step, samples in enumerate(load_rollouts()):
            compute_advantages(samples, config.algorithm, config.advantage_norm)
            (step_input,) = pack_step(
                samples, step=step, version=step, seq_len=config.seq_len, num_ranks=1,
                num_minibatches=config.number_of_minibatches,
            )  # fmt: skip
            metrics = trainer.train_step(step_input).metrics
            curve.append({name: metrics[name] for name in VALUES})
        return curve
    finally:
        trainer.shutdown()


def load_curves() -> dict[str, list[dict[str, float]]]:
    """The committed curve of every case."""
    curves: dict[str, list[dict[str, float]]] = json.loads(CURVES.read_text())["curves"]
    return curves


def departures(case: str, found: list[dict[str, float]], wanted: list[dict[str, float]]) -> list[str]:
    """A sentence for every value out of tolerance, in the order of the steps: the first one is where to look."""
    sentences = []
    for step, (found_values, wanted_values) in enumerate(zip(found, wanted, strict=True)):
        for name in VALUES:
            value, golden = found_values[name], wanted_values[name]
            allowed = ABSOLUTE_TOLERANCE + RELATIVE_TOLERANCE * abs(golden)
            if not abs(value - golden) <= allowed:
                sentences.append(
                    f"{case}: {name} of step {step} is {value:.9g}, the golden curve has {golden:.9g} "
                    f"(off by {abs(value - golden):.2g}, allowed {allowed:.2g})"
                )
    return sentences
