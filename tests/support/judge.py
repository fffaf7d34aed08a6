"""The promises of a run, held against a simulated history."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduler import Process

from rayapp.observe.run_folder import CHECKPOINTS, EVENTS, LEASE, METRICS, RESULT
from rayapp.train.checkpoint.marker import MARKER, METADATA, REFUSED, order_of

if TYPE_CHECKING:
    from simulation import World

KEEP = 2
SHARD = "__0_0.distcp"
ANSWERED_S = 60.0  # from a STOP that workers can see to their last step
OVER = ("done", "stopped")

__all__ = ["KEEP", "METADATA", "SHARD", "Judge", "Violation"]


class Violation(AssertionError):
    """The run has broken a promise."""


@dataclass
class Judge:
    """What has happened so far, and whether it may."""

    world: World
    drivers: list[Process] = field(default_factory=list)
    holders: list[str] = field(default_factory=list)
    """Ids of the lease's holders, in the order in which they took it."""
    ended: dict[str, str] = field(default_factory=dict)
    """The outcome of each driver by its name."""
    writers: dict[str, int] = field(default_factory=dict)
    """For each file, the number of the last holder that has written it."""
    failures: list[int] = field(default_factory=list)
    stops: list[float] = field(default_factory=list)
    trained_by: int = -1
    committed: bool = False
    least: dict[str, int] = field(default_factory=dict)
    """For each group that resumes, the newest usable step when it began to look."""

    damaged_at: dict[str, float] = field(default_factory=dict)
    broken: Violation | None = None

    def _broken(self, what: str) -> None:
        """Note a broken promise; the code under test might swallow what is raised here."""
        self.broken = self.broken or Violation(what)

    def check(self) -> None:
        """Raise the first violation."""
        if self.broken is not None:
            raise self.broken

    # ---- drivers and their lease --------------------------------------------------------------

    def pid_of(self, process: Process) -> int:
        return self.drivers.index(process) + 1

    def begins(self, process: Process) -> None:
        self.drivers.append(process)
        self.world.log(f"{process.name} begins on {process.machine}")

    def ends(self, process: Process, outcome: str) -> None:
        self.ended[process.name] = outcome
        self._no_fault_of_its_own(process, outcome)

    def _no_fault_of_its_own(self, process: Process, outcome: str) -> None:
        if "another driver has taken over" in outcome:
            mine = [n for n, holder in enumerate(self.holders) if self._is_of(holder, process)]
            if mine and mine[-1] == len(self.holders) - 1:
                self._broken(f"{process.name} lost its lease to itself")
        if "has failed 3 times" in outcome and "step" in outcome:
            step = int(outcome.split("step ")[1].split(",")[0]) - 1
            if self.failures.count(step) < 3:
                self._broken(
                    f"{process.name} blames step {step + 1}, which failed "
                    f"{self.failures.count(step)} times"
                )

    def _is_of(self, holder: str, process: Process) -> bool:
        return holder.rpartition("-")[0] == process.name

    def _number_of(self, process: Process) -> int:
        """Return the number of the process's lease, or of its driver's; -1: it never had one."""
        name = process.name.partition("'s group")[0]
        mine = [n for n, holder in enumerate(self.holders) if holder.rpartition("-")[0] == name]
        return mine[-1] if mine else -1

    def over(self) -> bool:
        """Say whether the user has what was asked for."""
        return bool(self.ended) and list(self.ended.values())[-1] in OVER

    # ---- files --------------------------------------------------------------------------------

    def wrote(self, process: Process, name: str, data: bytes) -> None:
        if name == LEASE:
            holder = json.loads(data)["id"]
            if not self.holders or self.holders[-1] != holder:
                self.holders.append(holder)
                self.world.log(f"{process.name} takes the lease")
            return
        if name in (EVENTS, RESULT, METRICS):
            number = self._number_of(process)
            if number < self.writers.get(name, -1):
                self._broken(f"{process.name} writes {name} after its successor")
            self.writers[name] = number
        if name == METRICS:
            steps = [json.loads(line)["step"] for line in data.splitlines()]
            if steps != list(range(1, len(steps) + 1)):
                self._broken(f"metrics hold steps {steps}")
        if name.endswith(MARKER):
            self.committed = True

    def removes(self, name: str) -> None:
        """A marker is deleted: not one of the newest KEEP usable checkpoints may go."""
        if name.endswith(f"/{MARKER}"):
            folder = name.split("/")[1]
            usable = self.usable(grace_s=10.0)  # a sweep has looked at them one by one
            if folder in usable[:KEEP] and folder in self.usable():
                self._broken(f"{folder} is deleted; usable are {usable}")

    def usable(self, grace_s: float = 0.0) -> list[str]:
        """Return the names of the committed checkpoints, newest first.

        Those that were damaged longer ago than `grace_s` are left out.
        """
        from simulation import ROOT

        names = []
        for url in self.world.files:
            if url.endswith(f"/{MARKER}"):
                folder = url.removesuffix(f"/{MARKER}")
                name = folder.rpartition("/")[2]
                files = self.world.files
                shard = files.get(f"{folder}/{SHARD}")
                whole = shard is not None and shard.data == f"{name} {SHARD}".encode()
                since_s = self.world.scheduler.now - self.damaged_at.get(name, -1e9)
                if (whole or since_s < grace_s) and f"{folder}/{REFUSED}" not in files:
                    names.append(folder.removeprefix(f"{ROOT}/{CHECKPOINTS}/"))
        return sorted(names, key=lambda name: order_of(name) or (0, 0), reverse=True)

    # ---- training -----------------------------------------------------------------------------

    def newest_step(self) -> int:
        return max((order_of(name) or (0, 0))[0] for name in [*self.usable(), "step-00000000"])

    def resumes(self, group: Process) -> None:
        self.least[group.name] = self.newest_step()

    def resumed(self, driver: Process, group: Process, step: int) -> None:
        self.world.log(f"{group.name} starts at step {step}")
        if step < min(self.least[group.name], self.newest_step()):
            self._broken(f"{group.name} starts at {step}, behind {self.newest_step()}")
        if step == 0 and self.committed:
            self._broken(f"{group.name} starts anew although checkpoints were committed")

    def failed(self, step: int) -> None:
        self.failures.append(step)

    def steps(self, driver: Process, group: Process, step: int) -> None:
        number = self._number_of(group)
        if number < self.trained_by:
            self._broken(f"{group.name} trains while its successor's group does")
        self.trained_by = max(self.trained_by, number)
        if self.stops and self._calm_since(self.stops[-1]):
            late_s = self.world.scheduler.now - self.stops[-1]
            if late_s > ANSWERED_S:
                self._broken(f"{group.name} does step {step} {late_s:.0f} s after STOP")

    def stop_is_asked(self) -> None:
        """Count a stop if the driver that must hear it is at work by now."""
        alive = [p for p in self.drivers if p.alive and p.name not in self.ended]
        if alive and len(self.drivers) == 1 and self.world.scheduler.now > 0.2:
            self.stops.append(self.world.scheduler.now)

    def _calm_since(self, at: float) -> bool:
        """Say whether the driver and the storage have worked since then, and it is the same."""
        world = self.world
        return (
            len(self.drivers) == 1
            and world.fault_rate == 0.0
            and world.outage_until <= at
            and self.drivers[0].suspended_until <= at
            and self.drivers[0].cut_off_until <= at
        )

    def final(self) -> None:
        """Judge a history that has come to its end."""
        for process in self.drivers:
            outcome = self.ended.get(process.name)
            if outcome is None and process.alive:
                self._broken(f"{process.name} never ended")
        self.check()
        for error in self.world.scheduler.errors:
            raise error
