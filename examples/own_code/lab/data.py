"""Notes in a format that only this laboratory has: `question => answer`, one a line."""

from collections.abc import Iterator
from pathlib import Path


def notes(path: str) -> Iterator[dict[str, str]]:
    """Yield the records of a file of notes, in the order of its lines."""
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        question, arrow, answer = line.partition(" => ")
        if arrow:
            yield {"prompt": question, "completion": answer}
