"""What folders that were written for the published interface expect: imports, order of calls, state, construction."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.unit.environments.turns import finish, play, step
from tests.unit.rollout.fakes import generation

import telescope.environments
from telescope.environments import MultiTurnEnvironment, RewardResult, RolloutState, Sample, SingleTurnEnvironment
from telescope.environments.local_rollout import Answer, roll_out_item, take_turn
from telescope.environments.registry import get_environment, make_environment
from telescope.errors import EnvironmentFailure, UserError
from telescope.evals import Eval, get_eval
from telescope.rollout.trajectory import Turn
from telescope.rollout.turns import MultiTurn
from telescope.rollout.user_thread import UserThread

OUTSIDE = Path(__file__).parents[2] / "integration" / "environments" / "outside_folders"


def outside(name, **kwargs):
    return get_environment(name, environments_path=[OUTSIDE], **kwargs)


def answers(*texts):
    left = iter(texts)
    return lambda messages: Answer(text) if (text := next(left, None)) is not None else None


# Imports

PUBLISHED_NAMES = re.findall(
    r"\w+",
    "Environment BaseEnvironment SingleTurnEnvironment MultiTurnEnvironment ToolEnvironment Sample RewardResult "
    "EvalMetricsResult RolloutState TrajectoryStep ChatMessage Messages Rubric ToolCall ToolResult func_to_tool_schema "
    "get_environment list_environments strip_think_tags extract_boxed_answer extract_answer_tags extract_code_block "
    "extract_xml_tag verify_exact_match verify_math_answer check_environments parse_xml_tool_calls "
    "parse_function_call_syntax",
)


def test_the_package_exports_the_published_names_and_nothing_else():
    assert sorted(telescope.environments.__all__) == sorted(PUBLISHED_NAMES)
    assert all(getattr(telescope.environments, name) is not None for name in PUBLISHED_NAMES)
    with pytest.raises(AttributeError, match="no attribute 'Enviroment'"):
        telescope.environments.Enviroment  # noqa: B018


def test_further_published_names_are_there():
    from telescope import evals
    from telescope.environments import check_environments
    from telescope.environments.rewards import maybe_await
    from telescope.evals import registry
    from telescope.trainer.backends.fsdp import FSDPBackend
    from telescope.utils.tlog import get_logger

    assert FSDPBackend.__name__ == "FSDPBackend" and asyncio.run(maybe_await(1)) == 1
    assert (evals.resolve, registry.get_eval, registry.list_evals) == (get_eval, get_eval, evals.list_evals)
    assert get_logger("my_game").name == "telescope.my_game" and get_logger("telescope.x").name == "telescope.x"
    assert [found.name for found in check_environments(["wordle", "countdown"])] == ["wordle", "countdown"]
    with pytest.raises(UserError, match="Did you mean 'wordle'"):
        check_environments(["wordl"])


def test_a_folder_imports_itself_as_a_shipped_one_does(tmp_path):
    (folder := tmp_path / "self_importing").mkdir()
    (folder / "helper.py").write_text("WORDS = ['a', 'b']")
    (folder / "environment.py").write_text(
        "import telescope.environments.self_importing.helper\n"
        "from telescope.environments import RewardResult, Sample, SingleTurnEnvironment\n"
        "from telescope.environments.self_importing.helper import WORDS\n"
        "class Own(SingleTurnEnvironment):\n"
        "    def load_dataset(self, num_samples=-1):\n"
        "        return [Sample(w) for w in telescope.environments.self_importing.helper.WORDS]\n"
        "    def compute_reward(self, completion, sample, eos_token=''):\n"
        "        return RewardResult(float(completion in WORDS))\n"
    )
    assert len(get_environment("self_importing", environments_path=[tmp_path])) == 2


def test_importing_the_package_imports_none_of_its_modules():
    program = (
        "import sys, telescope.environments\n"
        "assert not [name for name in sys.modules if name.startswith('telescope.environments.')]\n"
        "assert not {'numpy', 'pydantic', 'transformers', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# Multi-turn order


class Recorded(MultiTurnEnvironment):
    """Records the calls that it gets, and answers nothing to "quiet"."""

    def load_dataset(self, num_samples=-1):
        return [Sample("Go.", "right")]

    def env_response(self, messages, state):
        self.note(state, "env_response", messages[-1]["content"])
        state.custom["won"] = messages[-1]["content"] == state.sample.answer
        return [] if messages[-1]["content"] == "quiet" else [{"role": "user", "content": "No.", "turn_type": "reply"}]

    def is_done(self, state):
        self.note(state, "is_done", state.trajectory[-1].text)
        return (True, "won") if state.custom.get("won") else super().is_done(state)

    def compute_reward(self, state, eos_token=""):
        return RewardResult(float(state.custom["won"]))

    def note(self, state, *call):
        state.custom.setdefault("calls", []).append(call)


class Thrifty(Recorded):
    checks_done_first = True


def test_env_response_comes_before_is_done_and_sees_every_answer():
    environment = Recorded(max_turns=2)
    state, _ = play(environment, Sample("Go.", "right"), "wrong", "right")
    assert state.custom["calls"] == [
        ("env_response", "wrong"), ("is_done", "wrong"), ("env_response", "right"), ("is_done", "right"),
    ]  # fmt: skip
    # A win with the last answer counts.
    assert (state.stop_reason, environment.compute_reward(state).total_reward) == ("won", 1.0)
    assert roll_out_item(environment, 0, answers("wrong", "right")).score["total_reward"] == 1.0
    state = environment.create_initial_state(Sample("Go.", "right"))
    state.trajectory.append(step("wro", is_truncated=True))
    reply = finish(take_turn(environment, state))
    assert (reply.done, reply.reason, state.custom["calls"][0]) == (True, "truncated", ("env_response", "wro"))


@pytest.mark.parametrize("max_turns", [0, -1])
def test_without_max_turns_the_folder_decides_the_end_and_no_empty_response(max_turns):
    environment, sample = Recorded(max_turns=max_turns), Sample("Go.", "right")
    state, responses = play(environment, sample, "quiet", *["wrong"] * 30, "right", "late")
    assert (state.num_turns, state.stop_reason, responses[0]) == (32, "won", [])


def test_a_class_attribute_saves_the_last_response():
    state, _ = play(Thrifty(max_turns=1), Sample("Go.", "right"), "right")
    assert state.custom["calls"] == [("is_done", "right")]
    assert state.stop_reason == "max_turns_reached"


def test_a_rollout_whose_environment_raises_ends_with_an_error():
    ended = []

    class Broken(Recorded):
        def env_response(self, messages, state):
            raise ValueError("no luck")

        def end_rollout(self, state):
            ended.append((state.stop_reason, state.error))

    renderer = SimpleNamespace(
        chat_text=lambda messages: "text", encode=lambda text, from_template: [1], decode=lambda ids, cut_end_token: "x"
    )
    loaded = SimpleNamespace(renderer=renderer, environment=Broken(), first_messages=lambda *_: [])
    task = SimpleNamespace(sample_id="r", item_index=0)
    rollout = SimpleNamespace(label="item 0", task=task, settings=SimpleNamespace(interleaved=True))

    async def run():
        conversation = MultiTurn(rollout, loaded, UserThread(5.0))
        await conversation.begin()
        with pytest.raises(EnvironmentFailure, match="no luck"):
            await conversation.respond(Turn([], generation([])))
        await conversation.end()

    asyncio.run(run())
    assert ended == [("rollout_error", "ValueError: no luck")]


def test_a_completion_is_a_list_with_one_assistant_message_and_a_reply_may_have_a_turn_type():
    state, _ = play(Recorded(), Sample("Go.", "right"), "wrong", "right")
    first, second = state.trajectory
    assert first.completion == [{"role": "assistant", "content": "wrong"}]
    assert first.prompt == [{"role": "user", "content": "Go."}]
    assert second.prompt[:2] == first.prompt + first.completion
    played = roll_out_item(Recorded(), 0, answers("wrong", "right"))
    assert played.messages[2] == {"role": "user", "content": "No.", "turn_type": "reply"}


# State


def test_the_state_joins_ids_and_logprobs_of_all_answers():
    state = RolloutState(Sample(""), "x")
    state.trajectory = [step("a", completion_token_ids=[1, 2], completion_logprobs=[-0.5, -1.0])]
    state.trajectory.append(step("b", completion_token_ids=[3], completion_logprobs=[-2.0]))
    assert (state.get_full_completion_ids(), state.get_full_logprobs()) == ([1, 2, 3], [-0.5, -1.0, -2.0])


def test_samples_states_and_steps_take_further_attributes():
    for instance in (Sample(""), RolloutState(Sample(""), "x"), step("a")):
        instance.flavor = "sweet"
        assert instance.flavor == "sweet"


def test_samples_know_their_environment():
    assert outside("number_game").get_sample(3).metadata["_env_name"] == "number_game"
    assert get_eval("long_sentences", environments_path=[OUTSIDE]).get_sample(0).metadata["_env_name"] == (
        "graded_sentence"
    )


# Construction


class Question(SingleTurnEnvironment):
    def __init__(self, depth=1, **kwargs):
        super().__init__(**kwargs)
        self.depth = depth

    def load_dataset(self, num_samples=-1, min_difficulty=0, **kwargs):
        return [Sample("q", str(min_difficulty))]

    def compute_reward(self, completion, sample, eos_token=""):
        return RewardResult(0.0)


class Dropping(Question):
    def __init__(self, depth=1, **kwargs):
        super().__init__(depth=depth)


class Closed(Question):
    def __init__(self, depth=1):
        self.depth = depth


@pytest.mark.parametrize("cls", [Question, Closed, Recorded])
def test_every_environment_takes_an_end_token_and_a_thinking_prefix(cls):
    environment = make_environment(cls, "x", {"eos_token": "<end>", "add_thinking_prefix": True})
    assert (environment.eos_token, environment.add_thinking_prefix) == ("<end>", True)
    unset = make_environment(cls, "x", {"eos_token": None, "add_thinking_prefix": None})
    assert (unset.eos_token, unset.add_thinking_prefix, unset._notices) == ("", False, ())


@pytest.mark.parametrize("cls", [Question, Closed, Dropping, Recorded])
def test_an_unknown_keyword_becomes_an_attribute_and_is_reported(cls):
    environment = make_environment(cls, "x", {"flavor": "sweet", "crust": 3})
    assert (environment.flavor, environment.crust) == ("sweet", 3)
    assert environment._notices == (
        "The environment 'x' received flavor, crust as attributes: neither its constructor nor its load_dataset names "
        "them.",
    )


def test_a_keyword_of_the_constructor_or_of_load_dataset_is_not_reported():
    environment = make_environment(Question, "x", {"depth": 2, "min_difficulty": 5, "system_prompt": None})
    assert (environment.depth, environment.get_sample(0).answer, environment._notices) == (2, "5", ())


def test_attributes_are_there_when_the_constructor_continues():
    assert outside("graded_sentence", flavor="sweet").flavor == "sweet"

    class Early(Question):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.doubled = self.flavor * 2

    assert make_environment(Early, "x", {"flavor": "a"}).doubled == "aa"


@pytest.mark.parametrize(("cls", "given", "words"), [
    (Recorded, "max_turn", "has no keyword argument 'max_turn'. Did you mean 'max_turns'"),
    (Question, "sytem_prompt", "has no keyword argument 'sytem_prompt'. Did you mean 'system_prompt'"),
    (Closed, "dept", "has no keyword argument 'dept'. Did you mean 'depth'"),
    (Question, "get_sample", "cannot take the keyword argument 'get_sample'"),
])  # fmt: skip
def test_a_near_miss_or_the_name_of_a_method_is_an_error_and_another_word_is_not(cls, given, words):
    with pytest.raises(UserError, match=re.escape(words)):
        make_environment(cls, "x", {given: 1})
    assert make_environment(Question, "x", {"max_difficulty": 3}).max_difficulty == 3


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("sets", [True, False])
def test_load_dataset_returns_the_samples_or_sets_them_or_both(returns, sets):
    class Loaded(Question):
        def load_dataset(self, num_samples=-1):
            samples = [Sample("a"), Sample("b")]
            if sets:
                self._samples = samples
            return samples if returns else None

    environment = make_environment(Loaded, "x", {})
    if returns or sets:
        assert (len(environment), environment.get_sample(1).prompt) == (2, "b")
    else:
        with pytest.raises(UserError, match="load_dataset of 'x' returned no samples"):
            len(environment)


@pytest.mark.parametrize("item", [{"prompt": "a"}, ("a", "b"), Sample("a", "b", None)])
def test_a_dataset_that_is_async_or_has_an_item_that_is_no_sample_is_refused(item):
    class Loaded(Question):
        def load_dataset(self, num_samples=-1):
            return [Sample("a"), item]

    class Async(Question):
        async def load_dataset(self, num_samples=-1):
            return [Sample("a")]

    with pytest.raises(UserError, match=r"load_dataset of 'x' returned .*'a'.*, which is no Sample\. Return Sample\("):
        len(make_environment(Loaded, "x", {}))
    with pytest.raises(UserError, match="load_dataset of 'x' is async: write `def load_dataset`"):
        len(make_environment(Async, "x", {}))


class Template:
    """Stands in for a tokenizer, and writes messages as `[role]content`."""

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, enable_thinking=True):
        assert not tokenize and add_generation_prompt
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + ("[assistant]" if enable_thinking else "[-]")


def test_a_prompt_is_the_system_message_then_instruction_and_question_then_the_opened_thought():
    environment = Question(system_prompt="S", instruction_prompt="I", add_thinking_prefix=True)
    assert environment.format_prompt("q", Template()) == "[system]S[user]I\n\nq[assistant]<think>"
    assert environment.format_prompt("q", Template(), add_thinking_prefix=False) == "[system]S[user]I\n\nq[assistant]"
    assert Question().format_prompt("q", Template(), None, {"enable_thinking": False}) == "[user]q[-]"


# Evals


def test_unknown_attributes_of_an_eval_are_those_of_its_environment():
    evaluation = get_eval("long_sentences", environments_path=[OUTSIDE], crust=3)
    assert (evaluation.flavor, evaluation.crust) == ("plain", 3)
    assert evaluation.rubric is evaluation.env.rubric
    with pytest.raises(AttributeError, match="topping"):
        evaluation.topping  # noqa: B018
    with pytest.raises(UserError, match="Did you mean 'instruction_prompt'"):
        get_eval("long_sentences", environments_path=[OUTSIDE], instruction_promt="I")


@pytest.mark.parametrize(("name", "fix"), [("countdown", "Create it with get_eval"), (None, "set environment_name")])
def test_an_eval_without_its_environment_says_what_is_missing(name, fix):
    with pytest.raises(UserError, match=fix):
        len(type("Own", (Eval,), {"environment_name": name})())


@pytest.mark.parametrize("name", ["math500", "aime_2024", "aime_2025", "gpqa_diamond"])
def test_a_question_of_a_benchmark_goes_through_the_chat_template(name):
    evaluation = get_eval(name, system_prompt="S")
    texts = [evaluation.format_prompt("q", Template(), chat_template_kwargs={"enable_thinking": on}) for on in (1, 0)]
    assert texts[0].startswith("[system]S[user]") and "q" in texts[0].partition("[user]")[2]
    assert texts[0].endswith("[assistant]") and texts[1].endswith("[-]")


# Folders from outside


def test_the_older_path_of_sandboxes_gives_the_same_classes():
    from telescope import sandbox
    from telescope.environments import _sandbox

    assert all(getattr(_sandbox, name) is getattr(sandbox, name) for name in sandbox.__all__)
    assert {"GenericSandboxPool", "SandboxConfig", "SandboxHandle", "get_provider"} <= set(_sandbox.__all__)
