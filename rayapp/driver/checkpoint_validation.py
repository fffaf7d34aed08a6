"""Evaluate committed checkpoints on held-out data during training, where a worker's room is free.

    validator = Validator(spec, run, say)
    validator.poll(); ...; validator.close()

Every POLL_S seconds the driver looks for a newer committed checkpoint. If the cluster has room for
one more worker, a Ray task with a worker's resources evaluates it; one task runs at a time. Each
result is a line of `validation.jsonl`. A validation that fails is logged and does not end training.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from rayapp.driver import placement
from rayapp.driver.display import held_out
from rayapp.observe.records import Validation
from rayapp.observe.run_folder import VALIDATIONS
from rayapp.observe.status import read_validations
from rayapp.observe.words import last_line
from rayapp.storage import Storage
from rayapp.train.checkpoint.marker import newest_committed
from rayapp.train.spec import AnySpec

POLL_S = 5.0
CLOSE_S = 300.0  # for the last validation, after training has ended

logger = logging.getLogger("rayapp.driver")


class Validator:
    """Validate the checkpoints of a run as they are committed."""

    def __init__(self, spec: AnySpec, run: Storage, say: Callable[[str], None]) -> None:
        self._spec, self._run, self._say = spec, run, say
        self._lines = read_validations(run)
        self._asked = max((line["step"] for line in self._lines), default=-1)
        self._looked_at = time.monotonic()
        self._task: Any = None

    def poll(self) -> None:
        """Take the result of a finished validation; else start one if there is a newer commit."""
        import ray

        if self._task is not None:
            if ray.wait([self._task], timeout=0)[0]:
                self._take()
            return
        now = time.monotonic()
        if now - self._looked_at < POLL_S:
            return
        self._looked_at = now
        try:
            self._start()
        except (ray.exceptions.RayError, OSError, RuntimeError) as error:
            logger.warning("cannot look for checkpoints to validate: %s", error)

    def close(self) -> None:
        """Wait CLOSE_S for the validation that is running, if any, and take its result."""
        import ray

        if self._task is None:
            return
        if ray.wait([self._task], timeout=CLOSE_S)[0]:
            self._take()
            return
        ray.cancel(self._task, force=True)
        logger.warning("a checkpoint was not validated: it took %.0f s after training", CLOSE_S)

    def _start(self) -> None:
        import ray

        newest = newest_committed(self._run)
        if (
            newest is None
            or newest.step <= self._asked
            or not placement.free_workers(self._spec.config)
        ):
            return
        self._asked = newest.step
        resources = dict(placement.needs(self._spec.config))
        task = ray.remote(
            num_cpus=resources.pop("CPU"),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            max_retries=0,
        )(_validate)
        self._task = task.remote(self._spec, newest.name, newest.step)

    def _take(self) -> None:
        import ray

        task, self._task = self._task, None
        try:
            line = ray.get(task)
            self._lines.append(line)
            text = "".join(json.dumps(each) + "\n" for each in self._lines)
            self._run.write(VALIDATIONS, text.encode())
        except (ray.exceptions.RayError, OSError) as error:  # e.g. the checkpoint was deleted first
            logger.warning("a checkpoint was not validated: %s", last_line(error))
            return
        self._say(f"checkpoint of step {line['step']}: {held_out(line)}")


def _validate(spec: AnySpec, name: str, step: int) -> Validation:
    from rayapp.train.rank import validate

    return validate(spec, name, step)
