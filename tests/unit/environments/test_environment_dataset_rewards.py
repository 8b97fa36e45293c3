"""The environment `dataset` with a judge, tests of code, tools and a rollout of its own."""

import json
from types import SimpleNamespace

import pytest
from tests.fakes.judge import grades, judge_server, make_retries_quick
from tests.unit.environments.test_environment_dataset import made, reward_of, write

from telescope.environments.base import RewardResult
from telescope.environments.i3_code.own_problems import own_rows
from telescope.environments.local_rollout import Answer, roll_out_item
from telescope.environments.registry import get_environment
from telescope.environments.tool_env import ToolEnvironment
from telescope.errors import InfrastructureError, MalformedResultError, UserError

RUBRIC = [{"description": "It is short.", "weight": None, "points": 3}]
ROW = {"prompt": "Capital of France?", "answer": "Paris", "empty": None, "rubric": RUBRIC}
ROW["weights"] = {"It is short.": 2, "It is of another row.": None}
JUDGE = {"url": "http://127.0.0.1:9/v1", "model": "j"}


@pytest.fixture
def rows(tmp_path) -> str:
    (tmp_path / "agents.py").write_text(
        "from telescope.environments.base import RewardResult\n"
        "async def agent(sample, context):\n    return await context.generate(sample.prompt)\n"
        "async def scorer(sample, context):\n    return RewardResult(0.25)\n"
        "async def number(sample, context):\n    return 3\n"
        "def plain(sample, context): ...\n"
        "def look_up(word: str) -> str:\n    '''Look a word up.'''\n    return f'{word} is a city'\n"
    )
    return write(tmp_path / "rows.jsonl", [ROW])


@pytest.mark.parametrize(("kwargs", "shown"), [
    ({}, "The answer is correct."),
    ({"criteria": "It is polite."}, "It is polite."),
    ({"criteria": {"It is polite.": 2, "It is rude.": -1}}, "criterion_2: It is rude."),
    ({"criteria": "rubric"}, "criterion_1: It is short."),
    ({"criteria": "weights"}, "criterion_1: It is short."),
])  # fmt: skip
def test_a_judge_sees_question_answer_reference_and_criteria(rows, kwargs, shown):
    with judge_server(lambda body: grades(body, 8)) as (url, requests):
        environment = made(rows, reward=["judge", "exact"], judge=JUDGE | {"url": url}, **kwargs)
        reward = reward_of(environment, "<think>Rome?</think><answer>Paris</answer>")
    prompt = requests[0]["messages"][0]["content"]
    assert all(text in prompt for text in ("Capital of France?", "\nParis\n", "<answer>Paris", shown))
    assert "Rome" not in prompt
    assert reward == {"reward": 1.8, "judge": 0.8, "correct": 1.0, "format": 1.0} | (
        {} if "rude" not in shown else {"reward": 1.4, "judge": 0.4}
    )


def test_a_judge_that_fails_masks_and_never_scores_zero(rows, monkeypatch):
    make_retries_quick(monkeypatch)
    environment = made(rows, reward="judge", judge=JUDGE)
    with pytest.raises(InfrastructureError, match=r"the judge 'j' at http://127.0.0.1:9/v1 failed: APIConnectionError"):
        reward_of(environment, "Paris")


@pytest.mark.sandbox
def test_code_runs_against_the_tests_of_its_row(tmp_path):
    pairs = [{"input": "1 2", "output": "3"}, {"input": "4 5", "output": "9"}]
    adds = {"question": "Add.", "tests": pairs}
    head, check = (
        "def add(a, b):\n    '''Add.'''\n",
        "def check(f):\n    for n in range(3):\n        assert f(n, 1) == n + 1\n",
    )
    human = {"prompt": head, "canonical_solution": "    return a + b\n", "test": check, "entry_point": "add"}
    mbpp = {"text": "Add.", "code": "def add(a, b):\n    return a + b", "test_setup_code": "from operator import eq"}
    mbpp["test_list"] = ["assert eq(add(1, 2), 3)", "assert add(2, 2) == 4"]  # type: ignore[assignment]
    adds_json = {"question": "Add.", "info": json.dumps({"inputs": ["1 2"], "outputs": ["3"]})}
    for rows, answer, expected in (
        ([adds], "print(sum(map(int, input().split())))", 1.0),
        ([adds], "print(3)", 0.0),
        ([adds_json], "print(3)", 1.0),
        ([human], "    return a + b", 1.0),
        ([human], "def add(x, y):\n    return x + y", 1.0),
        ([human], "    return a - b", 0.0),
        ([human], "raise SystemExit", 0.0),
        ([mbpp], mbpp["code"], 1.0),
        ([mbpp], "def add(a, b):\n    return 3", 0.0),
        ([own_rows()[0]], own_rows()[0]["solution"], 1.0),
    ):
        environment = made(write(tmp_path / "rows.jsonl", rows), reward="code", code={"pool_size": 1})
        assert "```python" in (asked := environment.build_messages(environment.get_sample(0).prompt)[0]["content"])
        shown = f"this function:\n\n{head}" if rows == [human] else "assert eq(add(1, 2), 3)"
        assert asked.endswith(rows[0].get("question") or shown)
        for solution in environment.solution(environment.get_sample(0)):
            assert reward_of(environment, solution)["reward"] == 1
        reward = reward_of(environment, f"So:\n```python\n{answer}\n```")
        assert (reward["reward"], reward["code"], reward["passed"]) == (expected,) * 3
    assert reward["num_test_cases"] == 8


def after_call(environment, name, arguments, answer):
    answers = iter([f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>", answer])
    return roll_out_item(environment, 0, lambda _: Answer(next(answers)))


def test_tools_by_their_path_make_it_a_tool_environment(rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment = made(rows, reward="exact", tools=["agents.py:look_up"], system_prompt="Be brief.", max_turns=3)
    assert isinstance(environment, ToolEnvironment) and environment.max_turns == 3
    rollout = after_call(environment, "look_up", {"word": "Paris"}, "<answer>Paris</answer>")
    system, user, _, result, _ = (message["content"] for message in rollout.messages)
    assert system.startswith("Be brief.") and "look_up" in system
    assert "<answer>" in user and user.endswith("Capital of France?")
    assert "Paris is a city" in result
    score = rollout.score
    assert (score["total_reward"], score["sample_metrics"]["look_up_calls"]) == (1.0, 1.0)


@pytest.mark.sandbox
def test_tools_in_a_sandbox_work_with_every_single_turn_environment():
    environment = get_environment("hendrycks_math", dataset="own", tools=["sandbox_python"], pool_size=1)
    gold = environment.get_sample(0).answer
    rollout = after_call(environment, "sandbox_python", {"code": "print(6*7)"}, rf"\boxed{{{gold}}}")
    assert "stdout:\n42" in rollout.messages[-2]["content"]
    assert rollout.score["total_reward"] == 1.0


async def test_a_rollout_by_its_path_returns_an_answer_to_score_or_a_result(rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def generate(prompt):
        return "<answer>Paris</answer>"

    context = SimpleNamespace(generate=generate)
    agent = made(rows, reward="exact", rollout="agents.py:agent")
    assert (await agent.rollout(agent.get_sample(0), context)).total_reward == 1.0
    scorer = made(rows, reward="exact", rollout="agents.py:scorer")
    assert await scorer.rollout(scorer.get_sample(0), context) == RewardResult(0.25)
    number = made(rows, reward="exact", rollout="agents.py:number")
    with pytest.raises(MalformedResultError, match="returned 3, not the answer"):
        await number.rollout(number.get_sample(0), context)


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"reward": "judge"}, r"reward: judge needs judge: \{url: ..., model: ...\} in its kwargs"),
    ({"reward": "judge", "judge": {"url": "policy"}}, "url: policy needs a rollout"),
    ({"reward": "judge", "judge": {"url": "http://x"}}, r"model is ''; set http"),
    ({"criteria": "It is short."}, "criteria belongs to reward: judge, and reward is 'math'. Leave it out"),
    ({"judge": JUDGE}, "judge belongs to reward: judge, and reward is 'math'. Add it, or leave it out"),
    ({"code": {}}, "code belongs to reward: code"),
    ({"reward": "code", "code": {"timeout_per_tset": 3}}, "no keyword argument 'timeout_per_tset'. Did you mean"),
    ({"reward": "code", "code": {"provider": "locl"}}, "provider='locl' is not known"),
    ({"reward": "code"}, r"rows.jsonl has no tests \(tests, .*Set tests to a column"),
    ({"reward": "code", "tests": "answer"}, r"'Paris' is not of the form \{\"inputs\": \[...\], \"outputs\""),
    ({"reward": "judge", "judge": JUDGE, "criteria": {"a": "two"}}, r'criteria\.a is "two", but it must be a number'),
    ({"reward": "judge", "judge": JUDGE, "criteria": 3}, "criteria is 3, but it must be text; put .*, or a map"),
    ({"reward": "judge", "judge": JUDGE, "criteria": "[1]"}, r"'\[1\]' has no criteria. Write a text"),
    ({"reward": "judge", "judge": JUDGE, "criteria": "rubrik"}, "criteria is 'rubrik'. Did you mean 'rubric'?"),
    ({"reward": "judge", "judge": JUDGE, "criteria": "empty"}, r"'None' has no criteria. Write a text"),
    (
        {"reward": "judge", "judge": JUDGE, "criteria": {"short": 0}},
        r"no criterion has a weight above 0: \{'short': 0\.0\}",
    ),
    ({"rollout": "agents.py:plain"}, "is no async function of a sample and a context"),
    ({"rollout": "agents.py:agnt"}, r"has no function 'agnt'\. It has: agent, scorer, number, plain, look_up"),
    ({"tools": ["nowhere:tool"]}, "the tool 'nowhere:tool' cannot be imported"),
    ({"tools": "agents.py:look_up"}, r"write a list: tools: \[agents.py:look_up\]"),
    ({"tools": {"mcp": "server"}}, r"write a list: tools: \[\{'mcp': 'server'\}\]"),
    ({"tool": ["agents.py:look_up"]}, "no keyword argument 'tool'. Did you mean 'tools'"),
    ({"tools": ["shel"]}, "there is no tool 'shel'; use shell or sandbox_python"),
])  # fmt: skip
def test_a_mistake_names_the_field_and_the_fix(rows, tmp_path, monkeypatch, kwargs, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as raised:
        len(made(rows, **kwargs))
    assert "\n" not in str(raised.value)
