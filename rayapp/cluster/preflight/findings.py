"""What a cluster is held to, and what is found wrong with it."""

from __future__ import annotations

from dataclasses import dataclass

from rayapp.config import RunConfig
from rayapp.hardware import GIB, Instance
from rayapp.planner.machines import named_instance


@dataclass(frozen=True)
class Requirements:
    """What a cluster must reach; None: nothing is known to hold it to."""

    instance: Instance | None = None
    gbit_per_s: float | None = None
    """Of a link, in each direction, as the user asks."""
    gpus: bool | None = None
    """What the config says of them: true, false, or None for as they come."""


@dataclass(frozen=True)
class Finding:
    """Something that would cost a run time, or its life."""

    node: str
    """Its name; two with an arrow for a link; `cluster` for all."""
    what: str
    measured: str
    wanted: str
    fix: str


def requirements_of(config: RunConfig, min_gbit_per_s: float | None = None) -> Requirements:
    """Return what a config's cluster must reach.

    Raises:
        ConfigError: cluster.instance is not in the table.
    """
    gpus = {"true": True, "false": False}.get(config.cluster.gpu)
    return Requirements(named_instance(config), min_gbit_per_s, gpus)


def size(count: float) -> str:
    """Write a number of bytes.

    >>> size(33_554_432), size(2**30)
    ('32 MiB', '1 GiB')
    """
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"
