"""Which address and which network interface the processes of a run meet on.

Loopback where everybody who meets there is on one node, else the address that Ray knows the node by. Owns that choice
and the two variables that tell NCCL and gloo of it; a variable that the user has set is left alone. What the addresses
are used for is the business of `inference.server`, `trainer.worker` and `weights.control_channel`.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass

import psutil

from telescope.cluster.placement import Placement
from telescope.cluster.ray_cluster import own_address
from telescope.config import TelescopeConfig
from telescope.config.machine import LOOPBACK
from telescope.inference.server import advertised_host

INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""By themselves NCCL takes the first interface that is not loopback, and gloo the one that the host's name stands for,
which many systems resolve to 127.0.1.1."""


@dataclass(frozen=True)
class Network:
    """Who of a run meets on loopback."""

    servers_on_loopback: bool
    """The driver and all servers are on one node."""
    broadcast_on_loopback: bool
    """All ranks and all servers are on one node, and `ray_broadcast_prefer_loopback_if_single_node` is on."""


def network_of(config: TelescopeConfig, placement: Placement, driver_node: str) -> Network:
    """What the places of the workers allow. `driver_node`: the driver's node, by its id in Ray."""
    nodes = {*placement.server_nodes, *placement.rank_nodes}
    return Network(
        servers_on_loopback={driver_node, *placement.server_nodes} == {driver_node},
        broadcast_on_loopback=len(nodes) == 1 and config.ray_broadcast_prefer_loopback_if_single_node,
    )


def own_host(*, loopback: bool) -> str:
    """Where others of the run reach this process: on `loopback`, or at this node's address.

    A cluster that was started for one run knows its node by loopback alone; its address is then the outward one.
    """
    if loopback:
        return LOOPBACK
    address = own_address()
    return advertised_host("") if address == LOOPBACK else address


def use_interface_of(address: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Make NCCL and gloo of this process, and of what it starts, talk through the interface that has `address`.

    To be called before either is used. Leaves alone what the user, or the node, has set.
    """
    interface = interface_of(address, interface_networks())
    if interface is not None:
        for variable in INTERFACE_VARIABLES:
            environment.setdefault(variable, interface)


def interface_of(address: str, networks: Iterable[tuple[str, str]]) -> str | None:
    """The interface with this address, else the first whose network contains it; None when there is none."""
    wanted = ipaddress.ip_address(address)
    containing = None
    for name, network in networks:
        interface = ipaddress.ip_interface(network)
        if interface.ip == wanted:
            return name
        if containing is None and interface.network.prefixlen and wanted in interface.network:
            containing = name
    return containing


def interface_networks() -> list[tuple[str, str]]:
    """The interfaces of this machine, each with an address and its mask: ("lo", "127.0.0.1/255.0.0.0")."""
    return [
        (name, f"{entry.address.partition('%')[0]}/{_prefix(entry.netmask)}")
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family.name in ("AF_INET", "AF_INET6") and entry.netmask
    ]


def _prefix(netmask: str) -> str:
    """A mask as `ipaddress` reads it; an IPv6 one is written out by the kernel ("ffff:ffff::")."""
    if ":" not in netmask:
        return netmask
    return str(int(ipaddress.IPv6Address(netmask)).bit_count())
