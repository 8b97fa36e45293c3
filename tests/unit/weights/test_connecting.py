"""Waiting for an engine that does not come, or not all the way, and being told to stop."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest

from telescope.errors import DeadlineExceeded
from telescope.weights import control_channel
from telescope.weights.control_channel import Rendezvous, TransferError, join
from telescope.weights.plan import InitInfo
from telescope.weights.sender import WeightSender


def listen(sender: WeightSender, seconds: float = 60.0) -> InitInfo:
    return sender.listen(0, num_workers=1, host="127.0.0.1", backend="gloo", timeout_seconds=seconds)


class Connecting:
    """`connect` on a thread of its own, as the actor runs it."""

    def __init__(self, sender: WeightSender) -> None:
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._connect, args=(sender,))
        self._thread.start()

    def _connect(self, sender: WeightSender) -> None:
        try:
            sender.connect(0)
        except Exception as error:
            self.error = error

    def outcome(self) -> Exception | None:
        self._thread.join(timeout=20)
        assert not self._thread.is_alive(), "it still waits"
        return self.error


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_waiting_for_an_engine_ends_when_it_is_aborted() -> None:
    sender = WeightSender()
    listen(sender)
    connecting = Connecting(sender)
    sender.abort(0, "the engine died")
    error = connecting.outcome()
    assert isinstance(error, TransferError) and "the engine died" in str(error)
    assert sender.connected == []


def test_an_abort_that_comes_before_the_wait_is_not_lost() -> None:
    sender = WeightSender()
    listen(sender)
    sender.abort(0, "the engine died")
    assert "the engine died" in str(Connecting(sender).outcome())


def test_an_engine_that_joins_and_goes_no_further_is_given_up_when_it_is_aborted() -> None:
    sender = WeightSender()
    info = listen(sender)
    connecting = Connecting(sender)
    peer, _ = join(info.host, info.port, 1, info.token, 10)
    sender.abort(0, "the engine hangs")
    assert "the engine hangs" in str(connecting.outcome())
    eventually(lambda: peer.loss is not None)
    assert "the engine hangs" in (peer.loss or ""), "and is told so"
    peer.close()


def test_connecting_anew_ends_the_wait_of_before() -> None:
    sender = WeightSender()
    listen(sender)
    first = Connecting(sender)
    listen(sender, seconds=0.5)
    assert isinstance(first.outcome(), TransferError)
    assert isinstance(Connecting(sender).outcome(), DeadlineExceeded), "which has a deadline of its own"


def test_a_stranger_who_says_nothing_does_not_hold_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_channel, "_HELLO_SECONDS", 0.2)
    door = Rendezvous("127.0.0.1")
    accepted: list[control_channel.Lifeline] = []
    waiting = threading.Thread(target=lambda: accepted.append(door.accept(2, {}, 60.0)))
    waiting.start()
    with socket.create_connection((door.host, door.port)):
        peer, _ = join(door.host, door.port, 1, door.token, 30)
        waiting.join(timeout=20)
        assert len(accepted) == 1
    peer.close()
    accepted[0].close()
