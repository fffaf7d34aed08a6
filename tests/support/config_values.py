"""Every value of every choice of a config, and the ends of its numbers, found by reflection."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rayapp.config import RunConfig
from rayapp.config.reading import sections_in


def choices(kind: type[RunConfig]) -> dict[str, list[str]]:
    """Return the values of each field that is a choice, as texts of a command line."""
    schema, found = kind.model_json_schema(), dict[str, dict[str, None]]()
    for name, node in _fields(schema, schema):
        each = [value if isinstance(value, str) else json.dumps(value) for value in _choices(node)]
        found.setdefault(name, {}).update(dict.fromkeys(each))
    return {name: [*values] for name, values in found.items() if values}


def ends(kind: type[RunConfig]) -> dict[str, list[str]]:
    """Return the least and the most value of each field that has one."""
    found = dict[str, list[str]]()
    for name, field in _numbers(kind):
        if each := _ends(field.annotation, field.metadata):
            found[name] = [json.dumps(value).strip("[]") for value in each]
    return found


def pairs(values: dict[str, list[str]]) -> Iterator[dict[str, str]]:
    """Yield each value of a field with each value of another one."""
    for one, other in itertools.combinations(values, 2):
        for first, second in itertools.product(values[one], values[other]):
            yield {one: first, other: second}


def _fields(node: Any, schema: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (section.field, its schema), for each alternative of a union apart."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    for each in node.get("anyOf", ()):
        yield from _fields(each, schema, name)
    for key, below in node.get("properties", {}).items():
        yield from _fields(below, schema, f"{name}.{key}".lstrip("."))
    if not {"anyOf", "properties"} & node.keys():
        yield name, node


def _choices(node: Any) -> list[Any]:
    if node.get("type") == "array":
        return _choices(node.get("items", {}))
    plain = {"boolean": [True, False], "null": ["none"]}
    words = node.get("pattern", "").removeprefix("^(").removesuffix(")$").split("|")
    named = [word for word in words if word.isalpha()]
    const = [node["const"]] if "const" in node else []
    return [*plain.get(node.get("type"), ()), *node.get("enum", ()), *const, *named]


def _numbers(kind: type[BaseModel], above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in kind.model_fields.items():
        yield f"{above}{name}", field
        for section in sections_in(field.annotation):
            yield from _numbers(section, f"{above}{name}.")


def _ends(annotation: Any, metadata: Sequence[Any] = ()) -> list[Any]:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _ends(args[0], [each for info in args[1:] for each in getattr(info, "metadata", ())])
    if origin is tuple:
        return [list(each) for each in zip(*map(_ends, args), strict=False)]
    if origin is dict:
        return [{"stdlib": each} for each in _ends(args[1])]
    found = []
    for bound in metadata:
        if isinstance(bound, Ge | Le):
            found.append(bound.ge if isinstance(bound, Ge) else bound.le)
        elif isinstance(bound, Gt | Lt):
            place, sign = (bound.gt, 1) if isinstance(bound, Gt) else (bound.lt, -1)
            whole = int in (annotation, *args)
            found.append(place + sign if whole else math.nextafter(place, sign * math.inf))
    return found
