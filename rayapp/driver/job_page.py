"""Show a run on the Jobs page of Ray's dashboard: its name, its folder, and how far it is.

Ray has no public call that changes a job while it runs, so its record in Ray's key-value store is
changed here. Ray writes the record itself only before this process starts and after it has ended,
or after Ray has missed it: `ray job stop` may end the shell that starts a command alone.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from rayapp.jobs.package import NAME_KEY, RUN_KEY

TELL_S = 10.0  # between two changes of the record

logger = logging.getLogger("rayapp.driver")


class JobPage:
    """The record of this driver's job, however the job was sent."""

    def __init__(
        self, submission_id: str, name: str, run_url: str, ask_to_stop: Callable[[], None]
    ) -> None:
        """`ask_to_stop` is called if Ray takes this job for stopped, though its driver lives."""
        from ray.dashboard.modules.job.common import JobInfoStorageClient

        self._key = JobInfoStorageClient.JOB_DATA_KEY.format(job_id=submission_id).encode()
        self._ours = {NAME_KEY: name, RUN_KEY: run_url}
        self._last_shown, self._shown_at = "", 0.0
        self._failed = self._stopped = False
        self._ask_to_stop = ask_to_stop

    def tell(self, text: str) -> None:
        """Make a text the job's status message, at most every TELL_S seconds."""
        now = time.monotonic()
        if (
            self._failed
            or text == self._last_shown
            or (self._last_shown and now - self._shown_at < TELL_S)
        ):
            return
        self._last_shown, self._shown_at = text, now
        from ray.exceptions import RayError

        try:
            self._change(text)
        except (RayError, OSError, RuntimeError, ValueError, TypeError) as error:
            self._failed = True
            logger.warning("Ray's Jobs page does not show how far the run is: %s", error)

    def _change(self, text: str) -> None:
        from ray._private.ray_constants import KV_NAMESPACE_JOB
        from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

        stored = _internal_kv_get(self._key, namespace=KV_NAMESPACE_JOB)
        record: dict[str, Any] = json.loads(stored or b"{}")
        if record.get("status") == "STOPPED" and not self._stopped:
            self._stopped = True
            logger.warning("Ray has stopped this job, but not its command: it saves and leaves")
            self._ask_to_stop()
        if record.get("status") != "RUNNING":
            return
        record["message"] = text
        record["metadata"] = {**self._ours, **(record.get("metadata") or {})}
        value = json.dumps(record).encode()
        _internal_kv_put(self._key, value, overwrite=True, namespace=KV_NAMESPACE_JOB)
