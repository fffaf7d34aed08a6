"""What mkdocs does for the site beyond rendering docs/*.md; see mkdocs.yml.

Links to files outside of docs/ become paths, since the site has no copy of the repository.
"""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name files outside of docs/ by their path in the repository."""
    return OUTSIDE.sub(lambda link: _outside(link[1], link[2]), markdown)


def _outside(text: str, path: str) -> str:
    return f"`{path}`" if path in text else f"{text} (`{path}`)"
