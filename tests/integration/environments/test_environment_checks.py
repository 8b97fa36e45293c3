"""`telescope envs check`: reference solutions earn the full reward, cheats earn nothing, forks show their cause."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.fakes.http import Handler, serve
from tests.fakes.judge import grades, judge_server

from telescope.cli.main import main
from telescope.environments.registry import list_environments
from telescope.environments.terminal_tasks import environment as terminal
from telescope.environments.terminal_tasks.tasks import own_tasks

OFFLINE = {
    "agent_countdown": {"dataset": "generated", "num_samples": 20, "pool_size": 1},
    "calculator_agent": {}, "countdown": {"dataset": "generated", "num_samples": 20}, "dapo_math": {"dataset": "own"},
    "dataset": {"reward": "exact"}, "deepscaler": {"dataset": "own"}, "hendrycks_math": {"dataset": "own"},
    "i3_code": {"dataset": "own", "timeout_per_test": 4.0, "max_num_tests": 4, "pool_size": 2},
    "reasoning_gym": {"size": 20},
    "shell_countdown": {"dataset": "generated", "num_samples": 20, "pool_size": 2},
    "terminal_tasks": {"pool_size": 2}, "textarena": {"size": 20}, "wordle": {},
}  # fmt: skip
"""Arguments with which an environment needs no network."""
SERVERS = {"openenv", "verifiers"}
"""Environments whose tasks and rewards another program has."""
TASKS = {"reasoning_gym": "reasoning_gym:spell_backward", "textarena": "textarena:TicTacToe-v0"}
RUN_CODE = {"i3_code", "shell_countdown", "terminal_tasks"}

BODY = """
from telescope.environments import Environment, RewardResult, Sample

class Own(Environment):
    reward_max = 1.0
    def load_dataset(self, num_samples=-1):
        return [Sample("What is 2 + 2?", "4")]
"""
LENIENT = f"""{BODY}
    def compute_reward(self, completion, sample, eos_token=""):
        return RewardResult(float(sample.answer in completion or not completion))
"""
CLIENT = f"""{BODY}
    def solution(self, sample):
        return ["a", "b", "c", "<answer>4</answer>"]
    async def rollout(self, sample, context):
        async with context.openai() as client:
            async def ask(*texts):
                messages = [dict(role=role, content=text) for role, text in zip(["user", "assistant"] * 9, texts)]
                done = await client.chat.completions.create(model="policy", messages=messages)
                return done.choices[0].message.content
            first = await ask("Go.")
            second = await ask("Go.", first, "On.")
            await ask("Go.", first, "Another way.")
            last = await ask("Go.", "No.", "End.")
        return RewardResult(float(last == "<answer>4</answer>"))
"""


def check(capsys, name, *options, kwargs=None):
    """Runs the command. Returns the exit code, and what it printed."""
    sets = [text for key, value in (kwargs or {}).items() for text in ("--set", f"{key}={yaml.safe_dump(value)[:-1]}")]
    code = main(["envs", "check", name, *sets, *map(str, options)])
    return code, *capsys.readouterr()


def write(folder, source, name="own"):
    (folder / name).mkdir()
    (folder / name / "environment.py").write_text(source)
    return ["--path", folder]


def test_every_environment_is_checked_here():
    assert set(list_environments()) == set(OFFLINE) | SERVERS


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in RUN_CODE)) for name in OFFLINE]
)
def test_shipped_environments_reward_their_solution_and_no_cheat(capsys, monkeypatch, tmp_path, name):
    quick = [replace(task, verifier_seconds=3.0) for task in own_tasks()]
    monkeypatch.setattr(terminal, "own_tasks", lambda: quick)
    kwargs = dict(OFFLINE[name])
    if name == "dataset":
        rows = [{"question": "What is 40 + 2?", "answer": "42"}, {"question": "Capital of France?", "answer": "Paris"}]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        kwargs["path"] = str(tmp_path / "rows.jsonl")
    code, out, err = check(capsys, TASKS.get(name, name), "--samples", 2, kwargs=kwargs)
    assert code == 0 and "FAILED" not in out, out + err
    assert "empty answer" in out
    assert name == "textarena" or "reference solution" in out
    assert ("conftest.py planted" in out) == (name in RUN_CODE)


@pytest.mark.slow
def test_a_dataset_whose_answers_are_programs_is_checked_like_other_code(capsys, tmp_path):
    tests = {"inputs": [[1], [2]], "outputs": [2, 4], "fn_name": "twice"}
    row = {"prompt": "Double a number with twice(n).", "tests": tests, "solution": "def twice(n):\n    return 2 * n"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    kwargs = {"path": str(tmp_path / "rows.jsonl"), "reward": "code", "code": {"timeout_per_test": 2, "pool_size": 1}}
    code, out, err = check(capsys, "dataset", kwargs=kwargs)
    assert code == 0 and "grader timed out" in out and "reference solution" in out, out + err


@pytest.mark.parametrize("agent", ["checker", "compacting", "sandboxed"])
def test_every_agent_of_countdown_earns_its_reward_with_the_solution(capsys, agent):
    kwargs = OFFLINE["agent_countdown"] | {"agent": agent}
    code, out, err = check(capsys, "agent_countdown", "--samples", 1, kwargs=kwargs)
    assert code == 0 and "reference solution" in out, out + err


def test_a_rewarded_cheat_fails_the_check_with_the_answer_that_earned_it(capsys, tmp_path):
    code, out, err = check(capsys, "own", *write(tmp_path, LENIENT))
    assert code == 1 and "FAILED" in out
    assert "own: empty answer, item 0: '' earned 1. Let the reward be 0 for it" in err
    assert "own: gold pasted, item 0: '4' earned 1" in err
    assert "prompt echoed" in out and "prompt echoed" not in err


def test_a_gold_that_ends_the_solution_is_no_cheat(capsys, tmp_path):
    source = f"""{BODY}
    def solution(self, sample):
        return ["I add.", sample.answer]
    async def rollout(self, sample, context):
        first = await context.generate([{{"role": "user", "content": "Go."}}])
        last = await context.generate([{{"role": "user", "content": first.text}}])
        return RewardResult(float(last.text == sample.answer))
"""
    code, out, err = check(capsys, "own", *write(tmp_path, source))
    assert code == 0 and "gold pasted" not in out, out + err


def test_a_solution_that_earns_too_little_fails_the_check_and_may_be_given(capsys, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "6 * 7?", "answer": "42"}))
    kwargs = {"path": str(tmp_path / "rows.jsonl"), "reward": "regex", "pattern": "Final: (.*)"}
    code, _, err = check(capsys, "dataset", kwargs=kwargs)
    assert code == 1 and "reference solution, item 0: '<answer>42</answer>' earned 0 instead of 1." in err
    assert check(capsys, "dataset", "--solution", "Final: {}", kwargs=kwargs)[0] == 0


def test_a_task_whose_solution_fails_shows_what_it_and_the_tests_print(capsys, tmp_path):
    for name, content in {
        "task.toml": "", "instruction.md": "Count the words.", "tests/test.sh": "cat /app/count.txt",
        "solution/solve.sh": "echo 'no such poem'; exit 3",
    }.items():  # fmt: skip
        path = tmp_path / "tasks/count" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    arguments = ["--set", f"tasks={tmp_path / 'tasks'}", "--set", "pool_size=1"]
    assert main(["envs", "check", "terminal_tasks", *arguments]) == 1
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("exit code: 3", "no such poem", "task: count", "/app/count.txt: No such"))


def test_a_solution_without_a_gold_may_be_given(capsys, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Are you there?"}))
    kwargs = {"path": str(tmp_path / "rows.jsonl"), "reward": "regex", "pattern": "ready"}
    code, out, _ = check(capsys, "dataset", "--solution", "I am ready.", kwargs=kwargs)
    assert code == 0 and "item 0, reference solution: reward 1, " in out


def test_a_bug_that_fails_every_trial_is_printed_once(capsys, tmp_path):
    failing = f"{BODY}\n    async def rollout(self, sample, context):\n        return context.nothing\n"
    code, _, err = check(capsys, "own", *write(tmp_path, failing))
    assert code == 1 and err.count("Traceback") == 1, err
    assert "own: reference solution, item 0 and 3 other trials: rollout failed: AttributeError" in err


def test_a_bug_that_fails_every_trial_of_several_turns_is_printed_once(capsys, tmp_path):
    failing = BODY.replace("import Environment", "import MultiTurnEnvironment").replace("(Environ", "(MultiTurnEnviron")
    failing += "\n    def env_response(self, messages, state):\n        return state.nothing\n"
    failing += "\n    def compute_reward(self, state, eos_token=''): ...\n"
    code, _, err = check(capsys, "own", *write(tmp_path, failing))
    assert code == 1 and "own: reference solution, item 0 and 3 other trials: respond failed: Attribute" in err, err


def test_a_cheat_whose_samples_are_all_masked_is_not_checked(capsys, tmp_path):
    masking = f"""{BODY}
    def compute_reward(self, completion, sample, eos_token=""):
        from telescope.errors import InfrastructureError
        if sample.answer not in completion:
            raise InfrastructureError("the judge is away")
        return RewardResult(float("<answer>" in completion))
"""
    code, out, err = check(capsys, "own", *write(tmp_path, masking))
    assert code == 1 and "none (masked)" in out and out.count("not checked") == 2, out
    assert "own: empty answer and 1 other trial: not checked, because each of its samples was masked: " in err
    assert "the judge is away" in err and "FAILED" not in out


def test_a_judge_that_fails_every_trial_is_one_line_without_a_stack(capsys, tmp_path):
    failing = f"""{BODY}
    def compute_reward(self, completion, sample, eos_token=""):
        from telescope.errors import InfrastructureError
        raise InfrastructureError("the judge is away")
"""
    code, _, err = check(capsys, "own", *write(tmp_path, failing))
    assert code == 1 and err.splitlines()[-1].startswith("own: reference solution, item 0 and 3 other trials: "), err
    assert err.count("the judge is away") == 1 and "Traceback" not in err


def test_a_package_that_a_dataset_lacks_is_one_line_with_the_command_that_installs_it(capsys, tmp_path):
    lacking = LENIENT.replace("return [Sample", "import absent.part; return [Sample")
    code, _, err = check(capsys, "own", *write(tmp_path, lacking))
    assert code == 2 and err.count("\n") == 1 and "perhaps with: pip install absent) at " in err, err


def test_a_program_that_fails_without_a_call_is_named_with_its_output(capsys, tmp_path):
    failing = f"""{BODY}
    async def rollout(self, sample, context):
        await context.run(["python3", "missing.py"])
        return RewardResult(0.0)
"""
    code, _, err = check(capsys, "own", *write(tmp_path, failing))
    assert code == 1 and "python3 ended with exit code 2: " in err and "missing.py" in err


def test_forks_of_an_agent_are_shown_with_their_cause(capsys, tmp_path):
    code, out, err = check(capsys, "own", *write(tmp_path, CLIENT))
    assert code == 0, out + err
    tree = out.splitlines()
    assert tree[0].startswith("item 0, reference solution: reward 1, 4 calls, ")
    assert [line.partition("call ")[2][0] for line in tree[1:5]] == ["1", "3", "2", "4"]
    assert "fork, branch: +" in tree[2]
    assert "fork, edited_history: +" in tree[4]
    assert tree[5] == "└── metrics: agent/calls 4"


def test_a_new_agent_passes_the_check_and_its_answers_can_be_tried(capsys, tmp_path):
    assert main(["envs", "new", "mine", "--kind", "agent", "--folder", str(tmp_path)]) == 0
    assert "telescope envs check mine" in capsys.readouterr().out
    code, out, err = check(capsys, "mine", "--path", tmp_path, "--samples", 2)
    assert code == 0 and "reference solution: reward 1, 2 calls" in out, out + err
    arguments = ["envs", "try", "mine", "--path", str(tmp_path), "--answer", "Hm.", "--answer", "<answer>27</answer>"]
    assert main(arguments) == 0
    assert "[assistant] <answer>27</answer>\nreward 1 (2 turns)" in capsys.readouterr().out
    assert main(["envs", "describe", "mine", "--path", str(tmp_path)]) == 0
    assert "mine: agent, class Mine" in capsys.readouterr().out


def test_trying_an_agent_that_needs_a_tokenizer_names_the_command_that_has_one(capsys, tmp_path):
    write(tmp_path, CLIENT)
    assert main(["envs", "try", "own", "--path", str(tmp_path), "--answer", "x"]) == 2
    assert "Run `telescope envs check own`" in capsys.readouterr().err


def test_a_served_model_answers_beside_the_script(capsys, tmp_path, tokenizer_path):
    requests = []

    class Server(Handler):
        def do_GET(self):
            self.send_json({"data": [{"id": "served"}]})

        def do_POST(self):
            requests.append(self.body)
            self.send_json({"choices": [{"text": "[crane]", "finish_reason": "stop"}]})

    with serve(Server) as url:
        code, out, err = check(capsys, "wordle", "--url", url, "--model", tokenizer_path, "--samples", 1)
    assert code == 0 and "the model: reward" in out and "'[crane]'" in out, out + err
    assert requests[0]["model"] == "served" and isinstance(requests[0]["prompt"][0], int)
    assert check(capsys, "wordle", "--url", url)[0] == 2


def test_a_judge_is_compared_with_labels(capsys, tmp_path):
    rows = [{"prompt": "2 + 2?", "answer": answer, "label": label} for answer, label in (("4", 1), ("5", 0))]
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "2 + 2?", "answer": "4"}))

    def run(grade):
        with judge_server(lambda body: grades(body, grade(str(body["messages"])))) as (url, _):
            kwargs = {"path": str(tmp_path / "rows.jsonl"), "reward": "judge", "judge": {"url": url, "model": "j"}}
            return check(capsys, "dataset", "--labels", tmp_path / "labels.jsonl", kwargs=kwargs)

    code, out, err = run(lambda prompt: 10 * ("\\n4\\n" in prompt or ">4<" in prompt))
    assert "The judge agrees with 100.0% of 2 labels (Cohen's kappa 1.00)." in out, out + err
    code, out, err = run(lambda prompt: 10)
    assert code == 1 and "the judge agrees with the labels no more than chance does" in err
    (tmp_path / "labels.jsonl").write_text('{"answer": "4"}')
    assert "Write lines of the form" in run(lambda prompt: 10)[2]
    assert check(capsys, "wordle", "--labels", Path(tmp_path / "labels.jsonl"))[0] == 2


def test_a_rollout_that_blocks_the_event_loop_ends_the_check_with_its_line(tmp_path):
    rollout = "    async def rollout(self, sample, context):\n        __import__('time').sleep(600)\n"
    write(tmp_path, BODY + rollout)
    program = (
        "import functools, sys; from telescope.cli import envs_check; from telescope.cli.main import main; "
        "envs_check.Checks = functools.partial(envs_check.Checks, timeout_seconds=1.0); "
        "main(['envs', 'check', 'own', '--path', sys.argv[1]])"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # short enough for sockets
        variables = {**os.environ, "RAY_TMPDIR": temporary, "TMPDIR": temporary}
        ended = subprocess.run(
            [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=False, env=variables
        )
        assert ended.returncode == 1
        assert "own/environment.py:9 blocks the event loop" in ended.stderr
        until = time.monotonic() + 20
        while os.listdir(temporary) and time.monotonic() < until:
            time.sleep(0.05)
        assert not os.listdir(temporary), "its temporary files stay behind"


def test_a_prompt_that_cannot_be_rendered_ends_the_check_with_its_item(capsys, tmp_path):
    source = LENIENT.replace(
        """return [Sample("What is 2 + 2?", "4")]""", """return [Sample("a", "4"), Sample(None, "4")]"""
    )
    code, _, error = check(capsys, "own", *write(tmp_path, source))
    assert (code, "telescope: environment 'own', item 1: preparing the prompt failed" in error) == (2, True)


def test_an_answer_that_a_call_cuts_off_is_marked(capsys, tmp_path):
    cuts = f"""{BODY}
    async def rollout(self, sample, context):
        await context.generate([dict(role="user", content="Go.")], sampling=dict(max_tokens=3))
        return RewardResult(0.0)
"""
    assert "sampled 3 (cut off), " in check(capsys, "own", *write(tmp_path, cuts))[1]
