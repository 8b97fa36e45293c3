"""Conversations of multi-turn environments, without a pool."""

import pytest
from tests.unit.environments.turns import play

from telescope.environments.base import MultiTurnEnvironment, RewardResult, Sample


class Guess(MultiTurnEnvironment):
    def load_dataset(self, num_samples=-1):
        return [Sample("Guess.", answer="7")]

    def env_response(self, messages, state):
        return [{"role": "user", "content": f"{messages[-1]['content']} is wrong."}]

    def compute_reward(self, state, eos_token=""):
        return RewardResult(float(state.trajectory[-1].text == state.sample.answer), {"turns": state.num_turns})


def played(environment, *answers):
    return play(environment, environment.get_sample(0), *answers)[0]


def test_next_prompt_is_the_conversation_and_the_response():
    prompt = played(Guess(system_prompt="Be brief."), "3", "5", "7").trajectory[-1].prompt
    assert [m["role"] for m in prompt] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [m["content"] for m in prompt[-2:]] == ["5", "5 is wrong."]


def test_a_system_message_of_the_sample_is_not_doubled():
    sample = Sample([{"role": "system", "content": "Mine."}, {"role": "user", "content": "Go."}])
    assert Guess(system_prompt="Yours.").get_initial_prompt(sample) == sample.prompt


def test_a_response_that_repeats_the_conversation_is_refused():
    class Whole(Guess):
        def env_response(self, messages, state):
            messages.append({"role": "user", "content": "Wrong."})
            return messages

    with pytest.raises(TypeError, match="env_response returned the whole conversation: return only the new messages"):
        played(Whole(), "3", "5")


def test_messages_that_a_response_changes_are_copies():
    class Changing(Guess):
        def env_response(self, messages, state):
            for message in messages:
                message["content"] = "changed"
            return [{"role": "user", "content": "Wrong."}]

    step = played(Changing(), "3", "5").trajectory[-1]
    assert [message["content"] for message in [*step.prompt, *step.completion]] == ["Guess.", "3", "Wrong.", "5"]


@pytest.mark.parametrize(
    ("fields", "role"), [({}, "user"), ({"reply_role": "tool"}, "tool"), ({"tool_role": "ipython"}, "ipython")]
)
def test_an_environment_may_set_the_role_of_its_replies(fields, role):
    environment = Guess()
    vars(environment).update(fields)
    assert environment.role_of_replies == role
