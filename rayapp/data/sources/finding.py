"""Find the files of `data.path`: a file, folder, glob, `s3://`, hub id, or `stdlib`."""

from __future__ import annotations

import fnmatch
import os
import sysconfig
from hashlib import blake2b
from pathlib import Path

from rayapp.data.sources.records import DataFile, DataSource, SourceError
from rayapp.storage import Entry, Readable
from rayapp.storage.inputs import open_input

SUFFIXES = {
    "text": (".txt", ".md", ".rst", ".py", ".text"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet", ".pq"),
}
GZIP, ZSTANDARD = "compressed with gzip", "compressed with Zstandard"
COMPRESSED = {
    ".gz": GZIP,
    ".tgz": GZIP,
    ".zst": ZSTANDARD,
    ".zstd": ZSTANDARD,
    ".bz2": "compressed with bzip2",
    ".xz": "compressed with xz",
    ".zip": "a ZIP archive",
}
CONVERTED = {  # suffixes of data that needs conversion -> (format, why)
    ".csv": ("CSV", "would be raw text"),
    ".tsv": ("TSV", "would be raw text"),
    ".arrow": ("Arrow", "is what datasets' save_to_disk writes, and is not read"),
}
MAX_OPENED = 16  # most files whose first bytes are checked
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


def find(path: str, format: str = "auto") -> DataSource:
    """List the files of `data.path`.

    Raises:
        SourceError: nothing is there, or nothing that can be read as one format.
        StorageError: storage that cannot be listed.
    """
    if path == "stdlib":
        return _stdlib()
    if "://" not in path and not _is_local(path) and _looks_like_hub_id(path):
        return DataSource(path, "hub", ())
    root, pattern = _split_glob(path)
    storage = open_input(root)
    entries = storage.list()
    single = not entries and pattern is None
    if single:
        storage, entries = _one_file(storage)
    if pattern is not None:
        entries = [entry for entry in entries if _matches(entry.name.split("/"), pattern)]
    if not entries:
        raise SourceError(f"data.path={path} is missing: there is no such file, folder or match")
    chosen = format != "auto"  # by the user, whose pattern then needs no suffix
    wanted = entries if single else [entry for entry in entries if not _hidden(entry.name)]
    names = [entry.name for entry in wanted or entries]
    if not chosen:
        _refuse_unread(names, path)
    format = format if chosen else _format_of(names, path)
    if not single and not (chosen and pattern is not None):
        wanted = [entry for entry in wanted if entry.name.lower().endswith(SUFFIXES[format])]
    if not wanted:
        raise SourceError(
            f"data.path={path} is without {format} files: it holds {len(entries)} others. "
            f"Name them {' or '.join(SUFFIXES[format])}, or set data.format and a pattern like *"
        )
    _refuse_compressed([entry.name for entry in wanted], path)
    if not any(entry.size for entry in wanted):
        raise SourceError(f"data.path={path} is empty: its {len(wanted)} files hold 0 bytes")
    if format == "jsonl":
        _refuse_array(storage, wanted, path)
    files = tuple(
        DataFile(e.name, e.size, e.etag if storage.url.startswith("s3://") else _digest(storage, e))
        for e in wanted
    )
    return DataSource(storage.url, format, files)


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


def _is_local(path: str) -> bool:
    return os.path.exists(path) or _is_pattern(path) or path.startswith((".", "/", "~"))


def _is_pattern(path: str) -> bool:
    return any(mark in path for mark in "*?[")


def _looks_like_hub_id(path: str) -> bool:
    """Return whether a path is `org/name`, and no missing data file or existing folder."""
    parts = path.split("/")
    named_as_file = path.lower().endswith(tuple(e for ends in SUFFIXES.values() for e in ends))
    return len(parts) == 2 and all(parts) and not named_as_file and not os.path.isdir(parts[0])


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
    """Refuse files that look like data and cannot be read as records."""
    _refuse_compressed(names, path)
    for name in names:
        if found := CONVERTED.get(os.path.splitext(name.lower())[1]):
            format, why = found
            raise SourceError(
                f"data.path={path} is {format}: {name} {why}. Convert it to JSONL or Parquet, "
                "or set data.format=text if raw text is meant"
            )


def _refuse_compressed(names: list[str], path: str) -> None:
    for name in names:
        if how := COMPRESSED.get(os.path.splitext(name.lower())[1]):
            raise SourceError(
                f"data.path={path} is {how}: {name} cannot be read in pieces. Decompress it, or "
                "write Parquet, which is compressed inside"
            )


def _refuse_array(storage: Readable, files: list[Entry], path: str) -> None:
    """Refuse JSON files that hold one array; JSONL has one object on each line."""
    for entry in [entry for entry in files if entry.size][:MAX_OPENED]:
        if storage.read(entry.name, 0, min(entry.size, 64)).lstrip().startswith(b"["):
            raise SourceError(
                f"data.path={path} is a JSON array: {entry.name} begins with [, and one object on "
                f"each line is read. Convert it: jq -c '.[]' {entry.name} > records.jsonl"
            )


def _format_of(names: list[str], path: str) -> str:
    found = {f for f, ends in SUFFIXES.items() if any(n.lower().endswith(ends) for n in names)}
    if len(found) == 1:
        return found.pop()
    state = "mixed" if found else "of no known kind"
    raise SourceError(
        f"data.path={path} is {state}: it holds {', '.join(sorted(found)) or names[0]}. "
        "Set data.format=text, jsonl or parquet"
    )


def _hidden(name: str) -> bool:
    *folders, last = name.split("/")
    return last.startswith(".") or any(folder.startswith((".", "_")) for folder in folders)


def _digest(storage: Readable, entry: Entry) -> str:
    """Digest a local file: its content up to 8 MiB, else its first and last MiB and its mtime."""
    if entry.size <= 8 * 2**20:
        return blake2b(storage.read(entry.name), digest_size=8).hexdigest()
    ends = storage.read(entry.name, 0, 2**20) + storage.read(entry.name, entry.size - 2**20, 2**20)
    return blake2b(ends + str(entry.modified_s).encode(), digest_size=8).hexdigest()
