"""Read lines of JSONL; those that are long without a copy of their long strings.

    value, problem = line_value(data, start, end, long_texts=True)
    text = value["text"]  # a str; a LongText, if it is of more than LARGE bytes
    for part in text.parts(): ...

A LongText is decoded from the bytes of the line, in parts.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from typing import Any

LINE_BYTES = 256 * 2**20  # most of a line, or of a cell of CSV
TOO_LONG = f"is longer than {LINE_BYTES // 2**20} MiB"
JSON_DEPTH = 400  # most objects and lists in one another
LARGE = 2**20  # bytes of a line, and of a string in it
PART_BYTES = 2**20  # of a string that are decoded at once
QUOTE = re.compile(rb'(?<!\\)(?:\\\\)*"')  # one that no backslash escapes
NOT_BLANK = re.compile(rb"\S")
COLON = re.compile(rb"[ \t\r\n]*:")
PAIR = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]", re.DOTALL)
SHOWN_BYTES = 64  # of a string without an end


class LongText:
    """A string of JSON, as the bytes data[start:end] between its quotes."""

    def __init__(self, data: bytes | bytearray, start: int, end: int) -> None:
        self.data, self.start, self.end = data, start, end

    def __len__(self) -> int:
        """Return its size in bytes of JSON; it has no more characters."""
        return self.end - self.start

    def __str__(self) -> str:
        return "".join(self.parts())

    def parts(self) -> Iterator[str]:
        """Yield the text in parts.

        Raises:
            ValueError: it is no valid string of JSON, or not UTF-8.
        """
        start = self.start
        while start < self.end:
            end = cut_at(self.data, start, min(start + PART_BYTES, self.end), self.end)
            yield json.loads('"' + self.data[start:end].decode("utf-8", "surrogatepass") + '"')
            start = end


def cut_at(data: bytes | bytearray, start: int, cut: int, end: int) -> int:
    r"""Return the last place up to `cut` that is inside no character of a string [start, end).

    A character is UTF-8, `\n`, `\u00e9`, or the two halves `\ud83d\ude00` of one. An invalid one
    may be cut. If the first is beyond `cut`, `cut` is returned.
    """
    if cut == end:
        return end
    place = cut
    while place > start and 0x80 <= data[place] < 0xC0:
        place -= 1
    moved = True
    while moved:
        moved = False
        for at in range(max(start, place - 11), place):
            if _begins_escape(data, start, at) and at + _escape_bytes(data, at) > place:
                place, moved = at, True
                break
    return place if place > start else cut


def _begins_escape(data: bytes | bytearray, start: int, at: int) -> bool:
    """Return whether a backslash is there that no other one escapes."""
    first = at + 1
    while first > start and data[first - 1] == 0x5C:
        first -= 1
    return (at + 1 - first) % 2 == 1


def _escape_bytes(data: bytes | bytearray, at: int) -> int:
    r"""Return the bytes of an escape; those of both halves of `\ud83d\ude00` at the first."""
    if data[at + 1 : at + 2] != b"u":
        return 2
    return 12 if PAIR.match(data, at) else 6


def line_value(
    data: bytes | bytearray, start: int, end: int, long_texts: bool = False
) -> tuple[Any, str | None] | None:
    """Return (object, None) or (None, why it is bad) of a line data[start:end]; None if blank.

    With `long_texts` a LongText stands for each long string but the names of columns, and nothing
    of that size is copied.
    """
    if not NOT_BLANK.search(data, start, end):
        return None
    if long_texts and end - start > LARGE:
        return _long_line(data, start, end)
    return json_line(data[start:end])


def json_line(line: bytes | bytearray) -> tuple[Any, str | None]:
    """Return (the object on a line of JSONL, None) or (what is there instead, why it is bad)."""
    if len(line) > LINE_BYTES:
        return None, TOO_LONG
    opened = line.count(b"[") + line.count(b"{")
    try:
        text = line.decode(json.detect_encoding(line), "surrogatepass")  # as json.loads does
        del line  # it may be large, and the value is as large
        value = json.loads(text)
        if opened > JSON_DEPTH and is_deep(value):
            raise RecursionError
        return value, None if isinstance(value, dict) else "is not a JSON object"
    except (ValueError, RecursionError) as error:
        return None, problem_of_json(error)


def problem_of_json(error: ValueError | RecursionError) -> str:
    """Return the problem of a record whose JSON could not be read."""
    deep = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "too deep"
    return f"is not JSON ({getattr(error, 'msg', deep)})"


def is_deep(value: Any) -> bool:
    """Return whether more than JSON_DEPTH objects and lists are in one another."""
    level = [value]
    for _ in range(JSON_DEPTH):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for some in inner for each in some if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def _long_line(data: bytes | bytearray, start: int, end: int) -> tuple[Any, str | None]:
    if end - start > LINE_BYTES:
        return None, TOO_LONG
    if not json.detect_encoding(data[start : start + 4]).startswith("utf-8"):
        return json_line(data[start:end])
    mark = uuid.uuid4().hex  # followed by a number, it stands for a long string
    skeleton, at = bytearray(), start
    texts: list[LongText] = []
    while (quote := data.find(b'"', at, end)) >= 0:
        closing = QUOTE.search(data, quote + 1, end)
        if closing is None:
            shown = cut_at(data, quote + 1, min(quote + 1 + SHOWN_BYTES, end), end)
            return json_line(skeleton + data[at:shown])
        after = closing.end()
        if after - quote > LARGE and not COLON.match(data, after, end):
            skeleton += data[at:quote] + f'"{mark}{len(texts)}"'.encode()
            texts.append(LongText(data, quote + 1, after - 1))
        else:
            skeleton += data[at:after]
        at = after
    value, problem = json_line(skeleton + data[at:end])
    if problem is None:
        names = {f"{mark}{number}": text for number, text in enumerate(texts)}
        value = _with_texts(value, names)
        problem = next(filter(None, map(_problem, texts)), None)
    return (value, None) if problem is None else (None, problem)


def _problem(text: LongText) -> str | None:
    try:
        for _ in text.parts():
            pass
    except ValueError as error:
        return problem_of_json(error)
    return None


def _with_texts(value: Any, texts: dict[str, LongText]) -> Any:
    if isinstance(value, str):
        return texts.get(value, value)
    if isinstance(value, dict):
        return {name: _with_texts(each, texts) for name, each in value.items()}
    return [_with_texts(each, texts) for each in value] if isinstance(value, list) else value
