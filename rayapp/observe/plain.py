"""Keep what is printed from acting on a terminal: data and run folders are written by others.

    with plain_output(): ...          # everything that is printed inside passes PlainStream

Console writes through it too; only the codes of its own styles stay. `redacted` takes secrets out.
"""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

NO_BARS = "HF_HUB_DISABLE_PROGRESS_BARS"  # read at the import of the hub's client and transformers
# Escape sequences (colours, cursor, titles), other control characters, halves of surrogate pairs.
CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]"
)


# Forms of tokens. Source: the rules of gitleaks 8 (MIT, github.com/gitleaks/gitleaks), 2026-11.
TOKEN = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}"
    r"|(AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{35}|sk-[A-Za-z0-9]{20,}|sk-(ant|proj|svcacct)-[\w-]{20,}"
    r"|xox[abeoprs]-[\w-]{10,}|npm_[A-Za-z0-9]{36}|pypi-AgEI[\w-]{20,}|dapi[0-9a-f]{32}|hvs\.\w{20,})"
)
# user:password@ of a URL; a password may hold slashes, and a port before a path is none.
USER_INFO = re.compile(r"(?<=://)[^\s/:@\[\"']*:(?!\d{1,5}([/,?]|$))[^\s@\"']+(@[^\s@/\"']+)*(?=@)")


def plain_text(text: str) -> str:
    """Remove what a terminal would act on; tabs and line ends stay.

    >>> plain_text("\\x1b[31mred\\x1b[0m\\x1b]0;title\\x07\\ta\\r\\n")
    'red\\ta\\n'
    """
    return CONTROL.sub("", text)


def redacted(text: str) -> str:
    """Return a text without the tokens in it and without the passwords of URLs.

    >>> redacted("--data.path=https://ada:secret@host/a --tags='{a: s3://bucket:80/b@c}'")
    "--data.path=https://***@host/a --tags='{a: s3://bucket:80/b@c}'"
    """
    return TOKEN.sub("***", USER_INFO.sub("***", text))


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


class Console(console.Console):
    """Renders without control characters and links; only the codes of styles and of redrawing stay.

    Every renderable, also of a live display, passes `render`.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            if style is not None and style.link:
                style = style.update_link(None)
            yield Segment(text if control else plain_text(text), style, control)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return Styled(super()._render_buffer(buffer))
