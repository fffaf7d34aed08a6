"""At which address NCCL and Gloo make a node reachable, by the interfaces that it has.

    reached_at("nccl")       # ("ecs-eth0", "169.254.172.2")

A task of ECS has a link-local interface, the same in every task, before the one that others reach.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping, Sequence

SIOCGIFADDR = 0x8915  # linux/sockios.h
LAST = ("docker", "lo")  # NCCL takes these only where nothing else is
VARIABLES = {"nccl": "NCCL_SOCKET_IFNAME", "gloo": "GLOO_SOCKET_IFNAME"}

Listed = Sequence[tuple[str, str]]
"""Interfaces and their IPv4 addresses, in the kernel's order."""


def listed() -> list[tuple[str, str]]:
    """Return the interfaces of this node that have an IPv4 address."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in sorted(socket.if_nameindex()):
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            addresses.append((name, socket.inet_ntoa(answer[20:24])))
    return addresses


def reached_at(
    backend: str, interfaces: Listed | None = None, variables: Mapping[str, str] | None = None
) -> tuple[str, str] | None:
    """Return the interface and address that a backend takes; None: neither is known.

    NCCL takes the first interface that is not a bridge of docker or the loopback, or that its
    variable names (NCCL's guide, "NCCL_SOCKET_IFNAME"). Gloo takes what its variable names, else
    the address of the host's name.
    """
    known = listed() if interfaces is None else interfaces
    asked = (os.environ if variables is None else variables).get(VARIABLES[backend], "")
    if asked:
        known = [one for one in known if _named(one[0], asked)]
    elif backend == "gloo":
        known = _of_host_name(known)
    else:
        known = sorted(known, key=lambda one: one[0].startswith(LAST))
    return known[0] if known else None


def _named(interface: str, asked: str) -> bool:
    """Return whether a list of interfaces has one: prefixes, whole names after =, none after ^."""
    inverted, whole = asked.startswith("^"), asked.lstrip("^").startswith("=")
    names = asked.lstrip("^=").split(",")
    matches = interface in names if whole else interface.startswith(tuple(names))
    return matches != inverted


def _of_host_name(interfaces: Listed) -> list[tuple[str, str]]:
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return []
    return [one for one in interfaces if one[1] == address]


def link_local(address: str) -> bool:
    """Return whether an address is of one link alone.

    >>> link_local("169.254.172.2"), link_local("10.0.1.5"), link_local("fe80::1")
    (True, False, True)
    """
    return ipaddress.ip_address(address).is_link_local
