"""`telescope envs`: what there is, what it takes, a rollout to read, a place to start from."""

import io
import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from tests.fakes.http import Handler, serve

from telescope.cli import chat
from telescope.cli.envs import KINDS
from telescope.cli.main import main
from telescope.environments.local_rollout import Answer, roll_out_item
from telescope.environments.registry import get_environment


def run(capsys, *arguments):
    code = main(["envs", *arguments])
    return code, *capsys.readouterr()


@pytest.fixture
def chat_server():
    """A model server that answers with what `reply` returns for the messages; keeps the requests."""

    class Model(Handler):
        requests, status = [], 200
        reply = staticmethod(lambda messages: "hello")

        def do_GET(self):
            self.send_json({"data": [{"id": "the-model"}]}, self.status)

        def do_POST(self):
            body = self.body
            self.requests.append((self.path, body, self.headers.get("Authorization")))
            message = {"content": type(self).reply(body["messages"])}
            self.send_json({"choices": [{"message": message, "finish_reason": "stop"}]}, self.status)

    with serve(Model) as Model.url:
        yield Model


def test_list_names_all_with_their_kind_and_import_problems(capsys, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "environment.py").write_text("import no_such_package_anywhere\n")
    code, out, _ = run(capsys, "list", "--json", "--path", str(tmp_path))
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert {name: rows[name]["kind"] for name in ("countdown", "wordle", "calculator_agent")} == {
        "countdown": "single turn", "wordle": "several turns", "calculator_agent": "tools"
    }  # fmt: skip
    assert "no_such_package_anywhere" in rows["broken"]["problem"]
    assert "wordle" in run(capsys, "list")[1]
    assert "broken" in run(capsys, "list", "--environments_path", str(tmp_path))[1]  # as telescope train calls it


def test_describe_lists_arguments(capsys):
    code, out, _ = run(capsys, "describe", "wordle")
    assert code == 0
    assert "wordle: several turns" in out and "word_source = 'own'" in out and "max_turns = 6" in out
    code, _, err = run(capsys, "describe", "wordel")
    assert code == 2 and "Did you mean 'wordle'?" in err


def test_try_runs_a_script_and_prints_the_conversation_and_the_reward(capsys):
    arguments = ["try", "calculator_agent", "--set", "prompt_style=short", "--set", "seed=1"]
    script = ["--answer", "<call>1+9</call>", "--answer", "<call>10+14</call>", "--answer", "<answer>24</answer>"]
    code, out, _ = run(capsys, *arguments, *script)
    assert code == 0
    lines = out.splitlines()
    assert lines[1:7] == ["[user] 1+9+14", "[assistant] <call>1+9</call>", "[tool] 10",
                          "[assistant] <call>10+14</call>", "[tool] 24", "[assistant] <answer>24</answer>"]  # fmt: skip
    assert lines[7] == "reward 1 (3 turns, final_answer)"


def test_an_answer_cannot_control_the_terminal(capsys):
    _, out, _ = run(capsys, "try", "wordle", "--answer", "[crane]\x1b]0;title\x07 \x1b[2J")
    assert "[crane] " in out and "\x1b" not in out and "title" not in out


def test_a_script_that_ends_early_scores_the_turns_so_far(capsys):
    code, out, _ = run(capsys, "try", "wordle", "--answer", "[crane]", "--answer", "[slate]")
    assert code == 0 and "(2 turns, no_more_answers)" in out and "num_guesses 2" in out
    arguments = ["try", "calculator_agent", "--set", "prompt_style=short", "--items", "3", "--json"]
    code, out, err = run(capsys, *arguments, "--answer", "<answer>24</answer>")
    assert code == 0 and len(json.loads(out)) == 1, "the item that was played is printed"
    assert "1 of 3 items were rolled out" in err
    code, out, _ = run(capsys, *arguments[:-3], "--answer", "<answer>24</answer>", "--answer", "more")
    assert code == 0 and "answers not used: 1" in out


def test_the_end_of_the_input_ends_an_interactive_rollout(capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("[crane]\n\n[sla\nte]\n\n"))
    code, out, err = run(capsys, "try", "wordle")
    assert code == 0 and "(2 turns, no_more_answers)" in out
    assert "Ctrl-D ends the rollout" in err
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    assert run(capsys, "try", "wordle")[0] == 2


def test_a_model_is_served_meanwhile_and_answers_with_what_its_context_leaves(capsys, chat_server, monkeypatch):
    served = []

    @contextmanager
    def serving(config, target):
        served.append((config.model, target))
        yield chat_server.url, "its key"
        served.append("ended")

    monkeypatch.setattr(chat, "find_target", lambda model: model)
    monkeypatch.setattr(chat, "build_config", lambda target: SimpleNamespace(model=target))
    monkeypatch.setattr(chat, "serving", serving)
    monkeypatch.setattr(chat, "find_stops", lambda config, target: {"stop_token_ids": [7]})
    arguments = ["--set", "dataset=own", "--model", "models/tiny", "--items", "2"]
    code, out, _ = run(capsys, "try", "hendrycks_math", *arguments)
    assert code == 0 and out.count("[assistant] hello") == 2
    assert served == [("models/tiny", "models/tiny"), "ended"]
    _, body, key = chat_server.requests[-1]
    assert key == "Bearer its key" and body["model"] == "the-model" and "max_tokens" not in body
    assert body["stop_token_ids"] == [7]
    code, _, err = run(capsys, "try", "wordle", "--model", "models/tiny", "--answer", "1")
    assert code == 2 and "--model and --answer cannot be combined" in err


OWN_TOOLS = """
from telescope.environments.base import RewardResult, Sample
from telescope.environments.tool_env import ToolEnvironment

class Own(ToolEnvironment):
    def __init__(self, **kwargs):
        super().__init__(tools=[], **kwargs)

    def load_dataset(self, num_samples=-1):
        return [Sample("?", answer="!")]

    def compute_reward(self, state, eos_token=""):
        return RewardResult(1.0)
"""


def test_a_malformed_reward_is_a_message(capsys, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "environment.py").write_text(OWN_TOOLS.replace("RewardResult(1.0)", "1.0"))
    code, _, err = run(capsys, "try", "own", "--path", str(tmp_path), "--answer", "x")
    assert (
        code == 2
        and "own, item 0: compute_reward returned float 1.0, not a RewardResult: write `return RewardResult(" in err
    )
    (tmp_path / "agent").mkdir()
    reward, rollout = 'def compute_reward(self, state, eos_token="")', "async def rollout(self, sample, context)"
    agent = OWN_TOOLS.replace(reward, rollout)
    (tmp_path / "agent" / "environment.py").write_text(agent.replace("RewardResult(1.0)", "1.0"))
    code, _, err = run(capsys, "try", "agent", "--path", str(tmp_path), "--answer", "x")
    assert (
        code == 2
        and "agent, item 0: rollout returned float 1.0, not a RewardResult: write `return RewardResult(" in err
    )


@pytest.mark.parametrize(("body", "message"), [
    ('return [{"prompt": "x"}]', "load_dataset of 'own' returned {'prompt': 'x'}, which is no Sample. Return Sample("),
    ("return [1 / 0]", "Loading own and its dataset failed: ZeroDivisionError: division by zero at "),
])  # fmt: skip
def test_a_dataset_that_cannot_be_loaded_is_a_message(capsys, tmp_path, body, message):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "environment.py").write_text(
        "from telescope.environments import SingleTurnEnvironment\n\n"
        f"class Own(SingleTurnEnvironment):\n    def load_dataset(self, num_samples=-1):\n        {body}\n"
        "    def compute_reward(self, completion, sample, eos_token=''): ...\n"
    )
    code, _, err = run(capsys, "try", "own", "--path", str(tmp_path), "--answer", "x")
    assert code == 2 and message in err and "Traceback" not in err


def test_arguments_set_by_the_class_and_the_docstring_of_its_base_are_not_shown(capsys, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "environment.py").write_text(OWN_TOOLS)
    code, out, _ = run(capsys, "describe", "own", "--path", str(tmp_path))
    assert code == 0 and "max_turns = 10" in out and "\n  tools" not in out
    assert "It has no description." in out and "class Own" in out
    code, _, err = run(capsys, "try", "own", "--path", str(tmp_path), "--set", "tools=[]", "--answer", "x")
    assert code == 2 and "multiple values for keyword argument 'tools'" in err


def test_describe_shows_what_the_class_sets_for_a_null(capsys, tmp_path):
    (tmp_path / "asks").mkdir()
    (tmp_path / "asks" / "environment.py").write_text(
        "from telescope.environments import SingleTurnEnvironment\n\n"
        "class Asks(SingleTurnEnvironment):\n    system_prompt = 'Be brief.'\n"
        "    def __init__(self, max_turns=None, **kwargs):\n        super().__init__(**kwargs)\n"
        "    def load_dataset(self): ...\n    def compute_reward(self, completion, sample, eos_token=''): ...\n"
    )
    code, out, _ = run(capsys, "describe", "asks", "--path", str(tmp_path))
    assert code == 0 and "max_turns = None" in out and "system_prompt = 'Be brief.'" in out


def test_try_uses_a_model_server(capsys, chat_server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")

    def reply(messages):
        question, results = messages[0]["content"], [m["content"] for m in messages if m["role"] == "tool"]
        return f"<answer>{results[-1]}</answer>" if results else f"<call>{question}</call>"

    chat_server.reply = staticmethod(reply)
    settings = ["--items", "3", "--json", "--set", "prompt_style=short", "--set", "max_operations=1"]
    code, out, err = run(capsys, "try", "calculator_agent", "--url", chat_server.url, *settings)
    records = json.loads(out)
    assert code == 0
    assert [record["score"]["total_reward"] for record in records] == [1.0] * 3
    assert [message["role"] for message in records[0]["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert "reward 1 (2 turns, final_answer)" in err
    path, body, key = chat_server.requests[0]
    assert (path, body["model"], key) == ("/v1/chat/completions", "the-model", "Bearer secret")


def test_bad_input_is_reported_without_hanging(capsys, chat_server, monkeypatch):
    for arguments, words in (
        (["--answer", "x", "--url", "http://x"], "give one of them"),
        (["--set", "seed"], "write it as KEY=VALUE"),
        (["--set", "sed=1", "--answer", "x"], "Did you mean 'seed'"),
        (["--item", "100000", "--answer", "x"], "There is no item 100000: the dataset has 625"),
        (["--url", "localhost:1"], "write it with http://"),
        ([], "no source of answers"),
    ):
        code, _, err = run(capsys, "try", "wordle", *arguments)
        assert code == 2 and words in err, arguments
    chat_server.status = 503
    code, _, err = run(capsys, "try", "wordle", "--url", chat_server.url)
    assert code == 1 and "/v1/models answered 503" in err and "OPENAI_API_KEY" not in err
    chat_server.status = 401
    for options in ([], ["--model", "m"]):
        code, _, err = run(capsys, "try", "wordle", "--url", chat_server.url, *options)
        assert code == 1 and "Set the environment variable OPENAI_API_KEY" in err and "local_rollout.py" not in err


@pytest.mark.parametrize("response", ["SSH-2.0-OpenSSH_9.6", "HTTP/1.1 500 No\r\nContent-Length: 900\r\n\r\n..."])
def test_a_server_of_something_else_is_named(capsys, response):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def respond() -> None:
            with server.accept()[0] as connection:
                connection.recv(65536)
                connection.sendall(response.encode() + b"\r\n")

        threading.Thread(target=respond, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        code, _, err = run(capsys, "try", "wordle", "--url", url)
    assert code == 1 and f"{url}/v1/models" in err and "local_rollout.py" not in err


def test_an_impossible_port_is_an_error_of_one_line(capsys):
    code, _, err = run(capsys, "try", "wordle", "--url", "http://localhost:80a")
    assert code == 1 and "nonnumeric port: '80a'" in err and "local_rollout.py" not in err


@pytest.mark.timeout(300)
def test_new_writes_environments_whose_tests_pass_and_fail_when_the_reward_is_wrong(capsys, tmp_path):
    folder = tmp_path / "mine"
    for kind in KINDS:
        code, out, _ = run(capsys, "new", f"my_{kind}", "--kind", kind, "--folder", str(folder))
        assert code == 0 and f"telescope envs try my_{kind} --path {folder}" in out
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(place) for place in sys.path)}
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    finished = subprocess.run(pytest_command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0 and "10 passed" in finished.stdout, finished.stdout + finished.stderr
    for kind in KINDS:
        file = folder / f"my_{kind}" / "environment.py"
        source = file.read_text()
        assert source.count("correct = ") == 1
        file.write_text(source.replace("correct = ", "correct = True or "))
    finished = subprocess.run(pytest_command, cwd=folder, env=environ, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 1 and finished.stdout.count("\nFAILED") >= 4, finished.stdout


def test_new_refuses_a_used_or_invalid_name(capsys, tmp_path):
    assert run(capsys, "new", "mine", "--path", str(tmp_path))[0] == 0
    code, _, err = run(capsys, "new", "mine", "--folder", str(tmp_path))
    assert code == 2 and "exists already" in err
    _, out, _ = run(capsys, "new", "mine", "--folder", str(tmp_path / "my envs"))
    assert f"telescope envs check mine --path '{tmp_path}/my envs'" in out
    _, out, _ = run(capsys, "new", "wordle", "--folder", str(tmp_path))
    assert "also the name of an installed environment" in out
    for name in ("My-Env", "1st", "class", "../up"):
        code, _, err = run(capsys, "new", name, "--folder", str(tmp_path))
        assert code == 2 and "cannot be the name of an environment" in err


async_environment = """
import asyncio
from telescope.environments.base import MultiTurnEnvironment, RewardResult, RolloutState, Sample

class Later(MultiTurnEnvironment):
    ended = []
    def load_dataset(self, num_samples=-1):
        return [Sample("Go.")]
    async def create_initial_state(self, sample):
        await asyncio.sleep(0)
        return RolloutState(sample, self.name)
    async def env_response(self, messages, state):
        await asyncio.sleep(0)
        if "fail" in messages[-1]["content"]:
            raise ValueError("no luck")
        return [{"role": "user", "content": "on"}]
    def is_done(self, state):
        asyncio.run(asyncio.sleep(0))  # plain code, outside of any loop
        return super().is_done(state)
    async def compute_reward(self, state, eos_token=""):
        return RewardResult(float(state.num_turns))
    async def end_rollout(self, state):
        self.ended.append(state.num_turns)
"""


def test_async_environments_are_rolled_out_and_cleaned_up(tmp_path):
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "environment.py").write_text(async_environment)
    environment = get_environment("later", environments_path=[tmp_path], max_turns=3)
    played = roll_out_item(environment, 0, lambda messages: Answer("go"))
    assert (played.score["total_reward"], played.num_turns, played.end_reason) == (3.0, 3, "max_turns_reached")
    with pytest.raises(ValueError, match="no luck"):
        roll_out_item(environment, 0, lambda messages: Answer("fail"))
    assert environment.ended == [3, 1]
