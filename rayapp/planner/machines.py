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
    """Return the instance that `cluster.instance` names, the first of a list; None for none.

    An instance that is not in the table is appended to `problems` and gives None; without
    `problems` it raises.

    Raises:
        ConfigError: one is not in the table.
    """
    found, unknown = list[Instance](), list[str]()
    for choice in config.cluster.choices:
        try:
            found.append(hardware.instance(choice.instance))
        except UnknownInstance as error:
            unknown.append(str(error))
    if unknown and problems is None:
        raise ConfigError(unknown)
    if problems is not None:
        problems += unknown
    return found[0] if found and not unknown else None


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

    Of a list in the config its first choice counts. None if none of them has a price; the price
    list has none of spot.
    """
    choice = config.cluster.choices[0] if config.cluster.choices else None
    price = usd_per_hour or config.cluster.usd_per_hour
    if price is None and choice is not None:
        price = choice.usd_per_hour
    if price is None and instance is not None and (choice is None or choice.market != "spot"):
        price = instance.usd_per_hour.get(region)
    return price


def per_worker(rows: int, size: int, workers: int) -> int:
    """Return how many micro-batches of `size` rows a worker runs per step, as Order deals them.

    >>> per_worker(12, 2, 5)
    2
    """
    return -(-rows // size // workers)
