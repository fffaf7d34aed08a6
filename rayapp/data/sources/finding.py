"""Find the files of `data.path`: a file, folder, glob, `s3://`, hub id, or `stdlib`.

The version of a local file is a digest of its bytes: of all up to 8 MiB, else of the first and last
MiB. Versions of large sources are kept in the user's cache folder, by inode, size and time. A file
that has changed in the last seconds is not kept: it could change again without another time.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from pydantic import TypeAdapter

from rayapp.data.sources import formats, hub
from rayapp.data.sources.formats import SUFFIXES
from rayapp.data.sources.parts import DataFile, DataSource, SourceError
from rayapp.data.sources.pieces import is_own, reader_version
from rayapp.data.sources.streams import open_stream
from rayapp.storage import Entry, Readable, open_input, open_storage

NAMED = {"json": "a JSON array"}
MAX_OPENED = 16  # most files whose first bytes are checked
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
WHOLE_BYTES = 8 * 2**20  # of a file that is read whole
END_BYTES = 2**20
READERS, AT_ONCE = 16, 64  # threads, and the files of a call
KEPT_BYTES = 64 * 2**20  # read at a start, from which on versions are kept
SETTLED_S = 10.0  # since a file has changed
KEPT = TypeAdapter(dict[str, tuple[str, str]])  # (etag, version) by name


def find(path: str, format: str = "auto") -> DataSource:
    """List the files of `data.path`.

    Raises:
        SourceError: nothing is there, or nothing that can be read as one format.
        StorageError: storage that cannot be listed.
    """
    if path == "stdlib":
        return _stdlib()
    reader = reader_version(format) if is_own(format) else ""
    local = os.path.exists(path) or _is_pattern(path) or path.startswith((".", "/", "~"))
    if "://" not in path and not local and _looks_like_hub_id(path):
        return DataSource(path, "hub", (), hub.revision(path))
    if format == "hub":
        raise SourceError(
            f"data.format=hub is in conflict: data.path={path} is no id of the hub. Set "
            "data.format=auto, or an id such as org/name"
        )
    root, pattern = _split_glob(path)
    storage = open_input(root)
    entries = storage.list()
    single = not entries and pattern is None
    if single:
        storage, entries = _one_file(storage)
    if pattern is not None:
        names = {name for entry in entries for name in entry.name.split("/")}
        # A folder or file may be named like a pattern, such as `split[1]`.
        pattern = [glob.escape(part) if part in names else part for part in pattern]
        entries = [entry for entry in entries if _matches(entry.name.split("/"), pattern)]
    if not entries:
        raise SourceError(f"data.path={path} is missing: there is no such file, folder or match")
    wanted = entries if single else [entry for entry in entries if not _hidden(entry.name)]
    _refuse_unread([entry.name for entry in wanted or entries], path)
    saved = _saved(wanted, path)
    if saved and format in ("auto", "arrow"):
        format, wanted = "arrow", saved
    chosen = format != "auto"  # by the user, whose pattern then needs no suffix
    if chosen and not single and pattern is None and not reader:
        wanted = [e for e in wanted if formats.bare(e.name).endswith(SUFFIXES[format])]
    if not chosen:  # beside data there may be a licence, or a marker of another program
        named = [entry for entry in wanted if formats.by_name(entry.name)]
        wanted = named or wanted
        if not wanted:
            raise _unknown(entries[0].name, path)
    if not wanted:
        raise SourceError(
            f"data.path={path} is without {format} files: it holds {len(entries)} others. "
            f"Name them {' or '.join(SUFFIXES[format])}, or set data.format and a pattern like *"
        )
    if not any(entry.size for entry in wanted):
        raise SourceError(f"data.path={path} is empty: its {len(wanted)} files hold 0 bytes")
    if not reader:
        format = _format_of(storage, wanted, path, format)
    on_s3 = storage.url.startswith("s3://")
    versions = [entry.etag for entry in wanted] if on_s3 else versions_of(storage, wanted)
    files = tuple(DataFile(e.name, e.size, v) for e, v in zip(wanted, versions, strict=True))
    return DataSource(storage.url, format, files, reader)


def _stdlib() -> DataSource:
    root = Path(sysconfig.get_path("stdlib"))
    storage = open_input(str(root))
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not STDLIB_SKIPPED & set(path.relative_to(root).parts)
    )
    files = tuple(
        DataFile(name, len(data), blake2b(data, digest_size=8).hexdigest())
        for name in names
        if (data := (root / name).read_bytes())
    )
    return DataSource(storage.url, "text", files)


def _is_pattern(path: str) -> bool:
    return any(mark in path for mark in "*?[")


def _looks_like_hub_id(path: str) -> bool:
    """Return whether a path is `org/name`, and no missing data file or existing folder."""
    if not hub.ID.fullmatch(path) or os.path.isdir(path.split("/")[0]):
        return False
    return formats.by_name(path) is None and formats.unread(path) is None


def _one_file(storage: Readable) -> tuple[Readable, list[Entry]]:
    """Return the parent of a path that is no folder, and the path's entry if it is a file."""
    parent, _, name = storage.url.rpartition("/")
    if not name or parent == "s3:/":  # the root of the disk, or a whole bucket
        return storage, []
    folder = open_input(parent or "/")
    entry = folder.stat(name)
    return folder, [] if entry is None else [entry]


def _split_glob(path: str) -> tuple[str, list[str] | None]:
    """Split `a/b/*/c.txt` into the folder `a/b` and the patterns `*`, `c.txt`."""
    if not _is_pattern(path) or os.path.exists(path):
        return path, None
    parts = path.split("/")
    first = next(index for index, part in enumerate(parts) if _is_pattern(part))
    root = "/".join(parts[:first]) or ("/" if path.startswith("/") else ".")
    return root, parts[first:]


def _matches(names: list[str], patterns: list[str]) -> bool:
    """Match folder by folder like a shell: `*` stops at `/`, `**` matches any number of folders."""
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_matches(names[skip:], patterns[1:]) for skip in range(len(names) + 1))
    matched = bool(names) and fnmatch.fnmatchcase(names[0], patterns[0])
    return matched and _matches(names[1:], patterns[1:])


def _refuse_unread(names: list[str], path: str) -> None:
    for name in names:
        if what := formats.unread(name):
            raise SourceError(
                f"data.path={path} is {what}: {name} is not read. Unpack it, or compress with gzip "
                "or Zstandard (.gz, .zst)"
            )


def _saved(entries: list[Entry], path: str) -> list[Entry] | None:
    """Return the Arrow files of a folder that datasets' save_to_disk wrote; None if it is none.

    Raises:
        SourceError: it holds several splits.
    """
    names = {entry.name for entry in entries}
    if "dataset_dict.json" in names:
        splits = sorted({n.split("/")[0] for n in names if n.endswith("/state.json")})
        raise SourceError(
            f"data.path={path} is a set of splits: it holds {', '.join(splits)}. "
            f"Set data.path={path.rstrip('/')}/{(splits or ['train'])[0]}, and data.eval_path to "
            "what is held out"
        )
    if "state.json" not in names:
        return None
    return [entry for entry in entries if entry.name.endswith(".arrow")]


def _format_of(storage: Readable, files: list[Entry], path: str, format: str) -> str:
    """Return the format of files by their names and first bytes; `format` is the user's or auto."""
    if format in ("text", "csv", "tsv"):  # nothing in the content contradicts them
        return format
    example_of: dict[str, str] = {}
    for entry in [entry for entry in files if entry.size][:MAX_OPENED]:
        try:
            known = formats.format_of(entry.name, _head(storage, entry))
        except SourceError as error:
            raise SourceError(f"data.path={path} is not readable: {entry.name} {error}") from error
        if known is None and format == "auto":
            raise _unknown(entry.name, path)
        example_of.setdefault(known or format, entry.name)
    if format == "auto":
        rest = {formats.by_name(entry.name) for entry in files[MAX_OPENED:] if entry.size}
        rest -= {"jsonl"} if "json" in example_of else set()
        example_of |= {known or "other": "" for known in rest if known not in example_of}
        if len(example_of) > 1:
            raise SourceError(
                f"data.path={path} is mixed: it holds {', '.join(sorted(example_of))}. "
                f"Set data.format to one of them, or give a pattern like *.jsonl"
            )
        return next(iter(example_of))
    if format in ("jsonl", "json") and format not in example_of:
        other, name = next(iter(example_of.items()))
        raise SourceError(
            f"data.path={path} is {NAMED.get(other, other)}: {name} is not {format}. Set "
            f"data.format={other}, or leave it out"
        )
    return format


def _head(storage: Readable, entry: Entry) -> bytes:
    """Return a file's first bytes, decompressed.

    Raises:
        SourceError: it is compressed, and its name does not say so; or it is broken.
    """
    codec = formats.codec_of(storage.read(entry.name, 0, min(entry.size, 4)))
    if codec and not formats.is_compressed(entry.name):
        raise SourceError(f"is compressed with {codec}. End its name in .gz or .zst")
    try:
        with open_stream(storage.url, entry.name) as stream:
            return stream.read(formats.HEAD_BYTES)
    except (OSError, EOFError) as error:
        raise SourceError(f"is not to be decompressed: {error}") from error


def _unknown(name: str, path: str) -> SourceError:
    return SourceError(
        f"data.path={path} is of no known kind: {name} is none of {', '.join(formats.FORMATS)}. "
        "Set data.format to what it is (text for raw text), or to mypackage.module:function"
    )


def _hidden(name: str) -> bool:
    *folders, last = name.split("/")
    return last.startswith(".") or any(folder.startswith((".", "_")) for folder in folders)


def versions_of(storage: Readable, entries: Sequence[Entry]) -> list[str]:
    """Return the version of each local file: 16 hex digits."""
    read = (e.size if e.size <= WHOLE_BYTES else 2 * END_BYTES for e in entries)
    keeps = sum(read) >= KEPT_BYTES
    caches = open_storage(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "rayapp"
    root = os.fsencode(os.path.realpath(storage.url))
    cache, began = f"versions-{blake2b(root, digest_size=8).hexdigest()}.json", time.time()
    kept: dict[str, tuple[str, str]] = {}
    with suppress(OSError, ValueError):  # none is there, or it cannot be read
        kept = KEPT.validate_json(caches.read(cache)) if keeps else {}
    new = [entry for entry in entries if kept.get(entry.name, ("",))[0] != entry.etag]
    parts = [new[first : first + AT_ONCE] for first in range(0, len(new), AT_ONCE)]
    with ThreadPoolExecutor(READERS) as pool:
        made = pool.map(lambda part: [_digest(storage, entry) for entry in part], parts)
        digests = [digest for part in made for digest in part]
    found = {e.name: (e.etag, digest) for e, digest in zip(new, digests, strict=True)}
    if keeps and new:
        settled = {e.name: found[e.name] for e in new if e.modified_s < began - SETTLED_S}
        with suppress(OSError, ValueError):  # no folder to write to, or a name is not Unicode
            caches.write(cache, KEPT.dump_json(kept | settled))
    kept |= found
    return [kept[entry.name][1] for entry in entries]


def _digest(storage: Readable, entry: Entry) -> str:
    """Digest a file's content up to WHOLE_BYTES, else its first and last MiB and its time."""
    if entry.size <= WHOLE_BYTES:
        return blake2b(storage.read(entry.name), digest_size=8).hexdigest()
    first = storage.read(entry.name, 0, END_BYTES)
    last = storage.read(entry.name, entry.size - END_BYTES, END_BYTES)
    return blake2b(first + last + str(entry.modified_s).encode(), digest_size=8).hexdigest()
