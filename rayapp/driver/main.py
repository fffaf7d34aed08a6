"""The command line of a kind of run; its exit codes: 0 done, 1 failed, 2 bad config, 3 stopped."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from rayapp.config import ConfigError, RunConfig, arguments, help
from rayapp.driver.ray_session import tell_ray
from rayapp.jobs.secrets import SecretError
from rayapp.observe.events import submission_id
from rayapp.observe.plain import Console, plain_output
from rayapp.observe.run_folder import EXIT_CODES, RETRIED, Exit, refused
from rayapp.storage import StorageError

STOP_S = 20.0  # Ray sends SIGTERM about a second after it is asked to stop a job


@plain_output()
def main(
    argv: list[str],
    usage: str,
    kind: type[RunConfig],
    load_run: Callable[[], Callable[..., Mapping[str, Any]]],
    started: float | None,
) -> int:
    """Run the command line and return the exit code.

    `load_run` is called only once the config is valid, as its imports take seconds. An end that
    this returns for the run is final, but for a secret or a storage that cannot be reached; KubeRay
    tries again after these, after an exception of another kind, and after a driver that is killed.
    """
    try:
        if "--help" in argv or "-h" in argv:
            sections = [word for word in argv if not word.startswith("-")]
            print(f"{usage}\n\n{help.text(kind, sections)}")
            return Exit.DONE
        config, _ = arguments.read(argv, {}, kind)
        tell_ray()
        run = _loaded(load_run)  # only now needed
        from rayapp.observe.result import RunFailed

        try:
            result = run(config, Console(), started)
        except (RunFailed, SecretError, StorageError) as error:
            print(f"failed: {error}", file=sys.stderr)
            return _final(Exit.FAILED) if isinstance(error, RunFailed) else Exit.FAILED
    except ConfigError as error:
        return _final(refused(error))
    return _final(EXIT_CODES[result["status"]])


def _final(code: int) -> int:
    """Return the exit code; where a failed job is tried again, have Ray stop this one first.

    KubeRay starts a RayJob again on a new cluster if Ray calls its job FAILED, as it does after any
    exit code but 0. It calls a job that it was asked to stop STOPPED. Where it cannot be asked,
    exit code 0 prevents another try.
    """
    job = submission_id()
    if code == Exit.DONE or job is None or RETRIED not in os.environ:
        return code
    from ray.dashboard.utils import get_address_for_submission_client
    from ray.exceptions import RayError

    from rayapp.jobs import JobsClient

    print(f"exit code {code} is final: Ray stops the job, and it is not tried again", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
    try:
        JobsClient.at(get_address_for_submission_client(None), check_version=False).stop(job)
        time.sleep(STOP_S)
    except (RayError, OSError, RuntimeError, ValueError) as error:
        print(f"Ray cannot be asked, so the job ends as if it were done: {error}", file=sys.stderr)
    return Exit.DONE


def _loaded(load_run: Callable[[], Callable[..., Mapping[str, Any]]]) -> Callable[..., Any]:
    from rayapp.driver.heartbeat import Heartbeat  # imports Ray
    from rayapp.driver.output import Tail
    from rayapp.observe.activity import Phases

    phases = Phases()
    # No terminal: its redrawn line replaces sys.stderr, which what is imported may keep.
    with Heartbeat(phases, Console(force_terminal=False, force_jupyter=False), Tail()):
        phases.begin("importing torch, ray and transformers")
        return load_run()
