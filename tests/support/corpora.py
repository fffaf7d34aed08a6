"""Small corpora in many formats, and digests of the rows that are made of them."""

from __future__ import annotations

import gzip
import json
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from xxhash import xxh3_64_intdigest

from rayapp.data.token_rows import PLACED
from rayapp.storage import Storage

TEXTS = [f"{n:03d} " + "abcdefghij\n"[: n % 11] * (n % 9) if n % 11 else "" for n in range(90)]


def lines(values: list[dict[str, object]]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def write(folder: Path, name: str) -> str:
    """Write the corpus of this name; return its data.path."""
    texts: list[dict[str, object]] = [{"text": text, "id": n} for n, text in enumerate(TEXTS)]
    folder.mkdir()
    if name == "jsonl":  # three files, one record in ten unusable
        for number in range(3):
            some = [*texts[number * 30 : number * 30 + 30], {"words": "x"}, {"text": 7}, {}]
            (folder / f"{number}.jsonl").write_text(lines(some) + "{\n")
    elif name == "text":  # many small files
        for number, text in enumerate(TEXTS):
            (folder / f"{number:03d}.txt").write_text(text + "\nend\n")
    elif name == "one":
        (folder / "a.txt").write_text("".join(f"line {n} {text}\n" for n, text in enumerate(TEXTS)))
    elif name == "gz":
        for number in range(2):
            data = lines(texts[number * 45 : number * 45 + 45]).encode()
            (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(data, mtime=0))
    elif name == "csv":
        rows = "".join(f'"{text}",{n}\n' for n, text in enumerate(TEXTS))
        (folder / "a.csv").write_text("text,id\n" + rows)
    elif name == "parquet":
        pq.write_table(pa.Table.from_pylist(texts), folder / "a.parquet", row_group_size=17)
    elif name == "prompt":
        some = [{"prompt": f"Q{n}?", "completion": text} for n, text in enumerate(TEXTS)]
        (folder / "a.jsonl").write_text(lines(some))
    elif name == "chat":
        some = []
        for n, text in enumerate(TEXTS):
            turns = [{"role": "user", "content": f"Q{n}?"}, {"role": "assistant", "content": text}]
            some.append({"messages": turns})
        (folder / "a.jsonl").write_text(lines(some))
    return str(folder)


def rows_digest(storage: Storage, row_bytes: int) -> str:
    """Digest the names and bytes of all shards, without checksums, and of the hashes beside."""
    digest = blake2b(digest_size=8)
    entries = {entry.name.replace(PLACED, ".bin"): entry.name for entry in storage.list()}
    for name in sorted(name for name in entries if name.endswith(".bin")):
        data = storage.read(entries[name])
        if entries[name] != name:
            stored = np.frombuffer(data, np.uint8).reshape(-1, row_bytes + 8)
            data = stored[:, :row_bytes].tobytes()
        digest.update(name.encode() + data)
    return digest.hexdigest()


def as_before(rows: list[bytes]) -> bytes:
    """Return rows as the version before stored them: with checksums of their bytes alone."""
    return b"".join(row + xxh3_64_intdigest(row).to_bytes(8, "little") for row in rows)


def make_earlier(storage: Storage, row_bytes: int, units: slice = slice(None)) -> None:
    """Turn the shards, the units' summaries and the manifest into those of the version before."""
    names = sorted(e.name for e in storage.list() if e.name.startswith("unit-"))[units]
    for name in [*names, *(["manifest.json"] if storage.exists("manifest.json") else [])]:
        account = json.loads(storage.read(name))
        del account["checksum"]
        storage.write(name, json.dumps(account).replace(PLACED, ".rows").encode())
    for shard in {s for n in names for s in json.loads(storage.read(n))["shards"].values()}:
        ours = shard.replace(".rows", PLACED)
        data, size = storage.read(ours), row_bytes + 8
        rows = [data[at : at + row_bytes] for at in range(0, len(data), size)]
        storage.write(shard, as_before(rows))
        storage.delete(ours)
