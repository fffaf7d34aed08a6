"""The machines that a config names: which, how many, and what they cost.

one = named_instance(config, problems)
workers, nodes = workers_of(config, one)
price_of(config, one, region="us-west-2")
"""

from __future__ import annotations

from rayapp import hardware
from rayapp.config import ConfigError, RunConfig
from rayapp.hardware import Instance, UnknownInstance


def named_instance(config: RunConfig, problems: list[str] | None = None) -> Instance | None:
    """Return `cluster.instance`, None where none is named.

    One that is not in the table is a problem, and None; without `problems` it is an error.

    Raises:
        ConfigError: it is not in the table.
    """
    if config.cluster.instance is None:
        return None
    try:
        return hardware.instance(config.cluster.instance)
    except UnknownInstance as error:
        if problems is None:
            raise ConfigError([str(error)]) from None
        problems.append(str(error))
        return None


def nodes_of(one: Instance | None, workers: int) -> int:
    """Return how many machines so many workers take: one for each GPU, all on one without any."""
    return 1 if one is None or not one.gpus else -(-workers // one.gpus)


def workers_of(config: RunConfig, one: Instance | None, most: bool = False) -> tuple[int, int]:
    """Return how many workers are planned for, and their nodes: the fewest, or the most."""
    workers = config.cluster.max_workers if most else config.cluster.min_workers
    return workers, nodes_of(one, workers)


def price_of(
    config: RunConfig, one: Instance | None, region: str, usd_per_hour: float | None = None
) -> float | None:
    """Return what an instance costs: as given, as configured, else as listed."""
    price = usd_per_hour or config.cluster.usd_per_hour
    if price is None and one is not None:
        price = hardware.usd_per_hour(one, region)
    return price


def per_worker(rows: int, size: int, workers: int) -> int:
    """Return the micro-batches of `size` rows that a worker runs in a step, as Order deals them.

    >>> per_worker(12, 2, 5)
    2
    """
    return -(-rows // size // workers)
