"""Versions of local files: digests of their bytes, which are remembered between commands.

    versions = versions_of(storage, storage.list())

A file of up to 8 MiB is read whole, and of a larger one the first and last MiB, so that a corpus of
many files would be read at each start. What was digested is kept in the user's cache folder, and
found again by the file's inode, size and time. A file that has changed in the last seconds before
it was read is not kept: it could change again without another time.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from hashlib import blake2b
from pathlib import Path

from rayapp.storage import Entry, Readable

WHOLE_BYTES = 8 * 2**20  # of a file that is read whole
END_BYTES = 2**20
READERS, AT_ONCE = 16, 64  # threads, and the files of a call
KEPT_BYTES = 64 * 2**20  # read at a start, from which on versions are kept
SETTLED_S = 10.0  # since a file has changed
TABLE = """
CREATE TABLE IF NOT EXISTS versions (
    root TEXT, name TEXT, etag TEXT, version TEXT, PRIMARY KEY (root, name)
) WITHOUT ROWID
"""

Known = dict[str, tuple[str, str]]  # (etag, version) by name


def versions_of(storage: Readable, entries: Sequence[Entry]) -> list[str]:
    """Return the version of each local file: 16 hex digits."""
    keeps = sum(map(_bytes_read, entries)) >= KEPT_BYTES
    root = os.path.realpath(storage.url)
    known = _kept(root) if keeps else {}
    began = time.time()
    new = [entry for entry in entries if known.get(entry.name, ("",))[0] != entry.etag]
    parts = [new[first : first + AT_ONCE] for first in range(0, len(new), AT_ONCE)]
    with ThreadPoolExecutor(READERS) as pool:
        made = pool.map(lambda part: [_digest(storage, entry) for entry in part], parts)
        digests = [digest for part in made for digest in part]
    found = {e.name: (e.etag, digest) for e, digest in zip(new, digests, strict=True)}
    if keeps and found:
        settled = (e for e in new if e.modified_s < began - SETTLED_S)
        _keep((root, entry.name, *found[entry.name]) for entry in settled)
    known.update(found)
    return [known[entry.name][1] for entry in entries]


def _bytes_read(entry: Entry) -> int:
    return entry.size if entry.size <= WHOLE_BYTES else 2 * END_BYTES


def _digest(storage: Readable, entry: Entry) -> str:
    """Digest a file's content up to WHOLE_BYTES, else its first and last MiB and its time."""
    if entry.size <= WHOLE_BYTES:
        return blake2b(storage.read(entry.name), digest_size=8).hexdigest()
    first = storage.read(entry.name, 0, END_BYTES)
    last = storage.read(entry.name, entry.size - END_BYTES, END_BYTES)
    return blake2b(first + last + str(entry.modified_s).encode(), digest_size=8).hexdigest()


def _file() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "rayapp" / "versions.sqlite"


def _kept(root: str) -> Known:
    """Return what is kept of a folder's files; nothing if the cache cannot be read."""
    try:
        with closing(sqlite3.connect(f"file:{_file()}?mode=ro", uri=True)) as cache:
            rows = cache.execute("SELECT name, etag, version FROM versions WHERE root = ?", (root,))
            return {name: (etag, version) for name, etag, version in rows}
    except sqlite3.Error:  # none is there, or another program's
        return {}


def _keep(rows: Iterable[tuple[str, str, str, str]]) -> None:
    """Keep the versions of files; without a cache folder that can be written they are not kept."""
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(_file())) as cache, cache:
            cache.execute(TABLE)
            cache.executemany("INSERT OR REPLACE INTO versions VALUES (?, ?, ?, ?)", rows)
    except (OSError, sqlite3.Error):
        return
