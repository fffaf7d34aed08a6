"""Read and write YAML 1.2 without duplicate keys; find the folders shipped with the package."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml

MOST_CHARACTERS = 2**20  # of a YAML text; it takes seconds to read so many
SHOWN = 400  # characters from whose beginning `shown` makes a line


class _Loader(yaml.SafeLoader):
    """Reads plain values as YAML 1.2 does and refuses duplicate keys, anchors and aliases.

    PyYAML reads YAML 1.1, where `2:8` is the number 128, `1e-3` is text and `no` is false.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if getattr(event, "anchor", None) is not None:  # an alias has the name of its anchor
            why = "anchors (&) and aliases (*) are not supported: write out each value"
            raise yaml.composer.ComposerError(None, None, why, event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    why = f"the key {key.value} appears twice"
                    raise yaml.constructor.ConstructorError(None, None, why, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _TextLoader(_Loader):
    """Reads plain values as the texts that they are."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {}


class Dumper(yaml.SafeDumper):
    """Quotes texts that YAML 1.1 or 1.2 would read as another type; writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


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


def parse_yaml(text: str, texts: bool = False) -> Any:
    """Return the value of a YAML text, read as YAML 1.2 and without duplicate keys.

    With `texts`, 1.10, no and 010 stay what was typed.

    Raises:
        yaml.YAMLError: it is not YAML, or has anchors.
    """
    if len(text) > MOST_CHARACTERS:
        raise yaml.YAMLError(f"it has more than {MOST_CHARACTERS:,} characters")
    try:
        return yaml.load(text, _TextLoader if texts else _Loader)
    except ValueError as error:  # e.g. an integer of 5000 digits
        raise yaml.YAMLError(str(error)) from error
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None


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
        return {}, [f"config file {path} is not a mapping: it contains a {kind}. {give}"]
    return tree, []


def shown(value: Any) -> str:
    """Return a value as text for messages: one line of at most 80 characters."""
    if value is None or isinstance(value, bool):
        value = "none" if value is None else str(value).lower()
    text = value[:SHOWN] if isinstance(value, str) else repr(value)[:SHOWN]
    text = " ".join(text.split())
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

    A path that exists, from the user's folder, is taken as it is. Otherwise `tiny_cpu` and
    `configs/tiny_cpu.yaml` name the config that is shipped with rayapp.
    """
    own = Path(user_folder(), path)
    name = path.removeprefix("configs/").removesuffix(".yaml")
    ours = {file.stem: file for file in shipped("configs").glob("*.yaml")}
    return own if own.exists() else ours.get(name, own)


def user_folder() -> str:
    """Return the folder in which the user works: a trial of Ray Tune works in one of its own."""
    return os.environ.get("TUNE_ORIG_WORKING_DIR") or os.getcwd()
