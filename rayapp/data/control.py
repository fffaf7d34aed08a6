"""Control tokens (special tokens of a tokenizer) in users' text: found, and encoded as text.

In a chat, those of the template must be control tokens and those of what is said must not. What is
said is marked before it is rendered: a character in each control token's text keeps it from being
one. The rest that looks like one is the template's.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

MARK = "\ue0c5"  # of the private use area
TEXT, CONTROL = "text", "control"
IS_TEXT = (
    "has the text of a control token, which is trained on as text: data.special_tokens=control "
    "makes it one"
)
NOT_POSSIBLE = (
    "has the text of a control token, which this tokenizer cannot tell from the chat template's "
    "own. Leave it out, or set data.special_tokens=control"
)

Spans = list[tuple[int, int]]


class ControlTokens:
    """The special tokens of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
        names = sorted({token.content for token in added if token.content}, key=len, reverse=True)
        start = os.path.commonprefix(names)  # noqa: RUF071  searched for fast
        rest = "|".join(re.escape(name[len(start) :]) for name in names)
        self.pattern = re.compile(f"{re.escape(start)}(?:{rest})") if names else None
        self.tokenizer = tokenizer
        self.take_spaces = any(t.lstrip or t.rstrip or t.single_word for t in added)
        """Some tokens take in the spaces beside them, or depend on what is beside them."""

    def are_in(self, text: str) -> bool:
        return self.pattern is not None and self.pattern.search(text) is not None

    def marked(self, value: Any) -> Any:
        """Return a record's value with marks in all control tokens of its texts."""
        if isinstance(value, str):
            found = self.pattern
            return found.sub(lambda m: m[0][0] + MARK + m[0][1:], value) if found else value
        if isinstance(value, dict):
            return {name: self.marked(each) for name, each in value.items()}
        return [self.marked(each) for each in value] if isinstance(value, list) else value

    @contextmanager
    def encoded_as(self, mode: str) -> Iterator[None]:
        """Let a fast tokenizer, which others share, encode control tokens so inside the block."""
        backend = self.tokenizer.backend_tokenizer
        backend.encode_special_tokens = mode == TEXT
        try:
            yield
        finally:
            backend.encode_special_tokens = False

    def encode(self, text: str, spans: Spans) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Encode a rendered chat with marks; return its tokens, and which ones are in the spans."""
        assert self.pattern is not None
        marks = [place.start() for place in re.finditer(MARK, text)]

        def moved(place: int) -> int:
            return place - bisect_left(marks, place)

        own = [(moved(m.start()), moved(m.end()), m[0]) for m in self.pattern.finditer(text)]
        plain = text.replace(MARK, "")
        edges = [0, *(edge for first, last, _ in own for edge in (first, last)), len(plain)]
        parts = [plain[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
        with self.encoded_as(TEXT):
            encoded = self.tokenizer.backend_tokenizer.encode_batch(parts, add_special_tokens=False)
        tokens: list[tuple[int, int, int]] = []  # id, first and last character
        for number, (encoding, begin) in enumerate(zip(encoded, edges[::2], strict=True)):
            places = zip(encoding.ids, encoding.offsets, strict=True)
            tokens += [(token, begin + a, begin + b) for token, (a, b) in places]
            if number < len(own):
                first, last, name = own[number]
                tokens.append((self.tokenizer.convert_tokens_to_ids(name), first, last))
        ids, firsts, lasts = np.array(tokens, np.int64).reshape(-1, 3).T
        loss = np.zeros(len(ids), np.bool_)
        for first, last in spans:
            begins = (firsts >= moved(first)) | (lasts > moved(first))
            loss |= begins & (firsts < moved(last))
        return ids.astype(np.int32), loss
