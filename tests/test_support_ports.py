"""Ports of the tests' servers are never ones that the kernel gives away meanwhile."""

from __future__ import annotations

import random
import socket

import ports
import pytest


def test_a_port_is_outside_the_range_from_which_the_kernel_gives_ports() -> None:
    first = int(ports.EPHEMERAL.read_text().split()[0])
    with socket.create_server(("127.0.0.1", 0)) as given:
        assert given.getsockname()[1] >= first
    found = [ports.free_port() for _ in range(50)]
    assert len(set(found)) == 50
    assert all(ports.ABOVE_RAY <= port < first for port in found)


def test_a_port_that_is_listened_on_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = ports.free_port(), ports.free_port()
    monkeypatch.setattr(ports, "_given", set[int]())
    draws = iter([taken, free])
    monkeypatch.setattr(ports, "_draw", random.Random())
    monkeypatch.setattr(ports._draw, "randrange", lambda *_: next(draws))
    with socket.create_server(("127.0.0.1", taken)):
        assert ports.free_port() == free
