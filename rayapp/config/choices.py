"""cluster.instance: the machines that a run may have, in order of preference.

Choice.parse("p4d.24xlarge:spot@9.5")   # type, market, USD per hour of one instance
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator

from rayapp.config.fields import none_or, yaml_or

MARKETS = ("on-demand", "spot")
# Labels of Ray nodes of a rendered cluster, where cluster.instance is a list.
INSTANCE_LABEL, MARKET_LABEL = "rayapp/instance", "rayapp/market"
DATA_LABEL = ("rayapp/group", "data")  # of the nodes of a rendered cluster that prepare data
MOST = 5  # an ECS cluster has at most 20 capacity providers, and each choice one in each zone

Place: TypeAlias = tuple[str, str]
"""An instance type and a market."""


@dataclass(frozen=True)
class Choice:
    """An instance type and how it is bought."""

    instance: str
    market: str | None = None
    """None: on demand in a list; alone, as the cluster is rendered (`--market`)."""
    usd_per_hour: float | None = None
    """Of one instance; None: the list price on demand, and no known price of spot."""

    @classmethod
    def parse(cls, text: str) -> Choice:
        """Read TYPE, TYPE:MARKET, TYPE@USD or TYPE:MARKET@USD.

        Raises:
            ValueError: another market, or a price that is no number above 0.

        >>> Choice.parse("p4d.24xlarge:spot@9.5")
        Choice(instance='p4d.24xlarge', market='spot', usd_per_hour=9.5)
        >>> Choice.parse("p5.48xlarge")
        Choice(instance='p5.48xlarge', market=None, usd_per_hour=None)
        """
        named, at, price = text.strip().partition("@")
        name, colon, market = named.partition(":")
        if not name or (colon and market not in MARKETS):
            raise ValueError(f"{text} must be TYPE, TYPE:spot or TYPE:on-demand")
        if at and not (price.replace(".", "", 1).isdecimal() and float(price) > 0):
            raise ValueError(f"{text} must end in USD per hour of one instance, e.g. @9.5")
        return cls(name, market or None, float(price) if at else None)

    @property
    def place(self) -> Place:
        """The instance type and the market, on demand where it is not said."""
        return self.instance, self.market or "on-demand"


def one_or_choices(value: Any) -> str | tuple[str, ...] | None:
    """Read one choice as text and several as a list; see Choice.parse.

    Raises:
        ValueError: one cannot be read, two are the same, or there are too many.
    """
    value = none_or(yaml_or(value, "["))
    if value is None:
        return None
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")]
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("it must be an instance type, or a list in order of preference")
    if wrong := [each for each in value if not isinstance(each, str)]:
        raise ValueError(f"{wrong[0]} must be text")
    places = [Choice.parse(each).place for each in value]
    if len(set(places)) < len(places):
        raise ValueError("each instance type may appear once per market")
    if len(places) > MOST:
        raise ValueError(f"it must have at most {MOST} choices")
    return str(value[0]) if len(value) == 1 else tuple(value)


Instances = Annotated[str | tuple[str, ...] | None, BeforeValidator(one_or_choices)]
