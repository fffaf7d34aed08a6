"""Tell how files are written: by their names, and by their first bytes.

    format_of("a.jsonl.gz", head)      # "jsonl"

A name proposes a format and the content decides: JSON may hold lines or one array, and a file
without a known suffix may be Parquet, Arrow or JSONL. What neither tells is refused.
"""

from __future__ import annotations

import json
import os

from rayapp.data.sources.parts import SourceError

SUFFIXES = {
    "text": (".txt", ".md", ".rst", ".py", ".text"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "json": (".json",),
    "csv": (".csv",),
    "tsv": (".tsv", ".tab"),
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow",),
}
FORMATS = tuple(SUFFIXES)
CODECS = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}  # read, as streams
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
UNREAD = {  # suffixes of archives and compressions that are not read
    ".tgz": "a tar archive",
    ".tar": "a tar archive",
    ".bz2": "compressed with bzip2",
    ".xz": "compressed with xz",
    ".zip": "a ZIP archive",
    ".xlsx": "an Excel workbook",
}
HEAD_BYTES = 64 * 2**10
ONE_OBJECT = (
    "is one JSON object over several lines, not a list of records. Make it an array or one object "
    "on each line, e.g. jq -c '.data[]'"
)


def bare(name: str) -> str:
    """Return a file's name in lower case, without a suffix of its compression.

    >>> bare("A.jsonl.GZ")
    'a.jsonl'
    """
    stem, suffix = os.path.splitext(name.lower())
    return stem if suffix in CODECS else name.lower()


def is_compressed(name: str) -> bool:
    """Return whether a file's name says that it is read as a compressed stream."""
    return bare(name) != name.lower()


def is_stream(name: str, format: str) -> bool:
    """Return whether a file is read from its beginning, by one task, because it has no cuts."""
    return is_compressed(name) or format not in ("text", "jsonl", "parquet")


def by_name(name: str) -> str | None:
    """Return the format that a file's suffix stands for; None if it is not known."""
    ends = bare(name)
    return next((format for format, known in SUFFIXES.items() if ends.endswith(known)), None)


def codec_of(head: bytes) -> str | None:
    """Return pyarrow's name of the compression of a file with these first bytes, or None."""
    return next((codec for magic, codec in MAGIC.items() if head.startswith(magic)), None)


def unread(name: str) -> str | None:
    """Return what a file is that its suffix says cannot be read, or None."""
    return UNREAD.get(os.path.splitext(name.lower())[1])


def format_of(name: str, head: bytes) -> str | None:
    """Return the format of a file with these first (decompressed) bytes; None if it is unknown.

    Raises:
        SourceError: it is JSON, but no list of records, or not what its name says; the message
            lacks the file's name.
    """
    named = by_name(name)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "arrow"
    if named not in (None, "jsonl"):
        if named in ("parquet", "arrow") and head:
            raise SourceError(f"is not {named.capitalize()}, as its first bytes say")
        return named
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    first = text.split(b"\n", 1)[0].rstrip()
    if text.startswith(b"[") and (named or text[1:].lstrip().startswith((b"{", b"]"))):
        return "json"
    opens = first.startswith(b"{")
    if opens and bare(name).endswith(".json") and first.endswith((b"{", b"[", b",")):
        raise SourceError(ONE_OBJECT)
    if named:
        return named
    return "jsonl" if opens and _is_object(first) else None


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
