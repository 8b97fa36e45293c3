"""Connecting to engines: aborts, deadlines, and peers that are refused."""

import os
import socket
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from tests.processes import wait_for

from telescope.errors import DeadlineExceeded
from telescope.weights import communicator, control_channel
from telescope.weights.control_channel import Rendezvous, TransferError, join
from telescope.weights.plan import InitInfo
from telescope.weights.sender import WeightSender


def listen(sender: WeightSender, seconds: float = 60.0) -> InitInfo:
    return sender.listen(0, num_workers=1, host="127.0.0.1", backend="gloo", timeout_seconds=seconds)


class Connecting:
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
        assert not self._thread.is_alive(), "connect is still waiting"
        return self.error


def test_waiting_for_an_engine_ends_when_it_is_aborted() -> None:
    sender = WeightSender()
    listen(sender)
    connecting = Connecting(sender)
    sender.abort(0, "the engine exited")
    error = connecting.outcome()
    assert isinstance(error, TransferError) and "the engine exited" in str(error)


def test_an_abort_that_comes_before_the_wait_is_not_lost() -> None:
    sender = WeightSender()
    listen(sender)
    sender.abort(0, "the engine exited")
    assert "the engine exited" in str(Connecting(sender).outcome())


def test_an_engine_that_joins_and_then_hangs_is_abandoned_on_an_abort() -> None:
    sender = WeightSender()
    info = listen(sender)
    connecting = Connecting(sender)
    peer, _ = join(info.host, info.port, 1, info.token, 10)
    sender.abort(0, "the engine hangs")
    assert "the engine hangs" in str(connecting.outcome())
    wait_for(lambda: peer.loss is not None)
    assert "the engine hangs" in (peer.loss or ""), "the peer receives the reason"
    peer.close()


def test_reconnecting_ends_the_earlier_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    is_accepting = threading.Event()
    accept = Rendezvous.accept

    def accept_noted(self: Rendezvous, *args: Any) -> control_channel.ControlChannel:
        is_accepting.set()
        return accept(self, *args)

    monkeypatch.setattr(Rendezvous, "accept", accept_noted)
    sender = WeightSender()
    listen(sender)
    first = Connecting(sender)
    assert is_accepting.wait(20)
    listen(sender, seconds=0.5)
    assert isinstance(first.outcome(), TransferError)
    assert isinstance(Connecting(sender).outcome(), DeadlineExceeded)


def test_an_unknown_process_that_sends_nothing_does_not_block_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_channel, "_HELLO_SECONDS", 1.0)
    rendezvous = Rendezvous("127.0.0.1")
    accepted: list[control_channel.ControlChannel] = []
    waiting = threading.Thread(target=lambda: accepted.append(rendezvous.accept(2, {}, 60.0)))
    waiting.start()
    with socket.create_connection((rendezvous.host, rendezvous.port)):
        peer, _ = join(rendezvous.host, rendezvous.port, 1, rendezvous.token, 30)
        waiting.join(timeout=20)
        assert len(accepted) == 1
    peer.close()
    accepted[0].close()


def test_a_peer_without_the_token_or_with_another_rank_is_refused() -> None:
    rendezvous = Rendezvous("127.0.0.1")
    accepted: list[control_channel.ControlChannel] = []
    waiting = threading.Thread(target=lambda: accepted.append(rendezvous.accept(2, {}, 60.0)))
    waiting.start()
    for rank, token in ((1, "guessed"), (1, ""), (2, rendezvous.token)):
        with pytest.raises(TransferError, match=f"refused rank {rank}"):
            join(rendezvous.host, rendezvous.port, rank, token, 10)
    assert not accepted
    peer, _ = join(rendezvous.host, rendezvous.port, 1, rendezvous.token, 30)
    waiting.join(timeout=20)
    assert len(accepted) == 1
    peer.close()
    accepted[0].close()


def test_groups_that_threads_make_at_the_same_time_all_raise_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    seen = []

    class Group:
        Options = type("Options", (), {})

        def __init__(self, *_: Any) -> None:
            time.sleep(0.1)  # as torch does, without the interpreter lock
            seen.append(os.environ.get(variable))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.delenv(variable, raising=False)
    threads = [threading.Thread(target=communicator._nccl_group, args=(None, 0, 2)) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert seen == ["0"] * 2
    assert variable not in os.environ
