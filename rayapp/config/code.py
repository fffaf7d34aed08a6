"""Functions of the user's that a config names as `mypackage.module:name`.

    loss = load_code("train.loss", "mypackage.losses:focal")
    digest = digest_of("train.loss", "mypackage.losses:focal")

A config may come from anywhere. So it can choose among the operator's code alone: that of the
folder in which the command runs (of a job: its working_dir), and of the packages that NAMED lists.
The process that reads the config checks this; workers import what it has checked.
"""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from collections.abc import Mapping
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any

CODE_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
NAMED = "RAYAPP_CODE"  # an environment variable: packages and modules, with commas
FIELDS = ("data.format", "train.loss", "eval.metrics", "run.hooks")


class CodeError(RuntimeError):
    """A function that the config names cannot be used; the message is `field=name is ...`."""


def code_in(sections: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (field, name) of each function that the sections of a config name."""
    found = list[tuple[str, str]]()
    for field in FIELDS:
        section, _, name = field.partition(".")
        value = sections.get(section, {}).get(name) or ()
        names = [value] if isinstance(value, str) else value
        found += [(field, each) for each in names if ":" in each]  # a known format has none
    for task, values in (sections.get("eval", {}).get("tasks") or {}).items():
        score = values.get("score", "") if isinstance(values, Mapping) else ""
        found += [(f"eval.tasks.{task}.score", score)] if ":" in score else []
    return found


def load_code(field: str, name: str, checked: bool = False) -> Any:
    """Import what a field names, if it is code of the operator's.

    `checked`: the process that has read the config knows that it is.

    Raises:
        CodeError: it is other code, cannot be imported, or cannot be called.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:  # the console command leaves it out
        sys.path.append(os.getcwd())
    try:
        _check(field, name, module, checked)
        found = getattr(importlib.import_module(module), attribute)
        if hasattr(found, "__qualname__"):  # a function or class, perhaps imported by the module
            _check(field, name, str(found.__module__), checked)
    except CodeError:
        raise
    except Exception as error:  # the user's module may raise anything
        raise CodeError(
            f"{field}={name} cannot be imported: {type(error).__name__}: {error}. Start "
            "the run from the folder of the module, or put the module into the job's working_dir"
        ) from error
    if not callable(found):
        raise CodeError(f"{field}={name} is not a function: it is {type(found).__name__}")
    return found


def _check(field: str, name: str, module: str, checked: bool) -> None:
    """Raise CodeError unless a module is the operator's; only its parents are imported."""
    top, named = module.partition(".")[0], os.environ.get(NAMED, "").replace(",", " ").split()
    if top in sys.stdlib_module_names or top == "rayapp":
        raise CodeError(
            f"{field}={name} is not code of yours: {module} is a module of "
            f"{'rayapp' if top == 'rayapp' else 'Python'}. Name a function that your own package "
            "defines, or rename your module"
        )
    if checked or any(f"{module}.".startswith(f"{each}.") for each in named):
        return
    folder = Path.cwd().resolve()
    for part in accumulate(module.split("."), "{}.{}".format):
        spec = importlib.util.find_spec(part)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {part!r}")
        found = [*(spec.submodule_search_locations or ()), spec.origin]
        for each in list(filter(None, found)) or ["nowhere"]:
            place = Path(each).resolve()  # a link may lead out of the folder
            inner = place.relative_to(folder).parts if place.is_relative_to(folder) else ()
            if inner[:1] != (top,) and not (len(inner) == 1 and inner[0].startswith(f"{top}.")):
                raise CodeError(
                    f"{field}={name} is not code of yours: {part} is {place}, outside the working "
                    f"folder {folder}. Start the command from the folder of your code, or "
                    f"set {NAMED}={top} to allow this package"
                )
            for below in accumulate(inner, Path.joinpath, initial=folder):
                if _others_may_write(below):
                    raise CodeError(
                        f"{field}={name} is not safe to run: others can write to {below}. Remove "
                        f"their write permission, or set {NAMED}={top} to run the code anyway"
                    )


def _others_may_write(path: Path) -> bool:
    """Say whether users but root, this one and those of this process's group may."""
    known = path.stat()
    by_group = known.st_mode & stat.S_IWGRP and known.st_gid not in (0, os.getegid())
    return known.st_uid not in (0, os.geteuid()) or bool(known.st_mode & stat.S_IWOTH or by_group)


def digest_of(field: str, name: str) -> str:
    """Return a digest of the source files of the function's package, or of its module alone.

    Raises:
        CodeError: it is not the operator's code, cannot be imported, or has no source.
    """
    load_code(field, name)
    top = sys.modules[name.partition(":")[0].partition(".")[0]]
    folders = [Path(folder) for folder in getattr(top, "__path__", ())]
    files = [(file.relative_to(root), file) for root in folders for file in root.rglob("*.py")]
    source = Path(getattr(top, "__file__", None) or "")
    if not folders and source.is_file():
        files = [(Path(source.name), source)]
    if not files:
        raise CodeError(f"{field}={name} is without source: its code cannot be identified")
    digest = blake2b(digest_size=8)
    for place, file in sorted(files, key=lambda pair: str(pair[0])):
        digest.update(f"{place}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()
