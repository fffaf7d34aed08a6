"""The steps of a run as they come, in a loop or in an asyncio program.

for line in job.steps(): print(line["step"], line["loss"])
async for line in job.steps(): ...
status = await job
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from rayapp.observe.columns import Follower
from rayapp.observe.metrics import MetricsLine
from rayapp.observe.run_folder import EXIT_CODES

if TYPE_CHECKING:
    from rayapp.jobs.handle import Job

PART = 500  # lines that are read at once


class LiveSteps:
    """Iterate over the lines of metrics.jsonl until the run has ended.

    Steps that a recovery does again come again. Each iteration begins with the first step.
    """

    def __init__(self, job: Job, every_s: float) -> None:
        self._job, self._every_s = job, every_s

    def __iter__(self) -> Iterator[MetricsLine]:
        reader = _NewLines(self._job)
        while True:
            lines, ended = reader.read()
            yield from lines
            if ended:
                return
            if not lines:
                time.sleep(self._every_s)

    async def __aiter__(self) -> AsyncIterator[MetricsLine]:
        reader = _NewLines(self._job)
        while True:
            lines, ended = await asyncio.to_thread(reader.read)
            for line in lines:
                yield line
            if ended:
                return
            if not lines:
                await asyncio.sleep(self._every_s)


class _NewLines:
    def __init__(self, job: Job) -> None:
        self._job, self._followed, self._done = job, Follower(job.run), 0

    def read(self) -> tuple[list[MetricsLine], bool]:
        """Return further lines, and whether the run has ended and these are the last."""
        ended = self._job.status() in EXIT_CODES  # asked before the lines are read
        self._done = min(self._done, self._followed.poll())
        count = len(self._followed.steps)
        stop = min(count, self._done + PART)
        lines = self._followed.lines(self._done, stop) if stop > self._done else []
        self._done = stop
        return lines, ended and stop == count
