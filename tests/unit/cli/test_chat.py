"""`telescope chat` without vLLM: commands, printing, and a server that answers, refuses or breaks off."""

import io
import json

import pytest
from tests.fakes.http import Handler, serve

from telescope.cli import chat
from telescope.cli.main import main
from telescope.errors import InfrastructureError, RunError, UserError
from telescope.inference.chat import ChatSettings, Conversation, connect


class FakeServer(Handler):
    """Streams the words of `answer`; `fault` is "refuse" or "break off"."""

    protocol_version = "HTTP/1.0"
    answer, fault, requests = "one two three", None, []

    def do_POST(self):
        self.requests.append(self.body)
        if self.fault == "refuse":
            self.send_json({"error": {"message": "the prompt is longer than the context"}}, 400)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Content-Length", "100000")  # more than comes: the connection breaks off
        self.end_headers()
        for word in self.answer.split():
            self.send_event({"choices": [{"index": 0, "delta": {"content": f"{word} "}}]})
        if self.fault is None:
            self.send_event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
            self.wfile.write(b"data: [DONE]\n\n")

    def send_event(self, event):
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@pytest.fixture
def conversation():
    FakeServer.fault, FakeServer.requests = None, []
    settings = ChatSettings(temperature=0.5, top_p=1.0, stops={"stop_token_ids": [7]})
    with serve(FakeServer) as url:
        yield Conversation(connect(url, "secret"), "model", settings, system="Be short.")


def test_an_answer_is_streamed_and_the_next_question_carries_the_history(conversation):
    assert list(conversation.ask("first")) == ["one ", "two ", "three "]
    list(conversation.ask("second"))
    request = FakeServer.requests[-1]
    assert [message["role"] for message in request["messages"]] == ["system", "user", "assistant", "user"]
    assert request["messages"][2]["content"] == "one two three "
    assert request["temperature"] == 0.5 and request["stop_token_ids"] == [7]
    assert "max_completion_tokens" not in request
    assert conversation.finish_reason == "length"


def test_the_server_is_asked_directly_and_not_through_a_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serve(FakeServer) as url:
        assert list(Conversation(connect(url, "secret"), "model", ChatSettings(1.0, 1.0)).ask("first"))


def test_an_answer_that_is_stopped_stays_in_the_history_as_far_as_it_came(conversation):
    pieces = conversation.ask("first")
    next(pieces)
    pieces.close()
    assert [message["content"] for message in conversation.messages] == ["first", "one "]


def test_a_refused_question_leaves_the_history_as_it_was(conversation):
    FakeServer.fault = "refuse"
    with pytest.raises(UserError, match="longer than the context"):
        list(conversation.ask("first"))
    assert conversation.messages == []


def test_a_server_that_breaks_off_is_an_error_that_ends_the_command(conversation):
    FakeServer.fault = "break off"
    with pytest.raises(InfrastructureError, match="does not answer"):
        list(conversation.ask("first"))
    with pytest.raises(RunError, match="The conversation has ended: the server does not answer"):
        chat._answer(conversation, "first")


def test_questions_and_commands_are_read_from_standard_input(conversation, capsys, monkeypatch):
    lines = "first\nsecond\n/nonsense\n/reset\nthird\n/exit\nfourth\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    chat._talk(conversation)
    shown, notes = capsys.readouterr()
    assert shown.count("one two three") == 3
    assert "There is no command /nonsense" in notes
    _, second, third = FakeServer.requests
    assert len(second["messages"]) == 4
    assert third["messages"] == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "third"}]


def test_an_answer_cannot_control_the_terminal(conversation, capsys, monkeypatch):
    monkeypatch.setattr(FakeServer, "answer", "a\x1b[31m b\x07ü\x9b")
    chat._answer(conversation, "first")
    assert capsys.readouterr().out.startswith("a[31m bü ")


@pytest.mark.parametrize(("arguments", "reason"), [
    (["/nowhere/model"], "/nowhere/model does not exist"),
    (["{folder}"], "has no complete checkpoint and no model"),
    (["{folder}", "--temperature", "3"], "--temperature: it is 3; set it to a number from 0 to 2"),
    ([], "required: path"),
    (["{folder}/model", "--step", "3"], "model is one model, not a run with checkpoints. Leave --step out"),
    (["{folder}/model", "--max-tokens", "4096"], "--max-tokens is 4096, and the context of prompt and answer is"),
])  # fmt: skip
def test_bad_input_starts_nothing(tmp_path, capsys, arguments, reason):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert main(["chat", *(word.format(folder=tmp_path) for word in arguments)]) == 2
    assert reason in capsys.readouterr().err
