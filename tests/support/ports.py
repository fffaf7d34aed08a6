"""Ports for servers that start some time after their port was chosen.

The kernel gives a port of its ephemeral range to any connection and to any server that asks for
port 0, Ray's among them, so a port from there may be another's by the time a server binds it.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

ABOVE_RAY = 20_000  # Ray's workers listen on 10002 to 19999
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")

_given: set[int] = set()
_draw = random.SystemRandom()  # tests seed the module's generator


def free_port() -> int:
    """Return a port on which nothing listens, below the ephemeral range, at most once each."""
    end = int(EPHEMERAL.read_text().split()[0])
    assert end > ABOVE_RAY, f"{EPHEMERAL} begins at {end}: no port is left below it"
    for _ in range(1000):
        port = _draw.randrange(ABOVE_RAY, end)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise AssertionError(f"no free port from {ABOVE_RAY} to {end}")
