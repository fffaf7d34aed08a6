"""Look up the machines of a config: instance type, node count, price.

one = named_instance(config, problems)
workers, nodes = workers_of(config, one)
price_of(config, one, region="us-west-2")
"""

from __future__ import annotations

from rayapp import hardware
from rayapp.config import ConfigError, RunConfig
from rayapp.hardware import Instance, UnknownInstance


def named_instance(config: RunConfig, problems: list[str] | None = None) -> Instance | None:
    """Return the instance that `cluster.instance` names; None if it names none.

    An instance that is not in the table is appended to `problems` and gives None; without
    `problems` it raises.

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


def nodes_of(instance: Instance | None, workers: int) -> int:
    """Return how many nodes the workers need: one worker per GPU, or one node without GPUs."""
    return 1 if instance is None or not instance.gpus else -(-workers // instance.gpus)


def workers_of(config: RunConfig, instance: Instance | None, most: bool = False) -> tuple[int, int]:
    """Return (workers, nodes) for the fewest workers that the config allows, or for the most."""
    workers = config.cluster.max_workers if most else config.cluster.min_workers
    return workers, nodes_of(instance, workers)


def price_of(
    config: RunConfig, instance: Instance | None, region: str, usd_per_hour: float | None = None
) -> float | None:
    """Return USD per hour of one instance: the argument, else the config, else the price list.

    None if none of them has a price.
    """
    price = usd_per_hour or config.cluster.usd_per_hour
    if price is None and instance is not None:
        price = instance.usd_per_hour.get(region)
    return price


def per_worker(rows: int, size: int, workers: int) -> int:
    """Return how many micro-batches of `size` rows a worker runs per step, as Order deals them.

    >>> per_worker(12, 2, 5)
    2
    """
    return -(-rows // size // workers)
