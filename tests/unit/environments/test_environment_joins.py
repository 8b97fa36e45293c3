"""Turns join as the package `renderers` joins them, which has hand-written rules for each family of models."""

import re
import tracemalloc
from functools import cache
from typing import Any

import pytest
from jinja2.sandbox import SecurityError
from tests import released

from telescope.config.chat_template import compile_template
from telescope.environments.context import Call
from telescope.rollout.joins import Joins
from telescope.rollout.messages import template_messages
from telescope.rollout.rendering import Dialogue, Renderer, RendererSpec

FAMILIES = {
    "qwen3": "Qwen3", "qwen3_vl": "Qwen3VL", "qwen3_5_think": "Qwen35", "qwen3_6": "Qwen36", "qwen3_8": "Qwen38",
    "nemotron_3_nano": "Nemotron3", "nemotron_3_ultra": "Nemotron3Ultra", "nemotron_3_5_lightning": "Nemotron35",
    "glm4moe": "GLM45", "llama3_1": "Llama3", "gemma4_v5": "Gemma4", "deepseekv3": "DeepSeekR1",
}  # fmt: skip
"""A released template, and the package's name of the family."""
TOKENIZERS = {"llama3_1": "llama3_1", "gemma4_v5": "gemma3", "deepseekv3": "deepseek_v3"}
"""Tokenizers of other families than Qwen's; tokens that a family needs besides are added."""
TOKENS = """<|eom_id|> <|endoftext|> <|observation|> [gMASK] <sop> <arg_key> </arg_key> <arg_value> </arg_value>
<|image> <image|> <|image|> <|audio> <audio|> <|audio|> <|video|> <|"|> <|think|> <|tool> <tool|>"""
WITHOUT_REASONING = {"llama3_1", "gemma4_v5"}
OTHER_PACKAGES = {("deepseekv3", "tool"): "DeepSeekV3"}
"""Whose template starts no reasoning behind a result; that of R1 has no calls."""
GEMMA_TOOLS = ("gemma4_v5", "tool")


@cache
def tokenizer_of(family: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(released.tokenizer_folder(TOKENIZERS.get(family, "qwen3"))))
    written = re.findall(r"<\|?\w+\|>|<\|\w+>", released.chat_template(family))
    missing = {*written, *TOKENS.split()} - set(tokenizer.get_vocab())
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(missing)})
    return tokenizer


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("family", FAMILIES)
def test_joins_equal_those_of_rules_written_for_the_family(family: str, role: str) -> None:
    package, tokenizer = released.renderers(), tokenizer_of(family)
    name = OTHER_PACKAGES.get((family, role), FAMILIES[family])
    options = {"enable_thinking": True} if (family, role) == GEMMA_TOOLS else {}
    config = getattr(package.configs, f"{name}RendererConfig")(thinking_retention="all", **options)
    theirs = package.create_renderer(tokenizer, config)
    made = Renderer(RendererSpec(family, released.chat_template(family), enable_thinking=True), tokenizer)
    dialogue, messages = Dialogue(made), [{"role": "user", "content": "Why?"}]
    ids = dialogue.begin(messages)
    for turn, is_cut in enumerate((False, True, False)):
        is_cut = is_cut and (family, role) != GEMMA_TOOLS  # of which they join no result
        answer = "Hm." if is_cut else "Hm.\n</think>\n\nFour."
        answer = answer if dialogue.opened else f"<think>\n{answer}"
        answer = f"Four{turn}." if family in WITHOUT_REASONING else answer
        if (family, role) == GEMMA_TOOLS and turn:
            answer = f"Hm.\n<channel|>{answer}"
        end = made.stops.token_ids[(family, role) == GEMMA_TOOLS]  # its second one ends calls
        sampled = [*made.encode_continuation(answer), *([] if is_cut else [end])]
        reply = {"role": role, "name": "look_up", "tool_call_id": "call00000", "content": f"How {turn}?"}
        replies = [reply] * (2 if role == "tool" else 1)
        messages = [*messages, {"role": "assistant", "content": answer}, *replies]
        extension = dialogue.extend(answer, sampled, messages, ended=not is_cut)
        bridged = theirs.bridge_to_next_turn(ids, sampled, replies)
        ids = [*ids, *sampled, *extension.token_ids]
        if not (is_cut and family == "glm4moe"):  # which ends a cut answer with a token that its template never writes
            assert ids == list(bridged.token_ids), turn


@pytest.mark.parametrize(
    "written",
    ["''.__class__.mro()", "messages.append(1)", "messages[0].pop('role')", "messages[0].update(a=1)", "[].__len__()"],
)
def test_the_sandbox_of_templates_refuses_the_second_time_what_it_refuses_the_first(written: str) -> None:
    template = compile_template(f"{{{{ messages[0].role }}}}{{{{ ({written}) ~ '' }}}}")
    for _ in range(2):
        with pytest.raises(SecurityError):
            template.render(messages=[{"role": "user"}])


def conversation(renderer: Renderer, num_calls: int) -> tuple[Joins, list[dict[str, Any]]]:
    """Returns the joins of an agent that calls the policy so often, and its messages."""
    joins, messages = Joins(renderer), [{"role": "user", "content": "Why?"}]
    for turn in range(num_calls):
        prompt = joins.prompt(call := Call(messages))
        answer = {"role": "assistant", "content": f"Four {turn}. " * 20}
        ids = renderer.encode_continuation(answer["content"])
        joins.record(call, prompt, answer, turn, ids, answer["content"], ended=False)
        messages += [answer, {"role": "user", "content": "Why not five? " * 20}]
    return joins, messages


def test_memory_of_a_conversation_grows_with_its_length_and_any_turn_can_branch() -> None:
    renderer = Renderer(RendererSpec("qwen3", released.chat_template("qwen3")), tokenizer_of("qwen3"))
    conversation(renderer, 2)  # what is loaded once
    sizes = []
    for num_calls in (40, 80):
        tracemalloc.start()
        joins, messages = conversation(renderer, num_calls)
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert sizes[1] < 2.8 * sizes[0]
    for num_turns in (1, 40, 79):
        shorter, whole = joins.prompt(Call(messages[: 2 * num_turns + 1])), conversation(renderer, num_turns)
        again = whole[0].prompt(Call(whole[1]))
        assert (shorter.token_ids, shorter.parent, shorter.dialogue.opened) == (again.token_ids, num_turns - 1, "")
        branch = joins.prompt(Call([*messages[: 2 * num_turns], {"role": "user", "content": "Go on."}]))
        own = whole[0].prompt(Call([*whole[1][:-1], {"role": "user", "content": "Go on."}]))
        assert (branch.token_ids, branch.cause, own.cause) == (own.token_ids, "branch", "branch")


def test_a_result_without_a_name_gets_that_of_the_call_that_it_answers() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    answered = [{"role": "tool", "tool_call_id": name, "content": "4"} for name in ("c1", "c2")]
    assert [each.get("name") for each in template_messages([asked, *answered])] == [None, "look_up", None]
