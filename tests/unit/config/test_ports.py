"""Detection of free ports for inference servers."""

import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from telescope.config.machine import free_block, hold_port, listen_problem, require_port
from telescope.errors import ConfigError

HOST = "127.0.0.1"


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def as_vllm_binds(port: int) -> Iterator[socket.socket]:
    """Bound with SO_REUSEADDR, and not listening while the model loads."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((HOST, port))
        yield server


def hold(port: int) -> socket.socket:
    return hold_port(HOST, port, server=0, num_servers=1)


def test_a_reserved_port_is_in_use_for_every_other_run_until_it_is_released(port: int) -> None:
    first = hold(port)
    with pytest.raises(ConfigError, match=f"inference_base_port is {port}, .* set inference_base_port for example to"):
        hold(port)
    with pytest.raises(ConfigError, match="in use"):
        require_port(HOST, port, server=0, num_servers=1)
    first.close()
    first.close()  # twice is fine
    hold(port).close()


def test_a_hold_ends_with_its_process_however_that_ends(port: int) -> None:
    script = f"""
from telescope.config.machine import hold_port
reservation = hold_port("{HOST}", {port}, server=0, num_servers=1)
print(1, flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        holder.stdout.readline()
        assert listen_problem(HOST, port) == "in use"
        holder.kill()
        holder.wait(timeout=20)
        assert listen_problem(HOST, port) is None


def test_a_hold_is_not_in_the_way_of_the_server_that_it_is_for(port: int) -> None:
    reservation = hold(port)
    with socket.socket() as server:
        server.bind((HOST, port))
        server.listen()
    reservation.close()


def test_a_port_that_is_bound_with_reuse_and_not_listened_on_yet_is_in_use(
    port: int, as_vllm_binds: socket.socket
) -> None:
    with pytest.raises(ConfigError, match="in use"):
        hold(port)
    as_vllm_binds.close()
    hold(port).close()  # and what was refused has left nothing behind


def test_connections_that_linger_from_a_server_that_has_ended_leave_its_port_free(
    port: int, as_vllm_binds: socket.socket
) -> None:
    as_vllm_binds.listen()
    with socket.create_connection((HOST, port)) as client:
        accepted, _ = as_vllm_binds.accept()
        as_vllm_binds.close()
        accepted.close()  # first, so that this side keeps the connection in TIME_WAIT
        client.recv(1)
    assert any(connection.laddr.port == port for connection in psutil.net_connections("tcp"))
    hold(port).close()


def test_the_port_of_a_later_server_is_reported_with_the_base_port_to_change(port: int) -> None:
    reservation = hold(port)
    with pytest.raises(ConfigError, match=f"inference_base_port is {port - 2}, but port {port}, which server 2 would"):
        hold_port(HOST, port, server=2, num_servers=3)
    reservation.close()


def test_runs_that_start_at_once_choose_different_ports(port: int) -> None:
    script = (
        f"from telescope.config.machine import free_block; print(free_block('{HOST}', 2, {port}, choose=True)); input()"
    )
    starts = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    chosen = [int(start.stdout.readline()) for start in starts]
    assert len(set(chosen)) == 3
    for start in starts:
        start.communicate("", timeout=20)
    assert free_block(HOST, 2, port) == free_block(HOST, 2, port, choose=True) == min(chosen)


def test_a_suggested_block_has_no_port_that_another_run_reserved(port: int) -> None:
    reservation, suggested = hold(port), hold(port + 100)
    with pytest.raises(ConfigError, match="for example to") as refusal:
        hold(port)
    assert f"to {port + 100}" not in str(refusal.value)
    reservation.close()
    suggested.close()
