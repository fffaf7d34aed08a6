"""The help of a config: each field with its values, default, limits and documentation.

print(text(Config))                    # all sections
print(text(Config, ["train"]))         # one of them
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from json import dumps
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rayapp.config.reading import ConfigError, field_infos, sections_in
from rayapp.config.sections import RunConfig
from rayapp.config.text import shown

INDENT = " " * 8
AUTO = ("compile", "micro_batch", "router_loss")  # None is written as `auto`
NAMES = {int: "N", float: "X", str: "TEXT", bool: "true|false"}
LIMITS = {Ge: ("ge", "from"), Gt: ("gt", "above"), Le: ("le", "to"), Lt: ("lt", "below")}


def text(kind: type[RunConfig], sections: Sequence[str] = (), width: int = 80) -> str:
    """Return the help of all sections, or of those named.

    Raises:
        ConfigError: there is no such section.
    """
    known = [name for name, info in kind.model_fields.items() if section_of(info)]
    problems = [
        f"--help {name} is unknown: there is no such section. Set one of {', '.join(known)}"
        for name in sections
        if name not in known
    ]
    if problems:
        raise ConfigError(problems)
    lines = list[str]()
    for section in sections or known:
        lines += [f"\n{section}:", *_fields(section, kind.model_fields[section], width)]
    return "\n".join(lines).lstrip("\n")


def _fields(prefix: str, section: FieldInfo, width: int) -> Iterator[str]:
    model = section_of(section)
    for name, info in model.model_fields.items() if model else ():
        field = f"{prefix}.{name}"
        inner = section_of(info)
        form = "'{rank: 16}'|none" if inner else form_of(name, info)
        facts = [f"default: {default_of(name, info)}", *filter(None, [limits_of(info)])]
        yield f"  --{field}={form}   [{'; '.join(facts)}]"
        about = " ".join((info.description or "").split())
        yield textwrap.fill(about, width, initial_indent=INDENT, subsequent_indent=INDENT)
        if inner:
            yield from _fields(field, info, width)


def forms(kind: type[RunConfig]) -> dict[str, str]:
    """Return {section.field: form} of all fields of all sections, see `form_of`."""
    each = field_infos(kind).items()
    return {n: form_of(n.rpartition(".")[2], i) for n, i in each if n.count(".") == 1}


def form_of(name: str, info: FieldInfo) -> str:
    """Return what a field takes, e.g. `N`, `adamw|muon`, `TEXT|none`."""
    form = _form(info.annotation)
    return form.replace("none", "auto") if name in AUTO else form


def _form(annotation: Any) -> str:
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return "|".join(map(str, arguments))
    if annotation in NAMES:
        return NAMES[annotation]
    if get_origin(annotation) is dict:
        return "'{NAME: VALUE}'"
    if get_origin(annotation) is tuple:
        return "A,B,..." if Ellipsis in arguments else ",".join("AB"[: len(arguments)])
    if NoneType in arguments:
        return "|".join([*(_form(each) for each in arguments if each is not NoneType), "none"])
    return "TEXT"


def limits_of(info: FieldInfo) -> str:
    """Return the limits of a number, e.g. `from 0 below 1`; empty if it has none."""
    limits = [each for each in info.metadata if type(each) in LIMITS]
    return " ".join(
        f"{word} {getattr(each, name)}" for each in limits for name, word in [LIMITS[type(each)]]
    )


def default_of(name: str, info: FieldInfo) -> str:
    """Return a field's default as a user writes it."""
    value = info.get_default(call_default_factory=True)
    if value is None and name in AUTO:
        return "auto"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return dumps(value) if isinstance(value, dict) else shown(value)


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    """Return the section that a field holds; None if it holds a value."""
    return next(iter(sections_in(info.annotation)), None)
