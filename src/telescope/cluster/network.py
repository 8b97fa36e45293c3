"""Addresses and network interfaces that connect the processes of a run.

Loopback if all processes concerned are on one node, otherwise the address by which Ray knows the node. Owns that choice
and the two variables that pass it to NCCL and gloo; variables that the user has set are left alone.
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
"""By default NCCL uses the first interface that is not loopback, and gloo the one to which the host's name resolves,
which is 127.0.1.1 on many systems."""


@dataclass(frozen=True)
class Network:
    """Which processes of a run connect over loopback."""

    servers_on_loopback: bool
    """The driver and all servers are on one node."""
    broadcast_on_loopback: bool
    """All ranks and all servers are on one node, and `ray_broadcast_prefer_loopback_if_single_node` is on."""


def network_of(config: TelescopeConfig, placement: Placement, driver_node: str) -> Network:
    """The network that the placement allows. `driver_node`: the driver's node, by its id in Ray."""
    nodes = {*placement.server_nodes, *placement.rank_nodes}
    return Network(
        servers_on_loopback={driver_node, *placement.server_nodes} == {driver_node},
        broadcast_on_loopback=len(nodes) == 1 and config.ray_broadcast_prefer_loopback_if_single_node,
    )


def own_host(*, loopback: bool) -> str:
    """The host at which other processes of the run reach this one: `loopback`, or this node's address.

    A cluster started for one run knows its node only by loopback; then it is the address of the default route.
    """
    if loopback:
        return LOOPBACK
    address = own_address()
    return advertised_host("") if address == LOOPBACK else address


def use_interface_of(address: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes NCCL and gloo use the interface that has `address`, in child processes too.

    Call it before either is used. Keeps variables that the user or the node has set.
    """
    interface = interface_of(address, interface_networks())
    if interface is not None:
        for variable in INTERFACE_VARIABLES:
            environment.setdefault(variable, interface)


def interface_of(address: str, networks: Iterable[tuple[str, str]]) -> str | None:
    """The interface with this address, otherwise the first whose network contains it, or None."""
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
    """A mask in the form that `ipaddress` reads; the kernel writes IPv6 masks out ("ffff:ffff::")."""
    if ":" not in netmask:
        return netmask
    return str(int(ipaddress.IPv6Address(netmask)).bit_count())
