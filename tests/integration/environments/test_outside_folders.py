"""Folders that were written for the published interface run unchanged in a pool."""

import pytest

from telescope.environments.types import EnvironmentSpec
from telescope.errors import EnvironmentFailure
from telescope.evals import eval_spec

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_game_is_won_with_the_last_guess(load, encode):
    pool = await load(EnvironmentSpec("number_game", {"max_turns": 2, "seed": 1, "add_thinking_prefix": None}))
    lost = await pool.begin("r", "number_game", 0)
    assert lost.messages == [{"role": "user", "content": "Guess a number from 1 to 9."}]
    reply = await pool.respond("r", encode("none"))
    assert reply.messages == [{"role": "user", "content": "No. Guess again.", "turn_type": "feedback"}]
    lost = await pool.respond("r", encode("none"))
    assert (lost.end_reason, lost.reward.total_reward) == ("max_turns_reached", 0.0)
    number = lost.reward.golden_answers["number"]
    await pool.begin("s", "number_game", 0)
    await pool.respond("s", encode("none"))
    won = await pool.respond("s", encode(number))
    assert (won.done, won.end_reason, won.reward.total_reward) == (True, "won", 1.0)
    assert won.reward.sample_metrics["num_tokens"] == len(encode("none")) + len(encode(number))
    assert won.reward.sample_tags == {"environment": "number_game", "end": "won"}


async def test_a_tool_is_called_and_answers_as_the_user(load, encode):
    pool = await load(EnvironmentSpec("unit_tools", {"unit": "imperial"}))
    assert (await pool.describe("unit_tools")).notices == [
        "The environment 'unit_tools' received unit as attributes: neither its constructor nor its load_dataset names "
        "them."
    ]
    await pool.begin("r", "unit_tools", 0)
    reply = await pool.respond("r", encode("to_feet(meters=2, digits=1)"))
    assert reply.messages == [{"role": "user", "content": "[to_feet] 6.6 (imperial)", "turn_type": "tool_result"}]
    last = await pool.respond("r", encode("<answer>6.6</answer>"))
    assert (last.end_reason, last.reward.total_reward) == ("final_answer", 1.0)
    assert last.reward.sample_metrics["to_feet_calls"] == 1.0
    assert last.reward.info_turns == [{"name": "to_feet", "result": "6.6", "success": True, "error": None}]


async def test_a_rubric_scores_without_rescaling(load, encode):
    pool = await load(EnvironmentSpec("graded_sentence", {"flavor": "sweet"}))
    prompt = await pool.prepare("graded_sentence", 0)
    assert prompt.messages[0]["content"] == "Write one sentence with this word.\n\ncomet"
    reward = (await pool.answer("graded_sentence", 0, encode("a comet is not a star !"), "stop")).reward
    assert reward.total_reward == pytest.approx(1.7)
    assert reward.sample_metrics == {"has_word": 1.0, "num_words": 7.0, "num_exclamations": 1.0}
    assert (reward.golden_answers, reward.sample_tags) == ({"has_word": "comet"}, {"flavor": "sweet"})
    assert (await pool.describe("graded_sentence")).metrics_ranges["num_exclamations"]["invert"]


async def test_an_eval_wraps_the_environment_and_filters_its_samples(load, encode):
    pool = await load(eval_spec("long_sentences", {}, key="eval"))
    assert (await pool.describe("eval")).num_samples == 2
    assert (await pool.prepare("eval", 1)).messages[-1]["content"] == "Write one sentence with this word.\n\neclipse"
    scored = await pool.answer("eval", 1, encode("an eclipse"), "stop", for_eval=True)
    assert scored.reward.sample_metrics["has_word"] == 1.0


async def test_every_turn_of_a_conversation_opens_a_thought(load, encode, tokenizer):
    pool = await load(EnvironmentSpec("number_game", {"add_thinking_prefix": True}))
    first = await pool.begin("r", "number_game", 0)
    assert tokenizer.decode(first.token_ids).endswith("assistant\n<think>")
    assert (await pool.prepare("number_game", 0)).token_ids == first.token_ids
    reply = await pool.respond("r", encode("hm</think>none"))
    assert (reply.restarts, reply.divergence) == (False, None)
    shown = [*first.token_ids, *encode("hm</think>none"), *reply.append_token_ids]
    messages = [*first.messages, {"role": "assistant", "content": "<think>hm</think>none"}, *reply.messages]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + "<think>"
    assert shown == tokenizer(text, add_special_tokens=False)["input_ids"]


async def test_an_error_while_scoring_fails_the_sample_and_is_no_zero(load, encode):
    pool = await load(EnvironmentSpec("graded_sentence", {}))
    with pytest.raises(EnvironmentFailure, match="flavor"):
        await pool.answer("graded_sentence", 0, encode("a comet"), "stop")
