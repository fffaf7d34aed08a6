"""Check how many workers fit into what is free, and the wait for enough of them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.config import Config, load
from rayapp.driver import placement
from rayapp.driver.placement import fit_in

amounts = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0])


def fits(free: list[dict[str, float]], need: dict[str, float], workers: int) -> bool:
    """Try every way to deal workers to nodes; one CPU stays free in all."""
    total = sum(node.get("CPU", 0.0) for node in free)
    if workers and total - workers * need["CPU"] < 1.0:
        return False
    return any(
        sum(dealt) == workers
        and all(
            count * amount <= node.get(name, 0.0)
            for count, node in zip(dealt, free, strict=True)
            for name, amount in need.items()
        )
        for dealt in product(range(5), repeat=len(free))
    )


@given(
    st.lists(st.fixed_dictionaries({"CPU": amounts}, optional={"GPU": amounts}), max_size=3),
    st.sampled_from([{"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 0.5}]),
)
def test_as_many_as_can_be_dealt_to_nodes(
    free: list[dict[str, float]], need: dict[str, float]
) -> None:
    found = fit_in({str(i): node for i, node in enumerate(free)}, need)
    assert fits(free, need, found)
    assert not fits(free, need, found + 1)


@pytest.fixture(autouse=True)
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no wait be an endless one; to know that takes a Ray."""
    monkeypatch.setattr(placement, "never", lambda config: None)


def elastic(workers: str = "2:8") -> Config:
    return load(None, {"cluster.workers": workers, "cluster.gpu": "false"})


class Clock:
    """A clock that sleeping moves, and a cluster whose room is told by it."""

    def __init__(self, room: dict[float, int]) -> None:
        self.now, self.rooms = 100.0, room

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def room(self, config: Config) -> int:
        return [rooms for at, rooms in self.rooms.items() if self.now - 100.0 >= at][-1]


def wait(monkeypatch: pytest.MonkeyPatch, room: dict[float, int]) -> tuple[int, float, list[str]]:
    """Return (workers, seconds waited, notes)."""
    clock, notes = Clock(room), []
    monkeypatch.setattr(placement, "time", clock)
    monkeypatch.setattr(placement, "free_workers", clock.room)
    monkeypatch.setattr(placement, "taken", lambda: "6 of 8 CPUs are taken by job one")
    workers = placement.wait_for_room(elastic(), notes.append, lambda: None)
    return workers, clock.now - 100.0, notes


def test_room_for_all_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wait(monkeypatch, {0.0: 11}) == (8, 0.0, [])


def test_room_for_some_must_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wait(monkeypatch, {0.0: 2, 3.0: 4, 7.0: 3}) == (3, 12.0, [])


def test_too_little_room_is_waited_for_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, seconds, notes = wait(monkeypatch, {0.0: 1, 61.0: 8})
    assert (workers, seconds) == (8, 61.0)
    note = "1 of at least 2 workers fit; 6 of 8 CPUs are taken by job one"
    assert notes == [note] * 7


def test_a_wait_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("the lease is lost")

    clock = Clock({0.0: 0})
    monkeypatch.setattr(placement, "time", clock)
    monkeypatch.setattr(placement, "free_workers", clock.room)
    monkeypatch.setattr(placement, "taken", lambda: "all")
    with pytest.raises(RuntimeError, match="lease"):
        placement.wait_for_room(elastic(), lambda text: None, lost)


def test_a_node_that_is_gone_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": server.getsockname()[1]}
        assert placement.answers(node)
    assert not placement.answers(node)


def test_a_fixed_number_is_waited_for_and_asked_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, notes, asked = Clock({0.0: 0, 40.0: 3}), [], []

    @contextmanager
    def demand(config: Config, workers: int) -> Iterator[Callable[[], bool]]:
        asked.append(workers)
        yield lambda: False
        asked.append(0)

    monkeypatch.setattr(placement, "time", clock)
    monkeypatch.setattr(placement, "free_workers", clock.room)
    monkeypatch.setattr(placement, "demand", demand)
    monkeypatch.setattr(placement, "taken", lambda: "4 of 4 CPUs are taken by job one")
    assert placement.wait_for_room(elastic("3"), notes.append, lambda: None) == 3
    assert asked == [3, 0]
    assert notes == ["0 of 3 workers fit; 4 of 4 CPUs are taken by job one"] * 4


def test_room_that_ray_holds_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "free_workers", lambda config: 0)
    monkeypatch.setattr(placement, "demand", lambda config, workers: nullcontext(lambda: True))
    assert placement.wait_for_room(elastic("3"), lambda text: None, lambda: None) == 3
