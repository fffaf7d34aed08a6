"""Check a cluster before a run is started on it.

    python -m rayapp.cluster.preflight [CONFIG.yaml] [--section.field=value ...] [--json]

Here is what sends all of it to a cluster as a job, for `rayapp preflight` and `rayapp.preflight`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayapp.config import RunConfig, arguments, load
from rayapp.jobs import JobError, JobsClient, SubmitOptions, prepare

OPTIONS = {"json": "false", "min_gbit_per_s": "none", "timeout_s": "180"}


def read_options(asked: Mapping[str, str]) -> tuple[float | None, float]:
    """Return (Gbit/s that a link must reach or None, seconds to wait for an answer).

    Raises:
        ConfigError: either is no number above 0.
    """
    least = asked["min_gbit_per_s"]
    timeout_s = arguments.number("timeout_s", asked["timeout_s"], endless=False)
    if least == "none":
        return None, timeout_s
    return arguments.number("min_gbit_per_s", least, endless=False), timeout_s


def send(
    config: RunConfig, options: SubmitOptions, address: str | None, asked: Mapping[str, str]
) -> tuple[JobsClient, str]:
    """Start the job; return the cluster and the job's submission id.

    `asked` holds the check's options as text.

    Raises:
        ConfigError: an option is not valid, or the config cannot run there.
        JobError: the cluster cannot or will not.
    """
    read_options({**OPTIONS, **asked})
    flags = [f"--{name}={asked[name]}" for name in asked if asked[name] != OPTIONS[name]]
    order = prepare(config, options, __name__, flags)
    cluster = JobsClient.at(address)
    return cluster, cluster.submit(order)


def preflight(
    config: RunConfig | str | Path | Mapping[str, Any],
    *,
    address: str | None = None,
    min_gbit_per_s: float | None = None,
    timeout_s: float = 180.0,
    working_dir: str | None = None,
    pip: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    driver_cpus: float = 0.0,
    tags: Mapping[str, str] | None = None,
    **sections: Mapping[str, Any],
) -> dict[str, Any]:
    """Check a cluster before a run is started on it, and return what `--json` prints.

    The keys are `passed`, `findings`, `not_judged` and `facts`. `config` and `sections` are as
    `rayapp.submit` takes them.

    Raises:
        ConfigError: an option is not valid, or the config cannot run there.
        JobError: the cluster cannot, will not, or ends the job before its end.
    """
    options = SubmitOptions(
        working_dir, tuple(pip), env or {}, secrets or {}, driver_cpus, tags=tags or {}
    )
    asked = {"json": "true", "timeout_s": f"{timeout_s:g}"}
    if min_gbit_per_s is not None:
        asked["min_gbit_per_s"] = f"{min_gbit_per_s:g}"
    cluster, submission_id = send(load(config, None, None, **sections), options, address, asked)
    info = cluster.wait(submission_id)
    text = cluster.logs(submission_id)
    _, brace, rest = f"\n{text}".partition("\n{")  # Ray may print lines before it
    if info.exit_code not in (0, 1) or not brace:
        raise JobError(f"preflight {submission_id} {info.status}: {text.strip()[-2000:]}")
    value: dict[str, Any] = json.JSONDecoder().raw_decode(f"{{{rest}")[0]
    return value
