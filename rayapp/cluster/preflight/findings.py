"""What a cluster must reach (Requirements), and what is wrong with it (Finding)."""

from __future__ import annotations

from dataclasses import dataclass

from rayapp.config import RunConfig
from rayapp.hardware import GIB, Instance
from rayapp.planner.question import named_instance


@dataclass(frozen=True)
class Requirements:
    """What a cluster must reach; None: not known, and so not judged."""

    instance: Instance | None = None
    gbit_per_s: float | None = None
    """Rate of a link in each direction that the user asks for."""
    gpus: bool | None = None
    """cluster.gpu: whether GPUs are wanted; None: use them if there are any."""


@dataclass(frozen=True)
class Finding:
    """Something that would slow a run down, or make it fail."""

    node: str
    """The node's name; two with an arrow for a link; `driver`, or `cluster` for all of it."""
    what: str
    measured: str
    wanted: str
    fix: str


def requirements_of(config: RunConfig, min_gbit_per_s: float | None = None) -> Requirements:
    """Return what the cluster of a config must reach; of a list of types no one is required.

    Raises:
        ConfigError: cluster.instance is not in the table.
    """
    gpus = {"true": True, "false": False}.get(config.cluster.gpu)
    one, several = named_instance(config), len(config.cluster.choices) > 1
    return Requirements(None if several else one, min_gbit_per_s, gpus)


def size(count: float) -> str:
    """Return a number of bytes as text.

    >>> size(33_554_432), size(2**30)
    ('32 MiB', '1 GiB')
    """
    for unit, name in ((2**40, "TiB"), (GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"
