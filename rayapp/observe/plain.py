"""Keep what is printed from acting on a terminal: data and run folders are written by others.

    with plain_output(): ...          # everything that is printed inside passes PlainStream

rayapp.observe.console.Console writes through it too; only the codes of its own styles stay.
"""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# Escape sequences (colours, cursor, titles), other control characters, halves of surrogate pairs.
CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]"
)


def plain_text(text: str) -> str:
    """Remove what a terminal would act on; tabs and line ends stay.

    >>> plain_text("\\x1b[31mred\\x1b[0m\\x1b]0;title\\x07\\ta\\r\\n")
    'red\\ta\\n'
    """
    return CONTROL.sub("", text)


def escaped(text: str) -> str:
    """Return a text for HTML."""
    return html.escape(plain_text(text))


class Styled(str):
    """A text whose control characters are our own."""


class Through:
    """A text stream in front of another one: a subclass has `write`; all else is the other's."""

    stream: Any

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class PlainStream(Through):
    """A text stream that writes plain text; in all else it is the stream.

    On a terminal a bar that is redrawn from a carriage return stays one line.
    """

    def __init__(self, stream: Any) -> None:
        self.stream, self._redrawn = stream, True  # whether the line has nothing, or a bar

    def write(self, text: str) -> int:
        written = text
        if not isinstance(text, Styled):
            bar = self._redrawn and text.startswith("\r") and self.stream.isatty()
            written = "\r" * bar + plain_text(text)
            self._redrawn = bar or written.endswith("\n") or (self._redrawn and not written)
        self.stream.write(written)
        return len(text)


@contextmanager
def plain_output() -> Iterator[None]:
    """Print plain text inside the block; after an error too, as Python prints its traceback."""
    streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        if stream is not None and not isinstance(stream, PlainStream):
            setattr(sys, name, PlainStream(stream))
    yield
    for name, stream in streams.items():
        setattr(sys, name, stream)
