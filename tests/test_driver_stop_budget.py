"""A run stops by itself when its budget is spent, and goes on with a larger one."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayapp.config import Config, ConfigError, differences, load
from rayapp.driver.checks import shared_problems
from rayapp.driver.stop import Budget, Stop, StopAsked, budget_problems
from rayapp.driver.supervise import Command
from rayapp.observe.events import Journal
from rayapp.observe.goodput import ENDED, STARTED, WORKERS
from rayapp.observe.run_folder import EVENTS, STOP
from rayapp.storage import Storage, open_storage


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


def events(*found: tuple[str, float, float | None]) -> bytes:
    """Return events.jsonl of (event, time, USD per hour)."""
    more = {STARTED: {"seen_until": None}, ENDED: {"status": "stopped", "reason": None}}
    lines = [
        {"event": event, "time": at, **more.get(event, {}), "seconds": {}}
        | ({} if event == ENDED else {"usd_per_hour": price})
        for event, at, price in found
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


# An hour at 2 USD, then, after a night, a command that waits half an hour and trains since.
TWO_COMMANDS = [(STARTED, 0.0, 2.0), (ENDED, 3600.0, None), (STARTED, 40_000.0, 2.0)]
TWO_COMMANDS += [(WORKERS, 41_800.0, 6.0)]


@pytest.mark.parametrize(
    ("budget", "at_s", "reason"),
    [
        ({"max_usd": 6.0}, 45_399.0, None),
        ({"max_usd": 9.0}, 45_400.0, "run.max_usd=9 is reached: the run has taken 9.00 USD. "),
        ({"max_hours": 2.5}, 45_399.0, None),
        ({"max_hours": 2.5}, 45_400.0, "run.max_hours=2.5 is reached: the run has taken 2.50 h"),
        ({"max_usd": 9.0, "max_hours": 2.4}, 45_300.0, "run.max_hours=2.4 is reached"),
        ({}, 9e9, None),
    ],
)
def test_all_commands_count(
    run: Storage, budget: dict[str, float], at_s: float, reason: str | None
) -> None:
    if budget == {"max_usd": 6.0}:
        at_s = 43_599.0  # 2 + 1 + 3 USD are spent a second later
    run.write(EVENTS, events(*TWO_COMMANDS))
    stop, clock = Stop(run), SimpleNamespace(time=lambda: at_s)
    config = load(None, {f"run.{name}": value for name, value in budget.items()})
    found = Budget(config.run, Journal(run), stop, clock)  # type: ignore[arg-type]
    found.check()
    for thread in threading.enumerate():
        if thread.name == "stop":
            thread.join()
    if reason is None:
        assert found.reason is None and not run.exists(STOP)
        return
    assert found.reason is not None and found.reason.startswith(reason)
    assert found.reason.endswith(f"with a larger {reason.split('=')[0]} goes on")
    assert run.exists(STOP)  # the workers read it: they save after their step
    lease: Any = SimpleNamespace(check=lambda: None)
    with pytest.raises(StopAsked):  # while it prepares, or waits for room
        Command(run, lease, stop, Journal(run), budget=found).check()


def test_a_larger_budget_is_the_same_run() -> None:
    old = load(None, {"run.max_usd": 1, "run.max_hours": 1})
    assert differences(old, load(None, {"run.max_usd": 2})) == []


def test_an_unknown_price_is_refused(tmp_path: Path) -> None:
    def problems(**more: Any) -> list[str]:
        settings = {"run.storage": str(tmp_path), "run.max_usd": 5}
        settings |= {f"cluster.{name}": value for name, value in more.items()}
        return shared_problems(load(None, settings), None, 0)

    (problem,) = problems()
    assert problem.startswith("run.max_usd=5 is impossible: the price of the machines is not known")
    assert "Set cluster.instance" in problem
    assert problems(instance="g5.12xlarge") == []
    assert problems(instance="g5.12xlarge", usd_per_hour=1.5) == []


def test_the_price_of_each_choice_is_needed(tmp_path: Path) -> None:
    def config(text: str, **run: Any) -> Config:
        settings = {f"run.{name}": value for name, value in run.items()}
        settings |= {"run.storage": str(tmp_path), "cluster.workers": "2"}
        return load(None, {"cluster.instance": text, **settings})

    spot, priced = "g5.12xlarge,p4d.24xlarge:spot", "g5.12xlarge,p4d.24xlarge:spot@9.5"
    (problem,) = budget_problems(config(spot, max_usd=5))
    assert "Set the price of each that has no list price, e.g. p4d.24xlarge:spot@9.5" in problem
    assert budget_problems(config(priced, max_usd=5)) == budget_problems(config(spot)) == []
    (problem,) = budget_problems(config(priced, max_usd=5), list)
    assert "no nodes for 2 workers say which of cluster.instance they are" in problem
    assert budget_problems(config(priced, max_usd=5), lambda: [("p4d.24xlarge", "spot")]) == []
    assert budget_problems(config(priced), list) == []
    assert budget_problems(config("g5.12xlarge", max_usd=5), list) == []


def test_a_cost_that_was_never_known_is_refused(run: Storage) -> None:
    run.write(EVENTS, events((STARTED, 0.0, None), (ENDED, 60.0, None)))
    config = load(None, {"run.max_usd": 5})
    with pytest.raises(ConfigError, match="an earlier command of this run had no price"):
        Budget(config.run, Journal(run), Stop(run))
    Budget(load(None, {"run.max_hours": 5}).run, Journal(run), Stop(run)).check()
