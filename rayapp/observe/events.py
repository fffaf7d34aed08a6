"""Write events.jsonl, the driver's record of commands and attempts (see rayapp.observe.goodput)."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from rayapp import hardware
from rayapp.config import Place, RunConfig
from rayapp.observe.activity import WAITING_FOR_ROOM, Activity
from rayapp.observe.columns import Follower
from rayapp.observe.ending import Ending
from rayapp.observe.goodput import (
    ENDED,
    INTERRUPTED,
    PHASE,
    RESUMED,
    STARTED,
    WORKERS,
    read_events,
    spent,
)
from rayapp.observe.origin import origin, redacted, submission_id
from rayapp.observe.records import Event, EventFields, MetricsLine
from rayapp.observe.run_folder import EVENTS, FAILED, METRICS
from rayapp.planner.question import named_instance, nodes_of, price_of
from rayapp.storage import Storage

logger = logging.getLogger("rayapp.driver")


class Journal:
    """The events of a run, and the steps that the driver has last seen in metrics.jsonl."""

    def __init__(self, run: Storage, nodes: Callable[[], list[Place]] = list) -> None:
        """`nodes` returns the place of each node that is up and says what it is."""
        self.run, self.events, self._nodes = run, read_events(run), nodes
        self._lines = Follower(run, ("step", "attempt", "step_s", "time"))
        self._lines.poll()
        self._followed = self._attempt()
        self._lost_steps, self._lost_s = 0, 0.0  # not in an event yet
        self.passed: deque[Activity] = deque()
        """Phases to store with the next event; any thread may append."""

    @property
    def attempts(self) -> int:
        """How often workers were started, over all commands."""
        return sum(event["event"] == WORKERS for event in self.events)

    def _attempt(self) -> int:
        last = self._lines.steps.last
        return last["attempt"] if last else 0

    def _kept_attempt(self, lines: int) -> int:
        return int(self._lines.steps["attempt"][lines - 1]) if lines else 0

    @property
    def last(self) -> MetricsLine | None:
        """The last line of metrics.jsonl that was read; None if there was none."""
        return self._lines.steps.last

    @contextmanager
    def command(self, config: RunConfig, began: float) -> Iterator[None]:
        """Record the start of a command, and its end if the block raises."""
        last = self._lines.steps.last
        seen_until = last["time"] if last else None
        self.add(
            STARTED,
            {
                "host": socket.gethostname(),
                "submission_id": submission_id(),
                **origin(),
                "seen_until": seen_until,
                **({"init_from": str(config.origin)} if config.origin else {}),
                **machines(config, config.cluster.min_workers, self._nodes()),
            },
            began,
        )
        try:
            yield
        except BaseException as error:
            reason = str(error) or type(error).__name__
            self.add(ENDED, {"status": FAILED, "reason": reason, "seconds": {}})
            raise

    def spent(self, now: float) -> tuple[float, float | None]:
        """Return the seconds and USD of all commands up to `now`; USD is None if a price is not
        known."""
        return spent(list(self.events), self._lines.steps["time"], now)

    def waiting(self) -> None:
        """Record that the command waits for room."""
        self.add(PHASE, {"phase": WAITING_FOR_ROOM})

    def attempt(self, config: RunConfig, workers: int) -> None:
        """Record that an attempt begins with so many workers."""
        self.add(WORKERS, {"workers": workers, **machines(config, workers, self._nodes())})

    def saw(self, line: MetricsLine) -> None:
        """Take the last line of metrics.jsonl; record an event if it is the first of an attempt."""
        if line["attempt"] > self._followed:
            try:
                self.catch_up()
            except OSError as error:  # the next line is another chance
                logger.warning("cannot read %s: %s", METRICS, error)

    def catch_up(self) -> MetricsLine | None:
        """Read the new lines of metrics.jsonl, record a `resumed` event if a new attempt has done a
        step, and return the last line.

        Steps that were there before and are not any more count as lost.
        """
        before = self._lines.steps
        known = len(before)
        lost_s = before["step_s"][self._lines.poll() : known]
        self._lost_steps += len(lost_s)
        self._lost_s += float(np.nansum(lost_s))
        steps = self._lines.steps
        if len(lost_s):  # the number of an attempt without lines is used again
            self._followed = min(self._followed, self._kept_attempt(known - len(lost_s)))
        if self._attempt() > self._followed:
            first = int(np.argmax(steps["attempt"] > self._followed))
            self._followed = self._attempt()
            self.add(
                RESUMED,
                {
                    "attempt": int(steps["attempt"][first]),
                    "step": int(steps["step"][first]) - 1,
                    "first_step_s": float(steps["step_s"][first]),
                    "lost_steps": self._lost_steps,
                    "lost_s": self._lost_s,
                },
                float(steps["time"][first]),
            )
            self._lost_steps, self._lost_s = 0, 0.0
        return steps.last

    def interrupted(self, ending: Ending, workers: int) -> None:
        """Record that an attempt has ended early."""
        last = self.catch_up()
        self.add(
            INTERRUPTED,
            {
                "kind": ending.kind,
                "reason": ending.reason,
                "step": ending.step,
                "workers": workers,
                "trained_until": last["time"] if last else None,
            },
        )

    def ended(self, status: str, seconds: dict[str, float], reason: str | None = None) -> None:
        """Record that the command ends, with the seconds of its last phases."""
        self.catch_up()
        self.add(ENDED, {"status": status, "reason": reason, "seconds": seconds})

    def add(self, event: str, facts: EventFields, at: float | None = None) -> None:
        """Append an event; if it cannot be stored, it is stored with the next one."""
        added: Event = {"event": event, "time": at or time.time(), **facts}
        passed = [self.passed.popleft() for _ in range(len(self.passed))]
        phases = [Event(event=PHASE, time=each.began, phase=each.phase) for each in passed]
        self.events += [added, *phases] if event == STARTED else [*phases, added]
        text = "".join(redacted(json.dumps(each)) + "\n" for each in self.events)
        try:
            self.run.write(EVENTS, text.encode())
        except OSError as error:
            logger.warning("events are not stored yet: %s", error)


def machines(config: RunConfig, workers: int, places: Sequence[Place] = ()) -> EventFields:
    """Return the number of machines that the workers need, their instance type and cost, if known.

    The price is the config's, else the on-demand list price in AWS_REGION. Where
    `cluster.instance` is a list, the machines are the first of `places`, in the order of the list.
    """
    if len(config.cluster.choices) > 1:
        return _machines_of_a_list(config, workers, places)
    one = named_instance(config)
    if one is None:
        return {"nodes": None, "instance": None, "usd_per_hour": None}
    price = price_of(config, one, _region())
    nodes = nodes_of(one, workers)
    return {
        "nodes": nodes,
        "instance": one.name,
        "usd_per_hour": None if price is None else nodes * price,
    }


def _machines_of_a_list(config: RunConfig, workers: int, places: Sequence[Place]) -> EventFields:
    """Return what `machines` does; all is None if nodes of the list are too few."""
    names, prices, left = list[str](), list[float | None](), workers
    for choice, each in zip(config.cluster.choices, config.alternatives(), strict=True):
        one = named_instance(each)
        assert one is not None
        nodes = min(list(places).count(choice.place), nodes_of(one, left)) if left > 0 else 0
        prices += [price_of(each, one, _region())] * nodes
        names += [str(each.cluster.instance)] if nodes else []
        left -= nodes * one.gpus if one.gpus else nodes * workers
    if left > 0:
        return {"nodes": None, "instance": None, "usd_per_hour": None}
    known = [price for price in prices if price is not None]
    return {
        "nodes": len(prices),
        "instance": ", ".join(names),
        "usd_per_hour": sum(known) if len(known) == len(prices) else None,
    }


def _region() -> str:
    named = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return named or hardware.DEFAULT_REGION
