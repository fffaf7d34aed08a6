"""Cut long texts into parts whose tokens, laid end to end, are those of the whole.

    for piece in pieces_of(parts_of(text), PIECE_ENDS): ...

Encoding takes some 120 bytes of memory per byte of text, so that a long text is encoded in pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

MAX_ENCODED = 2**20  # most characters encoded in one call
FEW_ENCODED = 2**18  # where words or lines end
CUT_REACH = 64 * 2**10  # characters that are searched for a line end to cut at
LINE_END = re.compile(r"(?<=\S)\n(?=\S)")
WORD_END = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")
PIECE_ENDS = (LINE_END, WORD_END)  # where a token ends, for usual tokenizers


def is_long(text: str) -> bool:
    """Return whether a text is encoded in pieces, where a tokenizer lets it."""
    return len(text) > MAX_ENCODED


def parts_of(text: str) -> Iterator[str]:
    """Cut a text into parts of MAX_ENCODED characters, most of them less, after line ends.

    A line end between two letters is a token's end for the usual tokenizers, so that the tokens are
    those of the whole text. A longer line is cut anywhere.
    """
    start = 0
    while len(text) - start > MAX_ENCODED:
        end = start + MAX_ENCODED
        newline = LINE_END.search(text, max(start + 1, end - CUT_REACH), end)
        end = newline.end() if newline else end
        yield text[start:end]
        start = end
    yield text[start:]


def pieces_of(parts: Iterable[str], ends: Sequence[re.Pattern[str]]) -> Iterator[str]:
    """Cut each part after FEW_ENCODED characters or more, at the next of these ends."""
    for text in parts:
        start = 0
        while (cut := _cut_of(text, start, ends)) is not None:
            yield text[start:cut]
            start = cut
        yield text[start:]


def _cut_of(text: str, start: int, ends: Sequence[re.Pattern[str]]) -> int | None:
    for end in range(start + FEW_ENCODED, len(text), CUT_REACH):
        for pattern in ends:
            if found := pattern.search(text, max(start + 1, end - CUT_REACH), end):
                return found.end()
    return None


def encoded_line_end(tokenizer: Any, bytes_of: np.ndarray[Any, Any]) -> list[int] | None:
    r"""Return the tokens of "\n" with the space that a tokenizer puts before each text.

    What follows a line end is then encoded after one, and these are left out.
    None is returned where that would not give the tokens of the whole: a line end is part of longer
    tokens, or is changed into something else.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    alone, after = encode("\n"), encode("\na")
    inside = [token for token in tokenizer.get_vocab() if "\n" in token and token != "\n"]
    rest = after[len(alone) :]
    exact = after[: len(alone)] == alone and int(bytes_of[alone].sum()) == 2
    exact = exact and encode("a\na")[-len(rest) :] == rest and len(rest) > 0
    return alone if exact and not inside else None
