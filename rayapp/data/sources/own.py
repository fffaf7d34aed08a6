"""Formats of the user's: `data.format: mypackage.module:function`.

The function takes the path or s3:// URL of one file and yields records of the known shapes. It is
imported where data are read, so it lies in the job's working_dir, in the image, or in the folder
where the run is started.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from rayapp.data.sources.records import Record, SourceError, opened

NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class RecordReader(Protocol):
    """What `data.format: module:function` names."""

    def __call__(self, path: str, /) -> Iterator[Mapping[str, Any] | str]:
        """Yield the records of a file in an order that is the same at each call."""
        ...


def is_own(format: str) -> bool:
    """Return whether a format is a function of the user's."""
    return ":" in format


def version(format: str) -> str:
    """Return a digest of the source of the function's module.

    Raises:
        SourceError: it is not to be imported, or not a function.
    """
    file = inspect.getsourcefile(inspect.unwrap(_function(format)))
    if file is None:
        raise SourceError(f"data.format={format} is without source: its code cannot be identified")
    return blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()


def read(root: str, name: str, format: str) -> Iterator[Record]:
    """Yield the records that the function makes of a file."""
    url = f"{opened(root).url.rstrip('/')}/{name}"
    for row, value in enumerate(_function(format)(url)):
        good = isinstance(value, (str, Mapping))
        problem = None if good else f"is {type(value).__name__}, neither a mapping nor text"
        yield Record(
            name, row, value if isinstance(value, str) or not good else dict(value), problem
        )


def _function(format: str) -> RecordReader:
    module, _, name = format.partition(":")
    if os.getcwd() not in sys.path:  # the console command leaves it out
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # the user's module may raise anything
        raise SourceError(
            f"data.format={format} is not to be imported: {type(error).__name__}: {error}. Start "
            "the run from the folder that holds it, or put it into the job's working_dir"
        ) from error
    if not callable(found):
        raise SourceError(f"data.format={format} is not a function: it is {type(found).__name__}")
    return found
