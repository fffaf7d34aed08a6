"""python -m rayapp.cluster.preflight [CONFIG.yaml] [--section.field=value ...]

  --json               print everything as JSON
  --min_gbit_per_s=N   rate that a link between two nodes must reach; by default cluster.instance's
  --timeout_s=180      seconds to wait for one answer

Checks the cluster of cluster.address (RAY_ADDRESS; Ray on this machine without either).
Exit codes: 0 all pass, 1 there are findings, 2 bad config.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rayapp.config import ConfigError, RunConfig, arguments
from rayapp.jobs import secrets
from rayapp.observe.run_folder import Exit
from rayapp.storage import StorageError, open_storage

MODULE = "rayapp.cluster.preflight"
OPTIONS = {"json": "false", "min_gbit_per_s": "none", "timeout_s": "180"}


def main(argv: list[str]) -> int:
    """Run the command line; return the exit code."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return Exit.DONE
    try:
        config, asked = arguments.read(arguments.flags(argv, {"json"}), OPTIONS)
        numbers = read_options(asked)
        secrets.load()
        return check(config, asked["json"] == "true", *numbers)
    except ConfigError as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        return Exit.REFUSED
    except secrets.SecretError as error:
        print(f"failed: {error}", file=sys.stderr)
        return Exit.FAILED


def read_options(asked: dict[str, str]) -> tuple[float | None, float]:
    """Return (Gbit/s that a link must reach or None, seconds to wait for an answer).

    Raises:
        ConfigError: either is no number above 0.
    """
    problems, values = list[str](), dict[str, float | None]()
    for name in ("min_gbit_per_s", "timeout_s"):
        text = asked[name]
        given = not text == OPTIONS[name] == "none"
        try:
            values[name] = arguments.number(name, text, endless=False) if given else None
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    timeout_s = values["timeout_s"]
    assert timeout_s is not None
    return values["min_gbit_per_s"], timeout_s


def check(config: RunConfig, as_json: bool, min_gbit_per_s: float | None, timeout_s: float) -> int:
    """Survey the cluster, print facts and findings, return the exit code."""
    from rayapp.cluster.preflight.assessment import assess
    from rayapp.cluster.preflight.findings import requirements_of

    required = requirements_of(config, min_gbit_per_s)
    storage = config.run.storage
    if "://" not in storage:  # workers have another working folder
        storage = os.path.abspath(os.path.expanduser(storage))
        run = config.run.model_copy(update={"storage": storage})
        config = config.model_copy(update={"run": run})
    try:
        open_storage(storage)
    except StorageError as error:
        raise ConfigError([f"run.storage={storage} is not valid: {error}"]) from None
    from rayapp.cluster.preflight import page
    from rayapp.cluster.preflight.survey import survey
    from rayapp.observe.plain import Console

    with _connected(config):
        facts = survey(config, timeout_s)
    findings = assess(facts, required)
    if as_json:
        print(json.dumps(page.as_dict(facts, findings, required), indent=1))
    else:
        page.show(Console(), facts, findings, required)
    return Exit.FAILED if findings else Exit.DONE


@contextmanager
def _connected(config: RunConfig) -> Iterator[None]:
    """Connect to the cluster or start Ray here, and shut down after; reuse a connection."""
    import ray

    from rayapp.jobs.ray_address import address_of, check_answers

    if ray.is_initialized():
        yield
        return
    address = address_of(config)
    check_answers(address)
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
