"""An answer that ends inside its reasoning has no answer and no tool call, whoever opened the reasoning."""

import re

import pytest
from tests import released
from tests.fakes.play import play_once
from tests.unit.environments.turns import play

from telescope.environments import (
    RewardResult,
    Sample,
    SingleTurnEnvironment,
    ToolEnvironment,
    extract_answer_tags,
    extract_boxed_answer,
    extract_code_block,
    extract_xml_tag,
    get_environment,
    strip_think_tags,
)
from telescope.environments.parsers import answer_text, opening_tag
from telescope.environments.types import EnvironmentSpec
from telescope.evals.base import EnvironmentEval
from telescope.rollout.loaded_environment import LoadedEnvironment
from telescope.rollout.rendering import Renderer, RendererSpec

OPENED_BY_THE_PROMPT = ["deepseek_r1_distill", "deepseekv3", "qwen3_5_think", "qwen3_6", "qwen3_8", "nemotron_3_nano"]
OPENED_BY_THE_MODEL = ["qwen3", "qwen2_5", "llama3_1", "glm4moe"]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(scope="module")
def renderer():
    return Renderer(RendererSpec(str(released.tokenizer_folder("qwen3")), enable_thinking=True))


class Boxed(SingleTurnEnvironment):
    """Rewards the box, or the tag, or the block, as folders do that leave the reasoning to the parsers."""

    def load_dataset(self, num_samples=-1):
        return [Sample("What is 40 + 2?", "42")]

    def compute_reward(self, completion, sample, eos_token=""):
        text = completion.removesuffix(eos_token) if eos_token else completion
        found = [
            extract_boxed_answer(text),
            extract_answer_tags(text.strip()),
            extract_boxed_answer(strip_think_tags(text)),
            extract_code_block(text.replace("\r", ""), "text"),
            extract_xml_tag(text.split("####")[-1], "result"),
            *re.findall(r"It is (\w+)", re.sub(r"<think>.*?(</think>|$)", "", completion, flags=re.DOTALL)),
        ]
        return RewardResult(float(sample.answer in found))


class Adding(ToolEnvironment):
    def __init__(self, **kwargs):
        super().__init__(tools=[add], **kwargs)

    def load_dataset(self, num_samples=-1):
        return [Sample("Add.", "2")]

    def compute_reward(self, state, eos_token=""):
        last = state.trajectory[-1]
        answered = extract_answer_tags(last.text) or extract_answer_tags(last.completion[0]["content"])
        return RewardResult(float(state.custom["tool_success_count"] > 0 or answered != ""))


def add(a: int, b: int = 1) -> int:
    return a + b


def make_boxed(name, *, environments_path):
    return Boxed()


def make_adding(name, *, environments_path):
    return Adding(max_turns=2)


def make_eval(name, *, environments_path):
    evaluation = EnvironmentEval()
    evaluation.env = Boxed()
    return evaluation


def reward(renderer, template, answer, *, factory="make_boxed", stop_reason="length", enable_thinking=True):
    """The reward of an answer, as a worker computes it; of a tool environment, that of a rollout of one answer."""
    renderer.tokenizer.chat_template = released.chat_template(template)
    object.__setattr__(renderer.spec, "enable_thinking", enable_thinking)
    loaded = LoadedEnvironment(EnvironmentSpec("x", factory=f"{__name__}:{factory}"), renderer, [])
    ids = renderer.encode_continuation(answer)
    is_adding = factory == "make_adding"
    options = {"max_context": 1} if is_adding else {"for_eval": factory == "make_eval"}
    _, reply = play_once(loaded, ids, stop_reason, **options)
    assert reply.done, "one answer, or the context of one token, ends the rollout"
    return reply.reward.total_reward


ANSWERS = [r"\boxed{42}", "<answer>42</answer>", "\n```text\n42\n```\n", "so #### <result>42</result>", "It is 42"]


@pytest.mark.parametrize("stop_reason", ["length", "stop"])
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("template", OPENED_BY_THE_PROMPT)
def test_an_answer_inside_reasoning_that_the_prompt_opened_is_none(renderer, template, answer, stop_reason):
    assert reward(renderer, template, f"Perhaps {answer}", stop_reason=stop_reason) == 0.0
    assert reward(renderer, template, f"Hm.</think>{answer}", stop_reason=stop_reason) == 1.0
    assert reward(renderer, template, f"Perhaps {answer}", factory="make_eval") == 0.0
    if not template.startswith("deepseek"):  # their templates always open it
        assert reward(renderer, template, answer, enable_thinking=False) == 1.0


@pytest.mark.parametrize("template", OPENED_BY_THE_MODEL)
def test_an_answer_inside_reasoning_that_the_model_opened_is_none(renderer, template):
    for answer in ANSWERS:
        assert reward(renderer, template, answer) == 1.0
        assert reward(renderer, template, f"<think>Perhaps {answer}") == 0.0
        assert reward(renderer, template, f"<think>Hm.</think>{answer}") == 1.0


@pytest.mark.parametrize("template", OPENED_BY_THE_PROMPT)
def test_a_tool_call_inside_reasoning_is_not_executed(renderer, template):
    for text in (CALL, "<answer>2</answer>", f"I could call {CALL} now"):
        assert reward(renderer, template, text, factory="make_adding") == 0.0
        assert reward(renderer, template, f"Hm.</think>{text}", factory="make_adding") == 1.0


@pytest.mark.parametrize("opened", [True, False])
def test_shipped_environments_find_nothing_in_unfinished_reasoning(opened):
    def cut_off(text):
        return answer_text(text if opened else f"<think>{text}", "<think>" if opened else "")

    sums = get_environment("hendrycks_math", dataset="own", num_samples=3)
    puzzles = get_environment("countdown", dataset="generated", num_samples=3)
    sample = sums.get_sample(0)
    for text, earned in ((cut_off(f"\\boxed{{{sample.answer}}}"), 0.0), (f"\\boxed{{{sample.answer}}}", 1.0)):
        assert sums.compute_reward(text, sample).total_reward == earned
    assert puzzles.compute_reward(cut_off("<answer>1+2</answer>"), puzzles.get_sample(0)).sample_metrics["format"] == 0
    for name, text, metric in (
        ("wordle", "[crane]", "num_guesses"),
        ("calculator_agent", '<tool_call>{"name": "calculate", "arguments": ["1+2"]}</tool_call>', "total_tool_calls"),
    ):
        environment = get_environment(name, max_turns=1, num_samples=3)
        for answer, count in ((cut_off(text), 0), (text, 1)):
            state, _ = play(environment, environment.get_sample(0), answer)
            assert environment.compute_reward(state).sample_metrics[metric] == count


@pytest.mark.parametrize(("prompt", "opens"), [
    ("Q<think>", True), ("Q<think>\n\n", True), ("Q[THINK]", True), ("Write <think> tags.\nA:", False),
    ("Q<think>\n\n</think>\n\n", False), ("Q", False),
])  # fmt: skip
def test_only_a_tag_at_the_end_of_a_prompt_opens_reasoning(prompt, opens):
    assert bool(opening_tag(prompt)) is opens


def test_text_made_of_unfinished_reasoning_is_unfinished_too():
    text = answer_text("a \\boxed{1}\nb", "<think>")
    pieces = [text.strip(), text[1:], text + "x", text.split("a")[-1], text.partition("b")[0], str(text), text.lower()]
    for piece in (*pieces, text.splitlines()[0], text.removeprefix("a"), text.replace("b", "c")):
        assert (extract_boxed_answer(piece), strip_think_tags(piece)) == ("", "")
    assert text == "a \\boxed{1}\nb" and f"{text}" == "a \\boxed{1}\nb"
    assert answer_text("<|channel|>analysis<|message|>\\boxed{1}").strip("x").count("1") == 1
