"""The console of rich through which commands print: what it is given is printed as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich import console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from rayapp.observe.plain import Styled, plain_text


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
