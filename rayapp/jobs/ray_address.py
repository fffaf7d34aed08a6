"""Find the address of the Ray cluster that a config means, and check that it answers.

address = address_of(config)     # "local": Ray is to be started here
"""

from __future__ import annotations

import os
import re
import socket

from rayapp.config import ConfigError, RunConfig

ANSWER_S = 10.0  # limit of a TCP connection


def address_of(config: RunConfig) -> str:
    """Return the connected cluster's address, else cluster.address, else RAY_ADDRESS, else `local`.

    `local` means that Ray is to be started on this machine.
    """
    import ray

    if ray.is_initialized():
        return ray.get_runtime_context().gcs_address
    return config.cluster.address or os.environ.get("RAY_ADDRESS") or "local"


def check_answers(address: str) -> None:
    """Refuse a host:port where nothing listens, as Ray itself would keep trying for a minute.

    Addresses of another form, such as `local` or ray://, are not checked.

    Raises:
        ConfigError: naming what to set.
    """
    place = re.fullmatch(r"\[?(.+?)\]?:(\d+)", address)
    if place is None or "://" in address:
        return
    try:
        socket.create_connection((place[1], int(place[2])), timeout=ANSWER_S).close()
    except OSError as error:
        raise ConfigError(
            [
                f"cluster.address={address} is not reachable: {error.strerror or error}. Set the "
                "address of a head node's GCS, e.g. 10.0.0.1:6379, or `local`"
            ]
        ) from None
