"""The base class of sections, and field types that also read text from a command line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    field_validator,
)

from rayapp.config.code import CODE_PATTERN
from rayapp.config.text import parse_yaml

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"


class Section(BaseModel):
    """A frozen part of the config; unknown fields are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_not_one(cls, value: Any, info: ValidationInfo) -> Any:
        numbers = (int, float, int | None, float | None)
        assert info.field_name is not None
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation in numbers:
            raise ValueError("it must be a number")
        return value


def none_or(value: Any) -> Any:
    """Read `none`, `null` and the empty text as None."""
    return None if isinstance(value, str) and value.lower() in ("none", "null", "") else value


def yaml_or(value: Any, opening: str) -> Any:
    """Parse text that opens like a YAML list or mapping; what does not parse stays text."""
    if isinstance(value, str) and value.startswith(opening):
        try:
            return parse_yaml(value)
        except yaml.YAMLError:
            return value
    return value


def mapping(value: Any) -> Any:
    """Parse text that opens like a mapping; see none_or."""
    return none_or(yaml_or(value, "{"))


def comma_list(value: Any) -> Any:
    """Split text at commas, or parse it as a YAML list."""
    value = yaml_or(value, "[")
    if isinstance(value, str):
        value = "" if none_or(value) is None else value
        return [part.strip() for part in value.strip("[]()").split(",") if part.strip()]
    return value


def one_or_list(value: Any) -> Any:
    """Take one text as a list of one, and None as an empty list."""
    value = none_or(yaml_or(value, "["))
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _auto_as_none(value: Any) -> Any:
    return None if isinstance(value, str) and value.lower() == "auto" else value


def _none_as_auto(value: Any) -> Any:
    return "auto" if value is None else value


def _truth_as_text(value: Any) -> Any:
    return str(value).lower() if isinstance(value, (bool, str)) else value


RecordKind = Literal[
    "text", "prompt", "chat", "preference", "chat_preference", "unpaired", "chat_unpaired"
]
DataKind = Literal["auto", RecordKind]
PairObjective = Literal["dpo", "ipo", "orpo", "simpo", "kto"]
Objective = Literal["sft", PairObjective]
WITH_REFERENCE: tuple[Objective, ...] = ("dpo", "ipo", "kto")
Reference = Literal["adapters off", "computed before"]
LABEL = "label"  # of kto: the column that says whether an answer is good
Text = Annotated[str, Field(min_length=1)]
OptionalStr = Annotated[str | None, BeforeValidator(none_or)]
OptionalInt = Annotated[int | None, BeforeValidator(none_or)]
OptionalFloat = Annotated[float | None, BeforeValidator(none_or)]
Strings = Annotated[tuple[str, ...], BeforeValidator(comma_list)]
Texts = Annotated[tuple[str, ...], BeforeValidator(one_or_list)]
Code = Annotated[str, Field(pattern=CODE_PATTERN)]
OptionalCode = Annotated[Code | None, BeforeValidator(none_or)]
Steps = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}:[1-9][0-9]{0,8}$")]
StepSlice = Annotated[Steps | None, BeforeValidator(none_or)]
Codes = Annotated[tuple[Code, ...], BeforeValidator(comma_list)]
Trackers = Annotated[
    tuple[Literal["tensorboard", "mlflow", "wandb"], ...], BeforeValidator(comma_list)
]
Beta = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AutoBool = Annotated[
    bool | None,
    BeforeValidator(_auto_as_none, json_schema_input_type=bool | Literal["auto"]),
    PlainSerializer(_none_as_auto),
]
AutoInt = Annotated[
    int | None,
    BeforeValidator(_auto_as_none, json_schema_input_type=int | Literal["auto"]),
    PlainSerializer(_none_as_auto),
]
AutoFloat = Annotated[
    float | None,
    BeforeValidator(_auto_as_none, json_schema_input_type=float | Literal["auto"]),
    PlainSerializer(_none_as_auto),
]
# YAML has `workers: 4` as a number and `gpu: true` as a truth value; the schema allows both.
Workers = Annotated[str, BeforeValidator(_number_as_text, json_schema_input_type=str | int)]
Gpu = Annotated[
    Literal["auto", "true", "false"],
    BeforeValidator(_truth_as_text, json_schema_input_type=Literal["auto", "true", "false"] | bool),
]


@dataclass(frozen=True)
class Unit:
    """The unit of a run's data: tokens or images. `metrics.jsonl` names rates after it."""

    one: str
    many: str
    divisor: str = ""
    """What a loss is the mean over, where that is not the unit."""

    @property
    def per_s(self) -> str:
        """Name of the metric for the rate over all workers."""
        return f"{self.many}_per_s"

    @property
    def per_s_per_gpu(self) -> str:
        """Name of the metric for the rate of one worker."""
        return f"{self.many}_per_s_per_gpu"

    @property
    def loss(self) -> str:
        """Unit of a loss."""
        return f"nats per {self.divisor or self.one}"


TOKENS, IMAGES = UNITS = (Unit("token", "tokens"), Unit("image", "images"))
PAIRS, ANSWERS = (Unit("token", "tokens", divisor) for divisor in ("pair", "answer"))
# By TRL's names: how often, and by how much, good answers have the higher reward; the divergence.
ABOUT_PAIRS = ACCURACIES, MARGINS = "rewards/accuracies", "rewards/margins"
KL = "kl"


def unit_of(names: Iterable[str]) -> Unit:
    """Return the unit of a run from the field names of a metrics line or a result."""
    names = set(names)
    if ACCURACIES in names:
        return ANSWERS if KL in names else PAIRS
    return IMAGES if IMAGES.per_s in names else TOKENS


# ---- cluster.instance: the machines that a run may have, in order of preference ----------------

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
