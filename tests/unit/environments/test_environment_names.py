"""Names and arguments that environments written elsewhere rely on. They may be extended, not removed or reordered."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from telescope.environments import base, parsers, registry, tool_env
from telescope.environments.rewards import Rubric
from telescope.evals import Eval, get_eval, list_evals

PARAMETERS: list[tuple[Callable[..., Any], str]] = [
    (base.Sample, "prompt, answer='', metadata"),
    (base.RewardResult, "total_reward, sample_metrics, golden_answers, info_turns, sample_tags"),
    (base.EvalMetricsResult, "metrics, golden_answers, info_turns, sample_tags"),
    (
        base.TrajectoryStep,
        "prompt, completion, prompt_token_ids, completion_token_ids, completion_logprobs, is_truncated",
    ),
    (base.RolloutState, "sample, env_name, trajectory, is_completed=False, stop_reason=None, error=None, custom"),
    (base.Environment, "eos_token=None, add_thinking_prefix=False"),
    (base.Environment.load_dataset, "self, num_samples=-1"),
    (base.Environment.get_sample, "self, index"),
    (base.Environment.notice, "self, text"),
    (base.SingleTurnEnvironment, "system_prompt=None, instruction_prompt=None"),
    (base.SingleTurnEnvironment.compute_reward, "self, completion, sample, eos_token=''"),
    (base.SingleTurnEnvironment.compute_eval_metrics, "self, completion, sample, eos_token=''"),
    (
        base.SingleTurnEnvironment.format_prompt,
        "self, question, tokenizer, add_thinking_prefix=None, chat_template_kwargs=None",
    ),
    (base.MultiTurnEnvironment, "max_turns=10, system_prompt=None"),
    (base.MultiTurnEnvironment.create_initial_state, "self, sample"),
    (base.MultiTurnEnvironment.get_initial_prompt, "self, sample, tokenizer=None"),
    (base.MultiTurnEnvironment.env_response, "self, messages, state"),
    (base.MultiTurnEnvironment.is_done, "self, state"),
    (base.MultiTurnEnvironment.get_next_prompt_messages, "self, state, env_response_messages"),
    (base.MultiTurnEnvironment.compute_reward, "self, state, eos_token=''"),
    (base.MultiTurnEnvironment.compute_eval_metrics, "self, state, eos_token=''"),
    (
        tool_env.ToolEnvironment,
        "tools=None, max_turns=10, tool_call_format='xml', include_tool_schemas_in_prompt=True, error_formatter=None, "
        "system_prompt=None",
    ),
    (tool_env.ToolEnvironment.parse_tool_calls, "self, completion"),
    (tool_env.ToolEnvironment.is_final_answer, "self, completion, state"),
    (tool_env.ToolEnvironment.execute_tool, "self, call"),
    (tool_env.ToolEnvironment.format_tool_result, "self, result"),
    (tool_env.ToolEnvironment.get_tool_metrics, "self, state"),
    (tool_env.ToolCall, "name, arguments, raw_text=''"),
    (tool_env.ToolResult, "tool_name, result, success=True, error=None"),
    (tool_env.ToolEnvironment.format_multiple_tool_results, "self, results"),
    (tool_env.func_to_tool_schema, "function"),
    (tool_env.parse_xml_tool_calls, "text"),
    (tool_env.parse_function_call_syntax, "text, tool_names=None"),
    (parsers.strip_think_tags, "text"),
    (parsers.extract_boxed_answer, "text"),
    (parsers.extract_answer_tags, "text"),
    (parsers.extract_code_block, "text, language='python'"),
    (parsers.extract_xml_tag, "text, tag"),
    (parsers.verify_exact_match, "predicted, ground_truth"),
    (parsers.verify_math_answer, "predicted, ground_truth"),
    (
        Rubric.add_reward,
        "self, func, weight=1.0, name=None, golden_answer=None, range_min=None, range_max=None, invert=False",
    ),
    (Rubric.add_metric, "self, func"),
    (
        Rubric.score,
        "self, completion=None, sample=None, state=None, eos_token='', extra_sample_metrics=None, "
        "extra_golden_answers=None, extra_info_turns=None, extra_sample_tags=None",
    ),
    (registry.get_environment, "name"),
    (registry.list_environments, ""),
    (get_eval, "name"),
    (list_evals, ""),
]


@pytest.mark.parametrize(("function", "documented"), PARAMETERS, ids=lambda value: getattr(value, "__qualname__", None))
def test_documented_parameters_exist_in_their_order(function: Callable[..., Any], documented: str) -> None:
    names = [part.partition("=") for part in documented.split(", ") if part]
    parameters = list(inspect.signature(function).parameters.values())
    assert [parameter.name for parameter in parameters[: len(names)]] == [name for name, _, _ in names]
    for parameter, (_, has_default, default) in zip(parameters, names, strict=False):
        if has_default:
            assert repr(parameter.default) == default
    for parameter in parameters[len(names) :]:
        optional = parameter.default is not parameter.empty
        assert optional or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL), (
            "what came later has a default"
        )


def test_attributes_for_subclasses_exist() -> None:
    for name in ("reward_min", "reward_max", "metrics_ranges", "tags_options", "eos_token", "name", "is_multi_turn"):
        assert hasattr(base.Environment, name)
    for name in ("environment_name", "environment_kwargs", "system_prompt", "is_multi_turn", "metrics_ranges"):
        assert hasattr(Eval, name)
    assert base.MultiTurnEnvironment.max_turns == 10, "the default, which a class may set itself"
    assert base.BaseEnvironment is base.Environment
    assert inspect.iscoroutinefunction(base.Environment.prepare_resources)
    assert inspect.iscoroutinefunction(Rubric.score)
    assert isinstance(Rubric.metrics_ranges, property)
    assert base.RolloutState(base.Sample("a"), "b").num_turns == 0
