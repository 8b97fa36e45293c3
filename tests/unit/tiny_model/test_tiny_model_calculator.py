"""Warm-start examples of the calculator: the environment rewards them, and no question is held out."""

from dataclasses import asdict

import pytest

from telescope.environments.base import ChatMessage, TrajectoryStep
from telescope.environments.calculator_agent.environment import CalculatorAgentEnvironment
from telescope.environments.calculator_agent.questions import Question, is_held_out
from telescope.environments.records import assistant_message, conversation
from telescope.environments.registry import get_environment
from telescope.errors import UserError
from telescope.tiny_model.build import build_tokenizer, encode_examples
from telescope.tiny_model.cache import TinyModelSettings
from telescope.tiny_model.examples import CalculatorExamples, Turn, examples_of, markup_of, question_settings

SETTINGS = TinyModelSettings(task="calculator_agent")
ENVIRONMENT = CalculatorAgentEnvironment(prompt_style="short")


def question_in(text: str) -> Question:
    numbers = text.replace("+", " ").replace("-", " ").replace("*", " ").split()
    return Question(tuple(map(int, numbers)), tuple(character for character in text if character in "+-*"))


def test_right_turns_played_one_after_the_other_are_rewarded():
    source = CalculatorExamples(SETTINGS)
    for _ in range(300):
        turns = source.draw(0.0)
        question = question_in(turns[0].messages[0]["content"])
        assert not is_held_out(question)
        assert rewarded(turns, question)


def read(message: ChatMessage) -> tuple[str, str]:
    return message["role"], message["content"]


def rewarded(turns: tuple[Turn, ...], question: Question) -> bool:
    """Whether the environment rewards these turns; the replies in them must be its own."""
    state = ENVIRONMENT.create_initial_state(ENVIRONMENT.sample_of(question))
    prompt = response = ENVIRONMENT.get_initial_prompt(state.sample)
    for turn in turns:
        assert [read(message) for message in turn.messages] == [read(message) for message in response]
        state.trajectory.append(TrajectoryStep(prompt, [assistant_message(turn.answer)]))
        response = ENVIRONMENT.env_response(conversation(state), state)
        done, state.stop_reason = ENVIRONMENT.is_done(state)
        assert done == (turn is turns[-1])
        if not done:
            prompt = ENVIRONMENT.get_next_prompt_messages(state, response)
    return ENVIRONMENT.compute_reward(state).total_reward == 1.0


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 1.0, 1.0), (0.7, 0.4, 0.55), (1.0, 0.2, 0.4)])
def test_conversations_have_the_set_share_of_errors(share, low, high):
    source = CalculatorExamples(SETTINGS)
    drawn = [source.draw(share) for _ in range(1000)]
    right = [rewarded(turns, question_in(turns[0].messages[0]["content"])) for turns in drawn]
    assert low <= sum(right) / len(right) <= high


def test_examples_follow_from_the_seed_and_the_task():
    sources = [examples_of(TinyModelSettings(task="calculator_agent", seed=seed)) for seed in (1, 1, 2)]
    drawn = [[source.draw(0.5) for _ in range(50)] for source in sources]
    assert drawn[0] == drawn[1] != drawn[2]
    assert TinyModelSettings(task="calculator_agent").key != TinyModelSettings().key
    with pytest.raises(UserError, match="task is chess; use one of countdown, calculator_agent"):
        TinyModelSettings(task="chess")


def test_the_environment_uses_the_same_wording():
    settings = asdict(question_settings(SETTINGS)) | {"prompt_style": "short", "portion": "train", "num_samples": 50}
    environment = get_environment("calculator_agent", **settings)
    source = CalculatorExamples(SETTINGS)
    shown = {source.draw(0.0)[0].messages[0]["content"] for _ in range(5000)}
    prompts = [environment.get_initial_prompt(environment.get_sample(i)) for i in range(50)]
    assert all(len(messages) == 1 for messages in prompts)
    assert sum(messages[0]["content"] in shown for messages in prompts) > 10


def test_a_call_is_a_few_tokens_and_only_model_output_is_trained():
    source = CalculatorExamples(SETTINGS)
    examples = [source.draw(0.0) for _ in range(16)]
    corpus = [str(m["content"]) for example in examples for turn in example for m in turn.messages]
    tokenizer = build_tokenizer(corpus, 384, markup_of(SETTINGS))
    assert len(tokenizer("<call>12+7</call>")["input_ids"]) == 6
    tokens_BL, targets_BL = encode_examples(examples, tokenizer)
    for example, targets_L in zip(examples, targets_BL, strict=True):
        answers = "".join(turn.answer + "<|im_end|>" for turn in example)
        assert tokenizer.decode(targets_L[targets_L != -100]) == answers
    assert tokens_BL.shape[1] < 80
