"""A data format of your own: scripts of dialogues, one line for each speaker.

    python -m rayapp.finetune --data.path=scripts --data.format=examples.dialogue_format:read ...

A file holds dialogues, separated by empty lines:

    Customer: Where is my parcel?
    Agent: It arrives today.
"""

from collections.abc import Iterator
from typing import Any

import fsspec

from rayapp.data.sources import RecordReader

ROLES = {"Customer": "user", "Agent": "assistant"}


def read(path: str, /) -> Iterator[dict[str, Any]]:
    """Yield the dialogues of a file, local or on S3, as chats."""
    with fsspec.open(path, "rt", encoding="utf-8") as file:
        for dialogue in file.read().split("\n\n"):
            lines = [line.partition(": ") for line in dialogue.splitlines() if line.strip()]
            if lines:
                yield {
                    "messages": [{"role": ROLES[who], "content": said} for who, _, said in lines]
                }


reader: RecordReader = read  # a type checker sees here that the function fits
