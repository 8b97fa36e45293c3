"""Makes the fixture of the golden curves: a warm-started model and rollouts that it sampled.

    python -m tests.integration.trainer.golden.make_rollouts

Run it only to change what is replayed, then make new curves. Telescope's trainer and engine are not used:
the model is a `telescope tiny-model` of smaller size with its weights rounded to bfloat16, so that half the bytes hold
them exactly; transformers samples from it; rewards are the countdown environment's. To the logprobs of the sampled
tokens noise is added, as an engine of another precision would, so that importance ratios are not 1 at the first step.
"""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from tests.integration.trainer.golden.replay import MODEL, NUM_STEPS, ROLLOUTS, make_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from telescope.environments.countdown.environment import CountdownEnvironment
from telescope.tiny_model.build import build_tiny_model
from telescope.tiny_model.cache import TinyModelSettings
from telescope.tiny_model.examples import countdown_arguments

SETTINGS = TinyModelSettings(
    hidden_size=32, num_layers=2, num_heads=1, num_kv_heads=1, intermediate_size=64, max_position_embeddings=64
)
NOISE_NATS = 0.02


def main() -> None:
    torch.set_num_threads(1)  # sums in one order, whatever the machine
    config = make_config()
    with tempfile.TemporaryDirectory() as folder:
        build_tiny_model(Path(folder), SETTINGS)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        shutil.rmtree(MODEL, ignore_errors=True)
        model.save_pretrained(MODEL)
    (MODEL / "generation_config.json").unlink()
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    environment = CountdownEnvironment(**countdown_arguments(SETTINGS), portion="train", format_reward=0.1)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    arrays: dict[str, list[np.ndarray]] = {"token_ids": [], "trained": [], "engine_logprob": []}
    columns: dict[str, list[float]] = {"step_M": [], "group_M": [], "length_M": [], "reward_M": []}
    prompts_per_step = config.prompts_batch_size_for_trainer
    num_groups, item = 0, 0
    while num_groups < NUM_STEPS * prompts_per_step:
        sample = environment.get_sample(item)
        item += 1
        messages = environment.build_messages(sample.prompt)
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        answers = model.generate(
            torch.tensor([prompt] * config.group_size), do_sample=True, temperature=config.temperature, top_k=0,
            top_p=1.0, max_new_tokens=config.max_tokens, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )[:, len(prompt) :].tolist()  # fmt: skip
        answers = [up_to(answer, tokenizer.eos_token_id) for answer in answers]
        rewards = [
            environment.compute_reward(tokenizer.decode(answer), sample, eos_token=tokenizer.eos_token).total_reward
            for answer in answers
        ]
        if min(rewards) == max(rewards):
            continue  # a run discards it as well: there is nothing to learn from it
        for answer, reward in zip(answers, rewards, strict=True):
            ids = torch.tensor(prompt + answer)
            with torch.no_grad():
                logp_LV = (model(ids[None]).logits[0] / config.temperature).log_softmax(dim=-1)
            logp_N = logp_LV[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0].numpy()
            logp_N = np.minimum(logp_N + rng.normal(0.0, NOISE_NATS, logp_N.shape), 0.0)
            columns["step_M"].append(num_groups // prompts_per_step)
            columns["group_M"].append(num_groups)
            columns["length_M"].append(len(ids))
            columns["reward_M"].append(reward)
            arrays["token_ids"].append(ids.numpy().astype(np.int16))
            arrays["trained"].append(np.arange(len(ids)) >= len(prompt))
            arrays["engine_logprob"].append(np.concatenate([np.zeros(len(prompt)), logp_N]).astype(np.float32))
        num_groups += 1
    stored = {name: np.concatenate(parts) for name, parts in arrays.items()}
    for name, values in columns.items():
        stored[name] = np.array(values, dtype=np.float32 if name == "reward_M" else np.int32)
    np.savez_compressed(ROLLOUTS, **stored)
    num_bytes = ROLLOUTS.stat().st_size + sum(path.stat().st_size for path in MODEL.iterdir())
    print(f"{num_groups} of {item} groups kept, mean reward {stored['reward_M'].mean():.3f}, {num_bytes:,} bytes")


def up_to(answer: list[int], end: int) -> list[int]:
    """The answer with its end token, and without the padding behind it."""
    return answer[: answer.index(end) + 1] if end in answer else answer


if __name__ == "__main__":
    main()
