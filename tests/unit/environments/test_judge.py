"""A judge scores answers, and one that fails masks the sample instead of scoring it."""

import asyncio
import contextlib
import itertools
import json
import time

import pytest
from tests.fakes.judge import grades, judge_server, make_retries_quick

from telescope.environments import judge
from telescope.environments.grading import agreement
from telescope.environments.judge import COMPLETE, USAGE, Judge
from telescope.errors import InfrastructureError, UserError

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.fixture(autouse=True)
def quick_retries_without_a_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    make_retries_quick(monkeypatch)


@pytest.fixture
def usage():
    token = USAGE.set({})
    yield USAGE.get()
    USAGE.reset(token)


@contextlib.asynccontextmanager
async def judging(answer, **settings):
    with judge_server(answer) as (url, requests):
        judge = Judge(**{"url": url, "model": "j", **settings})
        yield judge, requests
        await judge.close()


async def test_criteria_are_graded_and_weighted(usage):
    def answer(body):
        found = json.loads(grades(body, 10))
        return json.dumps(found | {"criterion_2": 5, "criterion_3": 10})

    settings = {"price_in": 2.0, "price_out": 10.0, "sampling": {"temperature": 0.0, "top_k": 1}}
    async with judging(answer, **settings) as (judge, requests):
        criteria = {"It is right.": 3.0, "It is short.": 1.0, "It flatters.": -1.0}
        score = await judge.score("2 + 2?", "<think>Hm, five.</think>4", reference="four", criteria=criteria)
    assert score == (3 * 1.0 + 1 * 0.5 - 1 * 1.0) / 4
    (request,) = requests
    prompt = request["messages"][0]["content"]
    assert all(text in prompt for text in ("2 + 2?", "\n4\n", "four", "It is short.")) and "five" not in prompt
    assert (request["temperature"], request["top_k"]) == (0.0, 1)
    assert request["response_format"]["json_schema"]["strict"]
    assert {name: value for name, value in usage.items() if name != "judge/seconds"} == {
        "judge/calls": 1, "judge/failures": 0, "judge/tokens": 110, "judge/cost": pytest.approx(300e-6),
    }  # fmt: skip


async def test_an_empty_answer_is_zero_without_a_judge_and_a_missing_sdk_is_named_before_the_first_request(monkeypatch):
    judge_of_nothing = Judge(url="http://127.0.0.1:9/v1", model="j")
    assert [await judge_of_nothing.score("?", text) for text in (" ", "<think>never ends")] == [0.0, 0.0]
    monkeypatch.setattr(judge, "is_installed", lambda name: False)
    with pytest.raises(UserError, match=r"needs the package openai\. Install it: pip install openai"):
        Judge(url="http://x/v1", model="j")


async def test_an_answer_cannot_close_the_marks_around_it():
    async with judging(lambda body: grades(body, 0)) as (judge, requests):
        for answer in ("a", "b"):
            await judge.score("?", answer)
    marks = [request["messages"][0]["content"].split("two marks ")[1][:12] for request in requests]
    assert len(set(marks)) == 2


async def test_equal_requests_are_asked_once(usage):
    def slowly(body):
        time.sleep(0.05)
        return '{"n": 1}'

    async with judging(slowly, cache_size=2) as (judge, requests):
        at_once = await asyncio.gather(*(judge.ask("same", SCHEMA) for _ in range(5)))
        at_once[0]["n"] = 2
        assert await judge.ask("same", SCHEMA) == {"n": 1}
        assert (len(requests), usage["judge/calls"], usage["judge/cache_hits"]) == (1, 6, 5)
        await judge.ask("same", SCHEMA, "other model")
        await judge.ask("same")
        await judge.ask("same", SCHEMA)
        assert len(requests) == 4, "model and schema count, and the oldest of three answers is forgotten"


async def test_a_cancelled_rollout_does_not_cancel_the_request_of_another():
    def slowly(body):
        time.sleep(0.2)
        return "yes"

    async with judging(slowly) as (judge, requests):
        first, second = (asyncio.create_task(judge.ask("same")) for _ in range(2))
        await asyncio.sleep(0.05)
        first.cancel()
        assert await second == "yes"
    assert len(requests) == 1


async def test_at_most_max_concurrent_requests_are_open():
    lock_free, most = itertools.count(), []
    open_now = []

    def answer(body):
        open_now.append(next(lock_free))
        most.append(len(open_now))
        time.sleep(0.02)
        open_now.pop()
        return "yes"

    async with judging(answer, max_concurrent=3) as (judge, _):
        await asyncio.gather(*(judge.ask(str(number)) for number in range(12)))
    assert max(most) == 3


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
async def test_a_server_that_fails_half_of_the_time_is_asked_again(usage, status):
    turn = itertools.count()
    async with judging(lambda _: (status, "busy", {"Retry-After": "0.01"}) if next(turn) % 2 == 0 else "ok") as (
        judge,
        _,
    ):
        assert [await judge.ask(text) for text in "abc"] == ["ok"] * 3
    assert (usage["judge/calls"], usage["judge/failures"]) == (3, 3)


async def test_the_server_says_when_to_ask_again():
    turn = itertools.count()
    async with judging(lambda _: "ok" if next(turn) else (429, "slow down", {"Retry-After": "0.3"})) as (judge, _):
        started_at = time.monotonic()
        assert await judge.ask("a") == "ok"
    assert time.monotonic() - started_at >= 0.3


async def test_an_answer_that_does_not_fit_is_asked_for_again(usage):
    answers = iter(["no JSON", '{"n": "one"}', '<think>{"n": 3}</think>$\\frac{1}{2}$:\n```json\n{"n": 7}\n```'])
    async with judging(lambda _: next(answers)) as (judge, requests):
        assert await judge.ask("How many?", SCHEMA) == {"n": 7}
    assert usage["judge/failures"] == 2
    assert "'one' is not of type 'integer'" in requests[2]["messages"][0]["content"]


FAILURES = {
    "never fits": (lambda body: "no JSON", r"its answers do not fit the schema; the last: 'no JSON'"),
    "always down": (lambda body: (500, "broken", {}), "500.*broken"),
    "refuses": (lambda body: (400, "no such model", {}), "400.*no such model"),
    "says nothing": (lambda body: (200, None, {}), "do not fit"),
    "too slow": (lambda body: time.sleep(0.6) or "late", r"no answer within 0.5 seconds \(timeout_seconds\)"),
}


@pytest.mark.parametrize(("answer", "reason"), FAILURES.values(), ids=FAILURES)
async def test_a_failure_names_url_model_and_reason_and_is_not_remembered(answer, reason):
    is_broken = True
    async with judging(
        lambda body: answer(body) if is_broken else '{"n": 1}',
        model="grader",
        timeout_seconds=0.5 if "within" in reason else 30,
    ) as (judge, _):
        with pytest.raises(InfrastructureError, match=rf"the judge 'grader' at {judge.url} failed: .*{reason}"):
            await judge.ask("a", SCHEMA)
        is_broken = False
        assert await judge.ask("a", SCHEMA) == {"n": 1}


async def test_a_judge_that_cannot_work_is_an_error_before_a_run(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    with judge_server(lambda _: (401, "wrong key", {})) as (url, requests):
        with pytest.raises(UserError, match=r"401.*variable MY_KEY \(api_key_variable\) has a key that.*Correct url"):
            await Judge(url=url, model="j", api_key_variable="MY_KEY").check()
        with pytest.raises(InfrastructureError, match=r"401.*OPENAI_API_KEY \(api_key_variable\) is not set$"):
            await Judge(url=url, model="j").ask("a")
        assert requests[0]["key"] == "secret"
    with pytest.raises(UserError, match=r"Connection error.*Correct url .*model, or the key\.$"):
        await Judge(url=url, model="j").check()
    with judge_server(lambda body: grades(body, 0)) as (url, _):
        await Judge(url=url, model="j").check()


@pytest.mark.parametrize(("settings", "message"), [
    ({"url": "https://api.openai.com/v1", "model": "j"}, r"needs a key\. Set OPENAI_API_KEY, or api_key_variable"),
    ({"url": "http://x/v1", "model": "j", "api_key_variable": "NO_KEY"}, r"needs a key\. Set NO_KEY"),
    ({"url": "http://x/v1"}, r"model is ''; set http\(s\)://... and a model"),
    ({"url": "localhost:8000", "model": "j"}, r"url is 'localhost:8000'"),
    ({"url": "policy", "max_concurent": 3}, r"max_concurent is 3, but there is no such key\. A judge takes: url, "),
    ({"model": "j"}, r'^judge is {"model": "j"}, but url is missing'),
    ({"url": "policy", "max_concurrent": 0}, r"^judge\.max_concurrent is 0, but it must be at least 1"),
    ({"url": "policy", "price_in": "a"}, r'^judge\.price_in is "a", but it must be a number'),
    ("gpt-5", r"^judge is 'gpt-5', but it must be a mapping"),
])  # fmt: skip
def test_a_mistake_in_the_settings_is_named(settings, message):
    with pytest.raises(UserError, match=message):
        Judge.of(settings)


async def test_the_policy_judges_within_a_rollout_and_is_asked_every_time():
    judge, asked = Judge(url="policy"), []

    async def complete(prompt):
        asked.append(prompt)
        return json.dumps({"n": len(asked)})

    with pytest.raises(UserError, match="judges only within a rollout"):
        await judge.ask("a", SCHEMA)
    token = COMPLETE.set(complete)
    assert [(await judge.ask("a", SCHEMA))["n"] for _ in range(2)] == [1, 2]
    COMPLETE.reset(token)
    assert "fits this JSON schema" in asked[0]


def test_a_judge_works_in_one_event_loop_after_another():
    with judge_server(lambda body: body["messages"][0]["content"]) as (url, requests):
        judge = Judge(url=url, model="j")
        assert [asyncio.run(judge.ask(text)) for text in ("a", "b", "a")] == ["a", "b", "a"]
    assert len(requests) == 2


async def test_agreement_compares_a_judge_with_labels():
    given = zip("ggggbbbb", [1] * 5 + [0] * 3, strict=True)
    rows = [{"question": "?", "answer": answer, "label": label} for answer, label in given]
    async with judging(lambda body: grades(body, 9 if "\ng\n" in body["messages"][0]["content"] else 1)) as (judge, _):
        assert await agreement(judge, rows) == (0.875, pytest.approx(0.75))
        assert await agreement(judge, rows[:2]) == (1.0, 1.0)
