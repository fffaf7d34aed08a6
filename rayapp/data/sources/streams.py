"""Read files that cannot be cut: compressed ones, JSON arrays, CSV, Arrow, and users' formats.

Such a file is one piece and is read from its beginning. A record's place is the number of its
line, or of its row in Arrow and Parquet.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from rayapp.data.sources.formats import codec_of, is_compressed
from rayapp.data.sources.parts import DataSource, Piece, Record, SourceError, opened, printable

BOM = codecs.BOM_UTF8  # which some editors put before a text; it is no part of the text
CHUNK = 2**20
LINE_BYTES = 256 * 2**20  # most of a line, or of a cell of CSV
TOO_LONG = f"is longer than {LINE_BYTES // 2**20} MiB"
JSON_DEPTH = 400  # most objects and lists in one another
TEXT_BYTES = 4 * 2**20  # of compressed text in a record
OBJECT_BYTES = 64 * 2**20  # most of one object in a JSON array
BATCH_ROWS = 1024  # of a table, which are made at once
LONGEST_ESCAPE = 12  # characters: both halves of one beyond 16 bits
BLANK = re.compile(r"[ \t\r\n]*")


def read_stream(source: DataSource, piece: Piece) -> Iterator[Record]:
    """Yield the records of a file; text comes in parts of about TEXT_BYTES, cut at line ends.

    Raises:
        SourceError: it is not of this format, so that the rest cannot be read.
    """
    try:
        with open_stream(source.root, piece.file, piece.etag) as stream:
            yield from READERS[source.format](stream, piece.file)
    except SourceError as error:
        raise SourceError(f"{source.root}/{printable(piece.file)} {error}") from error


def open_stream(root: str, name: str, etag: str | None = None) -> io.BufferedReader:
    """Open a file, on S3 in the version `etag`; decompress it if it begins as gzip or Zstandard."""
    import pyarrow as pa

    raw = cast(io.BufferedReader, opened(root).open_read(name, etag))
    codec = codec_of(raw.read(4))
    raw.seek(0)
    if codec is None:
        if is_compressed(name):
            raise SourceError("is neither gzip nor Zstandard. Copy it anew, or correct its name")
        return raw
    plain: Any = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), codec)
    return io.BufferedReader(plain, CHUNK)


def _texts(stream: io.BufferedReader, name: str) -> Iterator[Record]:
    line = 1
    if stream.peek(len(BOM)).startswith(BOM):
        stream.read(len(BOM))
    while data := stream.read(TEXT_BYTES):
        if not data.endswith(b"\n"):
            data += stream.readline(LINE_BYTES)
        try:
            yield Record(name, line, data.decode("utf-8"))
        except UnicodeDecodeError as error:
            bad = line + data.count(b"\n", 0, error.start)
            yield Record(name, bad, None, "is not UTF-8")
        line += data.count(b"\n")


def _lines(stream: io.BufferedReader, name: str) -> Iterator[Record]:
    for number in itertools.count(1):
        line = _line(stream)
        if not line:
            return
        found = json_line(line.removesuffix(b"\n"))
        if found is not None:
            yield Record(name, number, *found)


def _line(stream: io.BufferedReader) -> bytes:
    """Read a line; of one that is longer than LINE_BYTES, a byte more than that is returned."""
    line = part = stream.readline(LINE_BYTES + 1)
    while len(line) > LINE_BYTES and part and not part.endswith(b"\n"):
        part = stream.readline(CHUNK)
    return line


def json_line(line: bytes | bytearray) -> tuple[Any, str | None] | None:
    """Return (object, None) or (None, why it is bad) of a line of JSONL; None if it is blank."""
    if len(line) > LINE_BYTES:
        return None, TOO_LONG
    if not line or line.isspace():
        return None
    opened = line.count(b"[") + line.count(b"{")
    try:
        text = line.decode(json.detect_encoding(line), "surrogatepass")  # as json.loads does
        del line  # it may be large, and the value is as large
        value = json.loads(text)
        if opened > JSON_DEPTH and _is_deep(value):
            raise RecursionError
        return value, None if isinstance(value, dict) else "is not a JSON object"
    except (ValueError, RecursionError) as error:
        deep = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "too deep"
        return None, f"is not JSON ({getattr(error, 'msg', deep)})"


def _is_deep(value: Any) -> bool:
    """Return whether more than JSON_DEPTH objects and lists are in one another."""
    level = [value]
    for _ in range(JSON_DEPTH):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for some in inner for each in some if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def _array(stream: io.BufferedReader, name: str) -> Iterator[Record]:
    """Yield the objects of a JSON array, held in memory one chunk at a time."""
    text = _Text(stream)
    if text.skip() != "[":
        raise SourceError("is not a JSON array: it does not begin with [")
    text.at += 1
    while (mark := text.skip()) != "]":
        line = text.line
        value = text.value()
        yield Record(name, line, value, None if isinstance(value, dict) else "is not a JSON object")
        mark = text.skip()
        if mark not in (",", "]"):
            raise SourceError(f"is not a JSON array: line {text.line} lacks a comma or ]")
        text.at += mark == ","
    text.at += 1
    if text.skip():
        raise SourceError(f"is not a JSON array: line {text.line} has more after its ]")


class _Text:
    """The text of a stream, read on as it is parsed."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self.read: Callable[[], bytes] = lambda: stream.read(CHUNK)
        self.decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        self.held, self.at, self.line, self.ended = "", 0, 1, False
        self.parse = json.JSONDecoder().raw_decode

    def more(self) -> None:
        """Read a chunk on, and drop what is parsed."""
        data = self.read()
        self.ended = not data
        self.held, self.at = self.held[self.at :] + self.decode(data, self.ended), 0

    def pass_to(self, end: int) -> None:
        """Go on to a place in the held text, and count the lines."""
        self.line += self.held.count("\n", self.at, end)
        self.at = end

    def skip(self) -> str:
        """Go to the next character that is not blank, and return it; empty at the end."""
        while True:
            blanks = BLANK.match(self.held, self.at)
            assert blanks is not None
            self.pass_to(blanks.end())
            if self.at < len(self.held) or self.ended:
                return self.held[self.at : self.at + 1]
            self.more()

    def value(self) -> Any:
        """Return the JSON value that begins here."""
        while True:
            try:
                value, end = self.parse(self.held, self.at)
                if end < len(self.held) or self.ended:
                    self.pass_to(end)
                    return value
            except json.JSONDecodeError as error:
                held = len(self.held) - self.at
                if self.ended or held > OBJECT_BYTES:
                    raise self._refused(error) from error
            except RecursionError as error:
                raise SourceError(f"is not a JSON array: line {self.line} is too deep") from error
            for _ in range(max(1, (len(self.held) - self.at) // CHUNK)):  # read twice as much
                self.more()

    def _refused(self, error: json.JSONDecodeError) -> SourceError:
        """Return why the value that begins here cannot be read."""
        # A value that is not held to its end is wrong there, or in a string that reaches there.
        cut = error.pos > len(self.held) - LONGEST_ESCAPE or error.msg.startswith("Unterminated")
        if cut and not self.ended:
            return SourceError(
                f"is not read: the object at line {self.line} goes on for more than "
                f"{OBJECT_BYTES // 2**20} MiB. Is a quote missing? If not, write it as JSONL"
            )
        line = self.line + self.held.count("\n", self.at, error.pos)
        return SourceError(f"is not a JSON array: {error.msg.removesuffix(' at')} at line {line}")


def _separated(stream: io.BufferedReader, name: str, delimiter: str) -> Iterator[Record]:
    """Yield the rows of CSV as text by column; the csv module knows the lines they are on."""
    csv.field_size_limit(LINE_BYTES)
    lines = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
    rows = csv.reader(_bounded(lines), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        line = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield Record(name, line, None, f"is not CSV ({error})")
            continue
        if not row:
            continue
        if header is None:
            header = _header(row)
        elif len(row) != len(header):
            why = f"has {len(row)} fields, but the header has {len(header)}"
            yield Record(name, line, None, why)
        else:
            yield Record(name, line, dict(zip(header, row, strict=True)))


def _bounded(lines: io.TextIOWrapper) -> Iterator[str]:
    """Yield lines of which none fills the memory."""
    for number, line in enumerate(iter(lambda: lines.readline(LINE_BYTES), ""), 1):
        if len(line) == LINE_BYTES:
            raise SourceError(f"is not CSV: line {number} {TOO_LONG}")
        yield line


def _header(row: list[str]) -> list[str]:
    if len(set(row)) < len(row) or not all(cell.strip() for cell in row):
        raise SourceError("is without a header: names of columns are missing or twice there")
    return row


def _parquet(stream: io.BufferedReader, name: str) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = pa.BufferReader(stream.read())
    file = pq.ParquetFile(data, page_checksum_verification=True)
    yield from rows_of(name, file.iter_batches(batch_size=BATCH_ROWS))


def _arrow(stream: io.BufferedReader, name: str) -> Iterator[Record]:
    import pyarrow as pa

    if not stream.peek(6).startswith(b"ARROW1"):
        yield from rows_of(name, pa.ipc.open_stream(stream))
        return
    file = pa.ipc.open_file(stream if stream.seekable() else pa.BufferReader(stream.read()))
    yield from rows_of(name, map(file.get_batch, range(file.num_record_batches)))


def rows_of(name: str, batches: Any, row: int = 0) -> Iterator[Record]:
    """Yield the rows of Arrow's batches, the first with this number.

    pyarrow does not check offsets of a batch that it reads: a wrong one would end the process.
    """
    for batch in batches:
        batch.validate(full=True)
        for first in range(0, batch.num_rows, BATCH_ROWS):
            for value in batch.slice(first, BATCH_ROWS).to_pylist():
                yield Record(name, row, value)
                row += 1


READERS: dict[str, Callable[[io.BufferedReader, str], Iterator[Record]]] = {
    "text": _texts,
    "jsonl": _lines,
    "json": _array,
    "csv": partial(_separated, delimiter=","),
    "tsv": partial(_separated, delimiter="\t"),
    "parquet": _parquet,
    "arrow": _arrow,
}
