"""Who meets on loopback, at which address everybody else is reached, and through which interface NCCL and gloo talk."""

from types import SimpleNamespace

import pytest
from tests.unit.orchestrator.fakes import config_of

from telescope.cluster import placement as network_module
from telescope.cluster.inference_group import bind_host
from telescope.cluster.placement import Network, Placement, interface_of, network_of, own_host, use_interface_of
from telescope.inference.server import advertised_host


def placed(servers: list[str], ranks: list[str]) -> Placement:
    return Placement(None, None, 1, 1, servers, ranks)  # type: ignore[arg-type]


@pytest.mark.parametrize(("servers", "ranks", "http", "broadcast"), [
    (["here", "here"], ["here"], True, True), (["there", "there"], ["there"], False, True),
    (["here"], ["there"], True, False), (["here", "there"], ["here"], False, False),
])  # fmt: skip
def test_processes_on_one_node_connect_over_loopback(servers, ranks, http, broadcast):
    """Whatever else is in the cluster. The driver asks the servers; ranks and servers send each other weights."""
    assert network_of(config_of(), placed(servers, ranks), "here") == Network(http, broadcast)
    unwanted = config_of(ray_broadcast_prefer_loopback_if_single_node=False)
    assert network_of(unwanted, placed(servers, ranks), "here") == Network(http, False)


def test_without_loopback_a_process_uses_its_nodes_address_or_the_default_route(monkeypatch):
    monkeypatch.setattr(network_module, "own_address", lambda: "10.0.0.4")
    assert own_host(loopback=True) == "127.0.0.1"
    assert own_host(loopback=False) == "10.0.0.4"
    monkeypatch.setattr(network_module, "own_address", lambda: "127.0.0.1")  # a Ray that was started for one run
    monkeypatch.setattr(network_module, "advertised_host", lambda host: "192.0.2.9")
    assert own_host(loopback=False) == "192.0.2.9"


@pytest.mark.parametrize(("fields", "beside_the_driver", "elsewhere"), [
    ({}, "127.0.0.1", "0.0.0.0"), ({"inference_host": "0.0.0.0"}, "0.0.0.0", "0.0.0.0"),
    ({"inference_host": "10.0.0.7"}, "10.0.0.7", "10.0.0.7"),
])  # fmt: skip
def test_servers_listen_on_inference_host_or_on_loopback_beside_the_driver(fields, beside_the_driver, elsewhere):
    assert bind_host(config_of(**fields), Network(True, False)) == beside_the_driver
    assert bind_host(config_of(**fields), Network(False, True)) == elsewhere
    assert advertised_host(elsewhere, "10.0.0.4") == ("10.0.0.4" if elsewhere == "0.0.0.0" else elsewhere)


@pytest.mark.parametrize(("address", "interface"), [
    ("127.0.0.1", "lo"), ("127.0.0.3", "lo"), ("10.0.0.4", "eth0"), ("fd00::4", "eth1"), ("203.0.113.9", None),
])  # fmt: skip
def test_an_address_belongs_to_its_interface(monkeypatch, address, interface):
    addresses = {"lo": ["127.0.0.1", "::1"], "eth0": ["02:42:ac:11:00:02", "10.0.0.4"], "eth1": ["fd00::4"]}
    entries = {name: [SimpleNamespace(address=each) for each in of_name] for name, of_name in addresses.items()}
    monkeypatch.setattr(network_module.psutil, "net_if_addrs", lambda: entries)
    assert interface_of(address) == interface


@pytest.mark.parametrize("chosen", [{}, {"NCCL_SOCKET_IFNAME": "ib0"}])
def test_nccl_and_gloo_get_the_interface_unless_the_user_chose_one(chosen):
    environment = dict(chosen)
    use_interface_of("127.0.0.1", environment)
    assert environment == {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", **chosen}
