"""Formats of the user's: `data.format: mypackage.module:function`.

The function takes the path or s3:// URL of one file and yields records of the known shapes.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from rayapp.config.code import CodeError, load_code
from rayapp.config.code_digest import source_digest
from rayapp.data.sources.parts import DataSource, Record, SourceError, opened, printable

FIELD = "data.format"


class RecordReader(Protocol):
    """What `data.format: module:function` names."""

    def __call__(self, path: str, /) -> Iterator[Mapping[str, Any] | str]:
        """Yield the records of a file in an order that is the same at each call."""
        ...


def is_own(format: str) -> bool:
    """Return whether a format is a function of the user's."""
    return ":" in format


def version(format: str) -> str:
    """Return a digest of the source of the function, and of what it uses of its package.

    Raises:
        SourceError: it cannot be imported, or is not a function.
    """
    try:
        return source_digest(FIELD, format)
    except CodeError as error:
        raise SourceError(str(error)) from error


def read(root: str, name: str, format: str) -> Iterator[Record]:
    """Yield the records that the function makes of a file."""
    url = f"{opened(root).url.rstrip('/')}/{name}"
    try:
        function: RecordReader = load_code(FIELD, format, checked=True)
    except CodeError as error:
        raise SourceError(str(error)) from error
    for row, value in enumerate(function(url)):
        good = isinstance(value, (str, Mapping))
        problem = None if good else f"is {type(value).__name__}, neither a mapping nor text"
        yield Record(
            name, row, value if isinstance(value, str) or not good else dict(value), problem
        )


def failure(source: DataSource, file: str, error: Exception, after: str) -> SourceError:
    """Return what to raise when the user's function has raised an error: where, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [number for number, frame in enumerate(frames) if frame.filename == __file__]
    called = frames[max(ours, default=-1) + 1 :]  # the function, and what it called
    folders = [os.path.dirname(frame.filename) for frame in called]
    theirs = [f for f, folder in zip(called, folders, strict=True) if folder == folders[0]]
    at = f" ({theirs[-1].filename}:{theirs[-1].lineno}, in {theirs[-1].name})" if theirs else ""
    url, first = printable(f"{source.root}/{file}"), next(iter(str(error).splitlines()), "")
    why = f"{url}{after}: {type(error).__name__}: {first}{at}"
    return SourceError(f"{FIELD}={source.format} fails on {why}. Correct the function")
