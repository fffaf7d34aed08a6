"""Read and write YAML 1.2 without duplicate keys; find the folders shipped with the package."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml


class _Loader(yaml.SafeLoader):
    """Reads plain values as YAML 1.2 does and refuses duplicate keys.

    PyYAML reads YAML 1.1, where `2:8` is the number 128, `1e-3` is text and `no` is false.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    why = f"{key.value} is there twice"
                    raise yaml.constructor.ConstructorError(None, None, why, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Quotes texts that YAML 1.1 or 1.2 would read as another type."""


_PLAIN = (  # tag, pattern, possible first characters
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9_]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("merge", "<<", ["<"]),
)
for _tag, _pattern, _first in _PLAIN:
    for _class in (_Loader, Dumper):
        _regexp = re.compile(f"^(?:{_pattern})$")
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _regexp, _first)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text, read as YAML 1.2 and without duplicate keys.

    Raises:
        yaml.YAMLError: it is not YAML.
    """
    try:
        return yaml.load(text, _Loader)
    except (ValueError, RecursionError) as error:  # e.g. an integer of 5000 digits
        raise yaml.YAMLError(str(error)) from error


def read_yaml(path: str) -> tuple[dict[str, object], list[str]]:
    """Return (mapping of a config file, problems); one of the two is empty."""
    give = "Give the path of a YAML file of sections and fields"
    try:
        tree = parse_yaml(config_file(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        return {}, [f"config file {path} is not YAML: {' '.join(str(error).split())}. {give}"]
    except UnicodeDecodeError as error:
        return {}, [f"config file {path} is not text: {error}. {give}"]
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        return {}, [f"config file {path} is not readable: {why}. {give}"]
    if tree is None:
        return {}, []
    if not isinstance(tree, dict):
        kind = type(tree).__name__
        return {}, [f"config file {path} is not a mapping: it holds a {kind}. {give}"]
    return tree, []


def shown(value: Any) -> str:
    """Return a value as text for messages: one line of at most 80 characters."""
    if value is None or isinstance(value, bool):
        value = "none" if value is None else str(value).lower()
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Return the leaves of a tree of mappings by their dotted names; an empty mapping is a leaf."""
    flat: dict[str, object] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


PACKAGE = Path(__file__).parents[1]


def shipped(name: str) -> Path:
    """Return the folder `cluster` or `configs` of this installation."""
    inside = PACKAGE / "_files" / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def config_file(path: str) -> Path:
    """Return the path of a config file.

    A path that exists is taken as it is. Otherwise `tiny_cpu` and `configs/tiny_cpu.yaml` name the
    config that is shipped with rayapp.
    """
    name = path.removeprefix("configs/").removesuffix(".yaml")
    ours = {file.stem: file for file in shipped("configs").glob("*.yaml")}
    return Path(path) if Path(path).exists() else ours.get(name, Path(path))
