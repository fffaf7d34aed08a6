"""Read the files that a run leaves, each by its one type (see rayapp.observe.records).

    plan = read(run, PLAN, Plan)                    # None if there is no such file
    line = parsed(text, MetricsLine)

Whoever can write to a storage can put anything there. What is not of the type is a DamagedFile,
which names the file and the reason. A number is finite and at most MOST, so that code that adds,
divides and formats numbers needs no checks of its own; NaN and infinity are read as None.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from rayapp.config import ConfigError
from rayapp.storage import Storage

MOST = 1e39
MOST_COUNT = 2**53  # exact as a float too
MOST_TIME = 1e11  # Unix seconds, in the year 5138
Count: TypeAlias = Annotated[int, Field(ge=0, le=MOST_COUNT)]
Number: TypeAlias = Annotated[float, Field(ge=-MOST, le=MOST)]
UnixTime: TypeAlias = Annotated[float, Field(ge=0, le=MOST_TIME)]

REWRITTEN = "Delete the file: the run's next command writes it again"

T = TypeVar("T")


class DamagedFile(ConfigError):
    """A file of a run's folder does not have the content that a run writes."""

    def __init__(self, url: str, why: str, fix: str = REWRITTEN) -> None:
        super().__init__([f"{url} is damaged: {why}. {fix}"])


def read(run: Storage, name: str, kind: type[T], fix: str = REWRITTEN) -> T | None:
    """Return the content of a JSON file in a run's folder, None if there is no such file.

    Raises:
        DamagedFile: it is not of this kind.
    """
    try:
        content: T = parsed(run.read(name), kind)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DamagedFile(f"{run.url}/{name}", str(error), fix) from None
    return content


def parsed(data: bytes, kind: Any) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not of this kind; the message is one line.
    """
    try:
        value = json.loads(
            data, parse_int=_whole, parse_float=_number, parse_constant=lambda _: None
        )
        return schema(kind).validate_json(as_utf8(value), strict=True, extra="allow")
    except ValidationError as error:
        raise ValueError(reason_of(error)) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"it is not JSON ({error})") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def as_utf8(value: object) -> bytes:
    """Return a value as JSON, with `?` for half of a surrogate pair, which UTF-8 has not."""
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")


def reason_of(error: ValidationError) -> str:
    """Return where the first problem is, and what it is."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return " ".join(f"{where}: {first['msg']}".removeprefix(": ").split())


@cache
def schema(kind: Any) -> TypeAdapter[Any]:
    """Return what checks values of a kind; it takes milliseconds to make."""
    return TypeAdapter(kind)


def _number(text: str) -> float:
    value = float(text)
    if not -MOST <= value <= MOST:
        raise ValueError(f"the number {text[:20]} is out of range")
    return value


def _whole(text: str) -> int:
    _number(text)
    return int(text)
