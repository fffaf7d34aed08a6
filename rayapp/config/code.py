"""Functions of the user's that a config names as `mypackage.module:name`.

    loss = load_code("train.loss", "mypackage.losses:focal")
    digest = digest_of("train.loss", "mypackage.losses:focal")

The module is imported where the function is used: it lies in the job's working_dir, in the image,
or in the folder where the run is started.
"""

from __future__ import annotations

import importlib
import os
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

CODE_PATTERN = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"


class CodeError(RuntimeError):
    """A function that the config names cannot be used; the message is `field=name is ...`."""


def load_code(field: str, name: str) -> Any:
    """Import what a field names.

    Raises:
        CodeError: it cannot be imported, or cannot be called.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:  # the console command leaves it out
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's module may raise anything
        raise CodeError(
            f"{field}={name} cannot be imported: {type(error).__name__}: {error}. Start "
            "the run from the folder that holds it, or put it into the job's working_dir"
        ) from error
    if not callable(found):
        raise CodeError(f"{field}={name} is not a function: it is {type(found).__name__}")
    return found


def digest_of(field: str, name: str) -> str:
    """Return a digest of the source files of the function's package, or of its module alone.

    Raises:
        CodeError: it cannot be imported, or has no source.
    """
    load_code(field, name)
    top = sys.modules[name.partition(":")[0].partition(".")[0]]
    folders = [Path(folder) for folder in getattr(top, "__path__", ())]
    files = [(file.relative_to(root), file) for root in folders for file in root.rglob("*.py")]
    if not folders and (source := getattr(top, "__file__", None)):
        files = [(Path(Path(source).name), Path(source))]
    if not files:
        raise CodeError(f"{field}={name} is without source: its code cannot be identified")
    digest = blake2b(digest_size=8)
    for place, file in sorted(files, key=lambda pair: str(pair[0])):
        digest.update(f"{place}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()
