"""Tools go through the chat templates of released models, in the form that each was trained on."""

import copy
import json
import re

import pytest
from tests import released
from tests.fakes.play import play_once

from telescope.environments import RewardResult, Sample, ToolEnvironment, get_environment
from telescope.environments.tool_template import tool_template
from telescope.environments.types import EnvironmentSpec
from telescope.errors import UserError
from telescope.rollout.loaded_environment import LoadedEnvironment
from telescope.rollout.rendering import Renderer, RendererSpec

HERMES = '<tool_call>\n{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}\n</tool_call>'
CODER = "<function=NAME>\n<parameter=PARAMETER>\nVALUE\n</parameter>\n</function>"
LLAMA = '{"name": "NAME", "parameters": {"PARAMETER": "VALUE"}}'
FORMS = {
    "qwen2_5": HERMES, "qwen3": HERMES, "qwen3_vl": HERMES, "qwen3_instruct_2507": HERMES, "qwen3_5_think": CODER,
    "qwen3_6": CODER, "nemotron_3_nano": CODER, "llama3_1": LLAMA, "llama3_2": LLAMA,
    "glm4moe": "<tool_call>NAME\n<arg_key>PARAMETER</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
    "gptoss": 'to=functions.NAME<|channel|>commentary json<|message|>{"PARAMETER": "VALUE"}',
    "lfm2_v2": "NAME(PARAMETER='VALUE')",
    "gemma3": None, "phi3": None, "deepseek_r1_distill": None, "llama3": None, "cohere": None,
    "gemma4": '<|tool_call>call:NAME{PARAMETER:<|"|>VALUE<|"|>}<tool_call|>',
}  # fmt: skip
"""How each template writes a call. None: it takes no tools, or writes calls that are not read."""
CALLS = {
    HERMES: '<tool_call>\n{"name": "double", "arguments": {"text": "1.50"}}\n</tool_call>',
    CODER: "<tool_call>\n<function=double>\n<parameter=text>\n1.50\n</parameter>\n</function>\n</tool_call>",
    LLAMA: '{"name": "double", "parameters": {"text": "1.50"}}',
    FORMS["glm4moe"]: "<tool_call>double\n<arg_key>text</arg_key>\n<arg_value>1.50</arg_value>\n</tool_call>",
    FORMS["gptoss"]: "<|channel|>analysis<|message|>I double it.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.double <|constrain|>json<|message|>{"text": "1.50"}',
    FORMS["gemma4"]: '<|tool_call>call:double{text:<|"|>1.50<|"|>}<tool_call|>',
    FORMS["lfm2_v2"]: "<|tool_call_start|>[double(text='1.50')]<|tool_call_end|>",
}


def double(text: str) -> str:
    """Double a text.

    Args:
        text: what to double
    """
    return text * 2


class Doubling(ToolEnvironment):
    def __init__(self, **kwargs):
        super().__init__(tools=[double], **kwargs)

    def load_dataset(self, num_samples=-1):
        return [Sample("Double 1.50.", "1.501.50")]

    def compute_reward(self, state, eos_token=""):
        return RewardResult(float(state.custom["tool_success_count"]))


class OwnSection(Doubling):
    def _build_tools_prompt_section(self):
        return "Call double."


class OwnSyntax(Doubling):
    def parse_tool_calls(self, completion):
        return []


class OwnPrompt(Doubling):
    def get_initial_prompt(self, sample, tokenizer=None):
        return [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": sample.prompt}]


class OwnResults(Doubling):
    def format_multiple_tool_results(self, results):
        return "results"


class Kept(Doubling):
    tools_in_template = False


def make(name, *, environments_path, **kwargs):
    return globals()[name](**kwargs)


@pytest.fixture(scope="module")
def renderer():
    made = Renderer(RendererSpec(str(released.tokenizer_folder("qwen3"))))
    made.tokenizer.bos_token = "<|endoftext|>"  # which other models' templates write
    return made


def loaded_of(renderer, template, name="Doubling", **kwargs):
    renderer.tokenizer.chat_template = released.chat_template(template)
    return LoadedEnvironment(EnvironmentSpec(name, kwargs, factory=f"{__name__}:make"), renderer, [])


def first_turn(renderer, template, name="Doubling", answer=None, **kwargs):
    """The text of the first prompt, the environment's reply to an answer, and the text that the model reads then."""
    loaded = loaded_of(renderer, template, name, **kwargs)
    loaded.describe()
    prompt = loaded.prepare(0).text
    ids = renderer.encode_continuation(answer or CALLS[FORMS[template] or HERMES])
    first, reply = play_once(loaded, ids, "stop")
    assert renderer.decode(first.token_ids, cut_end_token=False) == prompt
    return prompt, reply.messages, renderer.decode(reply.token_ids, cut_end_token=False)


@pytest.mark.parametrize("template", FORMS)
def test_a_template_takes_tools_if_its_calls_are_read(renderer, template):
    renderer.tokenizer.chat_template = released.chat_template(template)
    found = tool_template(renderer.tokenizer)
    assert (found and found.form) == FORMS[template]


@pytest.mark.parametrize("template", [name for name, form in FORMS.items() if form])
def test_the_template_shows_the_tools_and_the_results_in_its_own_form(renderer, template):
    if template == "gemma4":  # whose results stand between tokens that other tokenizers lack
        tokenizer = copy.deepcopy(released.tokenizer("qwen3"))
        tokenizer.bos_token, written = "<|endoftext|>", released.chat_template(template)
        tokenizer.backend_tokenizer.add_special_tokens(sorted({*re.findall(r"<\|?\w+\|>|<\|\w+>", written)}))
        renderer = Renderer(RendererSpec(template, written), tokenizer)
    prompt, reply, following = first_turn(renderer, template)
    assert "double" in prompt and "You may call these tools" not in prompt and prompt.count("Double a text") == 1
    assert reply == [{"role": "tool", "content": "1.501.50", "turn_type": "tool_result"}]
    assert "1.501.50" in following and "Double a text" in following
    if template.startswith("qwen"):
        assert "<tool_response>\n1.501.50\n</tool_response>" in following
    if template.startswith("llama"):
        assert '<|start_header_id|>ipython<|end_header_id|>\n\n"1.501.50"' in following
    if template == "gemma4":
        assert '<tool_call|><|tool_response>response:double{value:<|"|>1.501.50<|"|>}' in following
    if template == "gptoss":
        assert '<|start|>functions.double to=assistant<|channel|>commentary<|message|>"1.501.50"<|end|>' in following
        assert "analysis<|message|>I double it.<|end|>" in following


@pytest.mark.parametrize("template", [name for name, form in FORMS.items() if form is None])
def test_other_templates_show_the_tools_in_the_system_message(renderer, template):
    answer = f"Hm.</think>{CALLS[HERMES]}" if template == "deepseek_r1_distill" else None
    prompt, reply, _ = first_turn(renderer, template, answer=answer)
    assert "You may call these tools" in prompt and prompt.count("Double a text") == 1
    assert reply == [{"role": "user", "content": "[double] 1.501.50", "turn_type": "tool_result"}]


@pytest.mark.parametrize(("name", "kwargs", "shown"), [
    ("Doubling", {"include_tool_schemas_in_prompt": False}, None),
    ("Doubling", {"tool_call_format": "function"}, "You may call these tools"),
    ("OwnSection", {}, "Call double."), ("OwnPrompt", {}, "You may call these tools"),
    ("OwnPrompt", {"system_prompt": "Be brief."}, "Be brief.\n\nYou may call these tools"),
    ("OwnSyntax", {}, "You may call these tools"), ("Kept", {}, "You may call these tools"),
    ("OwnSection", {"system_prompt": "Be brief."}, "Be brief.\n\nCall double."),
])  # fmt: skip
def test_folders_that_ask_for_the_system_message_keep_it(renderer, name, kwargs, shown):
    prompt = loaded_of(renderer, "qwen3", name, **kwargs).prepare(0).text
    assert "# Tools" not in prompt and (shown in prompt if shown else "double" not in prompt)


def test_a_role_that_the_template_rejects_is_an_error_at_the_start(renderer):
    with pytest.raises(UserError, match=r"'Doubling' replies with the role 'tool', which the chat template .* rejects"):
        loaded_of(renderer, "gemma3", tool_role="tool").describe()


def test_a_folder_with_its_own_format_of_results_replies_as_the_user(renderer):
    prompt, reply, _ = first_turn(renderer, "qwen3", "OwnResults", answer=CALLS[HERMES] * 2)
    assert "# Tools" in prompt and [(m["role"], m["content"]) for m in reply] == [("user", "results")]


def test_the_system_prompt_stands_beside_the_tools_of_the_template(renderer):
    prompt, *_ = first_turn(renderer, "qwen3", system_prompt="Be brief.")
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools") and "You may call these" not in prompt
    prompt = loaded_of(renderer, "llama3_1", system_prompt="Be brief.").prepare(0).text
    assert "Be brief.<|eot_id|>" in prompt and "You may call" not in prompt


def test_an_unreadable_call_is_answered_with_the_form_of_the_template(renderer):
    for template in ("qwen3", "llama3_1", "gptoss"):
        _, reply, following = first_turn(renderer, template, answer="<tool_call>double")
        assert "Error" in reply[0]["content"] and json.dumps(reply[0]["content"])[1:-1][:30] in following


def test_the_calculator_agent_goes_through_the_template(renderer):
    renderer.tokenizer.chat_template = released.chat_template("qwen3")
    environment = get_environment("calculator_agent", num_samples=3)
    messages = environment.get_initial_prompt(environment.get_sample(0), renderer.tokenizer)
    assert environment.template_tools == environment.tool_schemas
    assert "You may call" not in messages[0]["content"]


def test_the_system_prompt_of_a_tool_environment_ends_with_the_tools():
    assert OwnSection(system_prompt="Be brief.").system_prompt == "Be brief.\n\nCall double."
    assert OwnSection().system_prompt == "Call double."
    assert OwnSection(include_tool_schemas_in_prompt=False).system_prompt is None
