"""Stop a run when it has spent what `run.max_usd` and `run.max_hours` allow.

budget = Budget(config.run, journal, stop)
budget.check()                           # asks the run to stop once a budget is reached
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rayapp.config import ConfigError, Place, Run, RunConfig
from rayapp.driver.stop import Stop
from rayapp.observe.clock import CLOCK, Clock
from rayapp.observe.events import Journal, machines


def budget_problems(config: RunConfig) -> list[str]:
    """Return why the cost of a run with `run.max_usd` would not be known."""
    each = config.alternatives()
    if config.run.max_usd is None or all(machines(one, 1)["usd_per_hour"] for one in each):
        return []
    what = "Set cluster.instance, and cluster.usd_per_hour for one without a list price"
    if len(each) > 1:
        what = "Set the price of each that has no list price, e.g. p4d.24xlarge:spot@9.5"
    return [
        f"run.max_usd={config.run.max_usd:g} is impossible: the price of the machines is not "
        f"known. {what}"
    ]


def unknown_nodes(config: RunConfig, places: Callable[[], Sequence[Place]]) -> list[str]:
    """Return why the cost is not known on a cluster with nodes of these places.

    They are asked for only where cluster.instance is a list and the run has a budget.
    """
    least = config.cluster.min_workers
    if config.run.max_usd is None or len(config.cluster.choices) < 2:
        return []
    if machines(config, least, places())["usd_per_hour"] is not None:
        return []
    return [
        f"run.max_usd={config.run.max_usd:g} is impossible: no nodes for {least} workers say which "
        "of cluster.instance they are. Set the one that they are, or render the cluster from this "
        "config"
    ]


def reached(
    max_usd: float | None, max_hours: float | None, wall_s: float, usd: float | None, who: str
) -> str | None:
    """Return which budget is reached by these seconds and USD; None: none is."""
    for name, limit, spent, unit in (
        ("max_usd", max_usd, usd, "USD"),
        ("max_hours", max_hours, wall_s / 3600.0, "hours"),
    ):
        if limit is not None and spent is not None and spent >= limit:
            return f"{name}={limit:g} is reached: {who} taken {spent:.2f} {unit}"
    return None


class Budget:
    """What all commands of a run may spend together."""

    def __init__(self, run: Run, journal: Journal, stop: Stop, clock: Clock = CLOCK) -> None:
        """Raise ConfigError if an earlier command of the run has an unknown cost."""
        self._run, self._journal, self._stop, self._clock = run, journal, stop, clock
        self.reason: str | None = None
        """Why the run was asked to stop; None while every budget lasts."""
        if run.max_usd is not None and journal.spent(clock.time())[1] is None:
            raise ConfigError(
                [
                    f"run.max_usd={run.max_usd:g} is impossible: an earlier command of this run "
                    "had no price. Set run.max_hours, or another run.name"
                ]
            )

    def check(self) -> None:
        """Ask the run to stop if a budget is reached."""
        if self.reason is None and (reason := self._reached()):
            self.reason = reason
            self._stop.ask()

    def _reached(self) -> str | None:
        if self._run.max_usd is None and self._run.max_hours is None:
            return None
        spent = self._journal.spent(self._clock.time())
        told = reached(self._run.max_usd, self._run.max_hours, *spent, "the run has")
        more = told and f"The same command with a larger run.{told.partition('=')[0]} goes on"
        return told and f"run.{told}. {more}"
