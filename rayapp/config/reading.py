"""Read a YAML file, overrides or a tree of sections and fields, and make a checked config of it."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from typing_extensions import TypeVar

from rayapp.config.fields import none_or
from rayapp.config.language import Config
from rayapp.config.sections import RunConfig
from rayapp.config.text import flatten, read_yaml, shown
from rayapp.config.vision import VisionConfig

# Where Ray unpacks a job's working_dir; the name is a digest of all that is in it.
PACKAGE = re.compile(r'/[^"]*/_ray_pkg_\w+/')

Described = TypeVar("Described", bound=RunConfig, default=RunConfig)


class ConfigError(ValueError):
    """The config is not usable; `problems` holds one line for each reason."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return type(self), (self.problems,)


KINDS: dict[Any, type[RunConfig]] = {None: Config, "vision": VisionConfig}  # by `task`


def load(
    config: RunConfig | str | Path | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    kind: type[Described] | None = None,
    **sections: Mapping[str, Any],
) -> Described:
    """Return a checked config: a YAML file, a config or a mapping of sections, with changes.

    None is the defaults. `overrides` names fields, `{"train.lr": 1e-3}`; `sections` gives some
    fields of a section, `train={"lr": 1e-3}`. `kind` is the class to make, by default that of
    `task`.

    Raises:
        ConfigError: with every problem of the file, the changes and their combination.
    """
    tree, problems, changes = dict[str, Any](), list[str](), dict[str, Any]()
    if isinstance(config, RunConfig):
        changes |= config.to_overrides()
    elif isinstance(config, Mapping):
        tree = deepcopy(dict(config))
    elif isinstance(config, str | Path):
        tree, problems = read_yaml(str(config))
    elif config is not None:
        problems.append(
            f"config of type {type(config).__name__} is not valid: a Config, the path of a YAML "
            "file or a mapping of sections is expected. Name sections: run={'name': 'demo'}"
        )
    for name, value in {**(overrides or {}), **sections}.items():
        if isinstance(value, Mapping) and "." not in name:
            changes |= {f"{name}.{field}": each for field, each in value.items()}
        else:
            changes[name] = value
    for field, value in changes.items():
        put(tree, field, value, problems)
    return from_dict(tree, problems, kind)


def from_dict(
    tree: Mapping[str, Any], problems: Iterable[str] = (), kind: type[Described] | None = None
) -> Described:
    """Make a config of a nested mapping of sections and fields.

    `problems` are those found before; they are raised together with new ones: those of single
    fields, and conflicts among the valid fields.

    Raises:
        ConfigError: with every problem.
    """
    task = tree.get("task")
    named = KINDS.get(task) if isinstance(task, str | None) else None
    if named is None:
        known = ", ".join(name for name in KINDS if name)
        what = f"Set task to one of {known}, or remove it for a language model"
        line = f"task={shown(task)} is unknown: it names the kind of model to train. {what}"
        raise ConfigError([*problems, line])
    if kind is not None and task is not None and named is not kind:
        line = f"task={task} is for another command: this command runs {kind.MODULE}. "
        raise ConfigError([*problems, f"{line}Run python -m {named.MODULE}"])
    made = kind or cast(type[Described], named)
    problems = list(problems)
    config, wrong = None, []
    try:
        config = made.model_validate(tree)
    except ValidationError as error:
        problems += [_explain(made, item) for item in error.errors()]
        wrong = [tuple(map(str, item["loc"])) for item in error.errors()]
    if wrong:  # conflicts among the valid fields are reported too
        try:
            config = made.model_validate(_without(tree, wrong))
        except ValidationError:
            config = None
    if config is not None:
        problems += [
            problem
            for names, problem in config.conflicts()
            if not any(
                all(a == b for a, b in zip(name.split("."), at, strict=False))
                for name in names
                for at in wrong
            )
        ]
    if problems or config is None:
        raise ConfigError(problems)
    return config


def combined_problems(config: RunConfig) -> list[str]:
    """Return the conflicts between fields that are each valid alone."""
    return [problem for _, problem in config.conflicts()]


def differences(old: RunConfig, new: RunConfig, settled: bool = True) -> list[str]:
    """Return `field: old -> new` for each changed field that makes `new` another run.

    A run may be resumed with other values of `cluster`, `checkpoint`, `run.storage`,
    `run.trackers`, `run.hooks`, `run.max_usd`, `run.max_hours` and the fields in `RESUME_SAFE`:
    none of them changes what is trained, nor does the folder of a Ray job's package. Where `new`
    is not `settled`, fields that it leaves at `auto` are not compared.
    """
    before, after = (
        flatten(json.loads(PACKAGE.sub("", json.dumps(config.model_dump(mode="json")))))
        for config in (old, new)
    )
    of_the_run = ("run.storage", "run.trackers", "run.hooks", "run.max_usd", "run.max_hours")
    free = ("cluster.", "checkpoint.", *of_the_run, *new.RESUME_SAFE)
    return [
        f"{field}: {before.get(field)} -> {after.get(field)}"
        for field in sorted(before.keys() | after.keys())
        if before.get(field) != after.get(field)
        and not field.startswith(free)
        and (settled or after.get(field) != "auto")
    ]


def field_infos(kind: type[RunConfig]) -> dict[str, FieldInfo]:
    """Return every `section.field`; fields of sections within a section come last."""

    def below(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
        for name, info in model.model_fields.items():
            yield prefix + name, info
            for inner in sections_in(info.annotation):
                yield from below(inner, f"{prefix}{name}.")

    each = [(n, i) for n, i in below(kind, "") if "." in n or not any(sections_in(i.annotation))]
    return dict(sorted(each, key=lambda field: field[0].count(".") > 1))


def fields(kind: type[RunConfig] = Config) -> dict[str, str]:
    """Return the documentation of every `section.field`; nested fields come last."""
    each = field_infos(kind).items()
    return {name: " ".join((info.description or "").split()) for name, info in each}


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the section classes in a field's annotation."""
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            yield each


def put(tree: dict[str, object], field: str, value: Any, problems: list[str]) -> None:
    """Put an override into the tree."""
    *sections, name = field.split(".")
    node = tree
    for section in sections:
        child = node.get(section)
        if none_or(child) is None:
            child = node[section] = {}
        if not isinstance(child, dict):
            problems.append(
                f"{field}={shown(value)} is misplaced: {section} holds {shown(child)}, not "
                f"fields. Remove one of the two"
            )
            return
        node = child
    node[name] = value


def _without(tree: Any, locations: Iterable[Sequence[str]]) -> Any:
    """Return a copy of a nested mapping without the values at the locations."""
    if not isinstance(tree, Mapping):
        return {}
    copy: dict[Any, Any] = {}
    for name, value in tree.items():
        below = [location[1:] for location in locations if location[0] == str(name)]
        if not below:
            copy[name] = value
        elif all(below) and isinstance(value, Mapping):
            copy[name] = _without(value, below)
    return copy


_WHY = {  # type of pydantic's error, or field -> reason
    "int_parsing": "it must be a whole number",
    "int_type": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "float_parsing": "it must be a number",
    "float_type": "it must be a number",
    "bool_parsing": "it must be true or false",
    "bool_type": "it must be true or false",
    "string_type": "it must be text, in quotes where YAML would read something else",
    "model_type": "it must be a mapping of fields",
    "model_attributes_type": "it must be a mapping of fields",
    "dict_type": "it must be a mapping such as {name: value}",
    "run.name": "it must be letters, digits, '.', '_' or '-', 63 at most, a letter or digit first",
    "data.format": "it must be one of these, or module:function",
    "cluster.workers": "it must be N or MIN:MAX",
    "train.profile_steps": "it must be FIRST:END, numbers of steps from 1 on",
}


def _explain(kind: type[RunConfig], error: Any) -> str:
    """Turn one pydantic error into `<field>=<value> is not valid: <why>. <what to set>`."""
    location, mistake = [str(part) for part in error["loc"]], error["type"]
    if mistake == "extra_forbidden":
        return _explain_unknown(kind, location, error["input"])
    known = fields(kind)
    home = _home(location, known)
    why = _WHY.get(home if mistake == "string_pattern_mismatch" else mistake)
    if why is None:
        message = error["msg"].removeprefix("Value error, ").replace("Input should", "it must")
        why = message[0].lower() + message[1:].rstrip(".")
    if home:
        what = f"Set {home}: {known[home].rstrip('.')}"
    else:
        beside = [name for name in known if name.startswith(f"{location[0]}.")] if location else []
        what = f"Set {' or '.join(beside[:2]) or 'sections, e.g. run'}"
    field = ".".join(location) or "config"
    return f"{field}={shown(error['input'])} is not valid: {why}. {what}"


def _home(location: list[str], known: Collection[str]) -> str:
    """Return the field that a place in a config lies in; empty if there is none."""
    return next((".".join(location[:n]) for n in (3, 2) if ".".join(location[:n]) in known), "")


def _explain_unknown(kind: type[RunConfig], location: list[str], value: Any) -> str:
    field, section = ".".join(location), ".".join(location[:-1])
    if why := kind.ABSENT.get(field):
        return f"{field}={shown(value)} is not available: {why}"
    documented = fields(kind)
    known = [*kind.model_fields, *documented]
    beside = [name for name in known if name.rpartition(".")[0] == section]
    home = _home(location, documented)
    for candidates in (beside, known):
        by_name = {name.rpartition(".")[2]: name for name in candidates}
        near = difflib.get_close_matches(location[-1], list(by_name), n=1, cutoff=0.6)
        if near:
            what = f"Did you mean {by_name[near[0]]}?"
            break
    else:
        names = ", ".join(name.rpartition(".")[2] for name in beside)
        what = f"Set one of {names}" if names else f"Set {home}: {documented[home].rstrip('.')}"
    return f"{field}={shown(value)} is unknown: there is no such field. {what}"
