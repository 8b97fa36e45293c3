"""Correct user code in the threads and the event loop of one process."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from telescope.environments.serialization import sample_uid
from telescope.environments.types import EnvironmentSpec
from telescope.errors import UserError
from telescope.evals import eval_spec
from telescope.orchestrator.prompt_buffer import measure_prompts

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_prompt_is_rendered_by_the_chat_template_and_tokenized_in_the_worker(load, tokenizer):
    pool = await load("echo")
    prompt = await pool.prepare("echo", 3)
    messages = [{"role": "user", "content": "question 3 "}]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt.text == expected
    assert prompt.token_ids == tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert prompt.messages == messages
    assert (await pool.prepare("echo", 3)).sample_uid == prompt.sample_uid
    assert (await pool.prepare("echo", 4)).sample_uid != prompt.sample_uid


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_reward_of_sync_and_async_code_comes_back_whole(load, encode, asynchronous):
    pool = await load(EnvironmentSpec("echo", {"asynchronous": asynchronous}))
    advance = await pool.answer("echo", 12, encode("12"), "stop")
    assert advance.done
    assert advance.completion_text == "12"
    reward = advance.reward
    assert (reward.total_reward, reward.sample_metrics["length"]) == (1.0, 2.0)
    assert reward.golden_answers == {"answer": "12", "none": None}
    assert reward.info_turns == [{"said": "12"}]
    assert reward.sample_tags == {"eos": "<|im_end|>"}


async def test_eval_metrics_are_those_of_the_reward_unless_overridden(load, encode):
    pool = await load("echo")
    record = (await pool.answer("echo", 12, encode("13"), "stop", for_eval=True)).reward
    assert record.total_reward == 0.0
    assert record.sample_metrics["reward"] == 0.0
    assert record.sample_metrics["length"] == 2.0


async def test_completion_that_was_cut_off_keeps_its_last_token(load, encode):
    pool = await load("echo")
    assert (await pool.answer("echo", 0, encode("12")[:-1], "length")).completion_text == "12"
    assert (await pool.answer("echo", 0, encode("12"), "length")).completion_text == "12<|im_end|>"


async def test_thousands_of_calls_are_answered_each_with_its_own_result(load, encode):
    pool = await load("echo")
    advances = await asyncio.gather(*(pool.answer("echo", i % 1000, encode(str(i)), "stop") for i in range(2000)))
    assert [a.completion_text for a in advances] == [str(i) for i in range(2000)]
    assert [a.reward.total_reward for a in advances] == [1.0] * 1000 + [0.0] * 1000


async def test_two_environments_of_one_name_differ_by_key(load):
    pool = await load(
        EnvironmentSpec("echo", {"num_samples": 5}, reward_max=3.0),
        EnvironmentSpec("echo", {"num_samples": 7}, key="held out"),
    )
    train, held_out = await pool.describe("echo"), await pool.describe("held out")
    assert (train.num_samples, train.reward_min, train.reward_max) == (5, 0.0, 3.0)
    assert (held_out.num_samples, held_out.reward_max) == (7, 1.0)
    uids = [[(await pool.prepare(key, index)).sample_uid for index in range(5)] for key in ("echo", "held out")]
    assert uids[0] == uids[1]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (EnvironmentSpec("ecko"), "Did you mean 'echo'"),
        (EnvironmentSpec("echo", {"nun_samples": 1}), "Did you mean 'num_samples'"),
        (EnvironmentSpec("echo", {"num_samples": 0}), "is empty"),
    ],
)
async def test_fixable_problems_are_user_errors_at_the_start(load, spec, words):
    with pytest.raises(UserError, match=words):
        await load(spec)


async def test_training_and_evaluation_of_countdown_share_a_pool_and_no_item(load, encode):
    small = {"dataset": "generated", "max_numbers": 3, "max_number": 9, "operations": "+-", "prompt_style": "short"}
    pool = await load(
        EnvironmentSpec("countdown", {**small, "portion": "train", "num_samples": 400}),
        eval_spec("countdown", {**small, "portion": "heldout", "num_samples": 100}, key="eval/countdown"),
    )
    uids = [{sample_uid(one.environment.get_sample(i)) for i in range(100)} for one in pool.by_key.values()]
    assert not uids[0] & uids[1]
    prompt = await pool.prepare("eval/countdown", 0)
    assert prompt.text == f"<|im_start|>user\n{prompt.messages[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    answer = encode("<answer>95**97**99</answer>")
    record = (await pool.answer("eval/countdown", 0, answer, "stop", for_eval=True)).reward
    assert record.sample_metrics == {"reward": 0.0, "correct": 0.0, "format": 0.0}
    assert (await pool.describe("eval/countdown")).metrics_ranges["correct"] == {"min": 0.0, "max": 1.0}


async def test_prompts_that_cannot_be_rendered_are_one_line_with_count_item_and_reason(load, tmp_path):
    truth = {"reward_model": {"ground_truth": "1"}}
    rows = [{"prompt": [{"role": "user", "content": f"{n}?"}], **truth} for n in range(12)]
    for n in (5, 7):
        rows[n]["prompt"] = [{"role": "user", "content": [{"type": "image", "n": n}]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pool = await load(EnvironmentSpec("dapo_math", {"dataset_name": str(tmp_path / "rows.jsonl")}))
    limits = {"overlong_samples": "truncate", "max_model_len": 4096, "seq_len": 4096}
    config = SimpleNamespace(environments=[SimpleNamespace(name="dapo_math")], **limits)
    (line,) = await measure_prompts(config, pool, ["dapo_math"], 4096)
    assert line.startswith("2 of 12 measured prompts of dapo_math cannot be rendered and are left out. The first one: ")
    assert "item 5: preparing the prompt failed" in line
    assert "the message dict {'type': 'image', 'n': 5}, not a dict with a role" in line


async def test_answers_that_never_finish_comparing_are_wrong_and_delay_no_other(load, encode):
    """SymPy hangs, but neither the worker nor the other samples do."""
    spec = EnvironmentSpec("hendrycks_math", {"dataset": "own", "verify_timeout_seconds": 1.0, "num_samples": 1})
    pool = await load(spec, timeout_seconds=60.0)
    hostile = [r"\boxed{9^{9^{9^9}}}", r"\boxed{\prod_{i=1}^{10^9} i}", r"\boxed{95^{97^{99}}}", r"\boxed{((((((((1}"]
    answers = [answer for bad in hostile for answer in (bad, r"So \boxed{5}.")]
    advances = await asyncio.gather(*(pool.answer("hendrycks_math", 0, encode(a), "stop") for a in answers))
    assert [advance.reward.total_reward for advance in advances] == [0.0, 1.0] * 4
    assert not pool.is_stuck
