"""Read and lay out the headers of safetensors files.

    read_headers(storage)["lm_head.weight"]        # Stored(file, dtype, shape, offset)
    out.write(layout({"w": (torch.float32, torch.Size([2, 3]))}))        # then 24 bytes of data

A file is an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}},
then the data. A model folder has one file, or several and an index {weight_map: {name: file}}.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rayapp.storage import Readable, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMS, MAX_SIZE = 64, 2**63 - 1  # of a tensor: numpy's limit, and an int64
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """The location of one tensor on disk; `offset` is in bytes from the start of the file."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    etag: str | None = None
    """The version of the file."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_headers(storage: Readable) -> dict[str, Stored]:
    """Locate every tensor of a model folder.

    Raises: ValueError if there are no safetensors, or some are missing or damaged, one on a line.
    """
    stored: dict[str, Stored] = {}
    wrong = []
    for file in weight_files(storage):
        try:
            stored |= read_header(storage, file)
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        raise ValueError("\n".join(wrong))
    return stored


def weight_files(storage: Readable) -> list[str]:
    """List the safetensors of a model folder: those in the index, else the single file.

    Raises: ValueError if there are none, or two sets of them, or the index is unreadable.
    """
    names = [entry.name for entry in storage.list() if "/" not in entry.name]
    if (index := read_json(storage, INDEX)) is not None:
        entries = index.get("weight_map")
        if not isinstance(entries, dict) or not all(isinstance(n, str) for n in entries.values()):
            raise ValueError(
                f"{storage.url}/{INDEX} is no index: its weight_map does not name the file of each "
                "tensor. Copy it anew"
            )
        files = sorted(set(entries.values()))
        if SINGLE not in names:
            return files
        if others := [file for file in files if file in names and file != SINGLE]:
            raise ValueError(
                f"{storage.url} has two sets of weights: {SINGLE}, which transformers takes, and "
                f"{others[0]} and others of {INDEX}. Delete one set, the second with its index"
            )
    if SINGLE in names:
        return [SINGLE]
    if shards := [name for name in names if name.endswith(".safetensors")]:
        return shards
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        raise ValueError(
            f"{storage.url} has only pickled weights (.bin, .pt), which can run code when opened "
            "and cannot be read in part. Convert it once: AutoModelForCausalLM"
            ".from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise ValueError(
        f"{storage.url} has no *.safetensors: there are no weights to start from. "
        "Copy them there, or set model.from_scratch=true"
    )


def read_header(storage: Readable, file: str) -> dict[str, Stored]:
    """Locate the tensors of one safetensors file.

    Raises: ValueError if the file is missing, truncated, or its header is broken.
    """
    where = f"{storage.url}/{file}"
    entry = storage.stat(file)
    if entry is None:
        raise ValueError(f"{where} is named in {INDEX} but missing. Copy the file there")
    size, etag = entry.size, entry.etag
    if size < 8:
        raise ValueError(f"{where} has {size} bytes: no safetensors header. Copy it anew")
    (length,) = struct.unpack("<Q", storage.read(file, 0, 8, etag))
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise ValueError(
            f"{where} has a broken header: it claims {length} bytes in a file of {size}. "
            "Copy it anew"
        )
    try:
        header = json.loads(storage.read(file, 8, length, etag))
        stored = _located(file, header, 8 + length, etag)
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{where} has a broken header: {error}. Copy it anew") from error
    end = max((each.offset + each.num_bytes for each in stored.values()), default=8 + length)
    if end != size:
        how = "truncated" if end > size else "longer than its tensors"
        raise ValueError(f"{where} is {how}: {size} of {end} bytes. Copy it anew")
    return stored


def _located(file: str, header: Any, start: int, etag: str | None) -> dict[str, Stored]:
    """Return the tensors in a header; their bytes follow one another, from `start` on.

    Raises: ValueError if they do not, or a tensor is described wrongly.
    """
    stored, end = {}, start
    for name, values in header.items():
        match values:
            case {"dtype": str(code), "shape": [*shape], "data_offsets": [begin, stop]} if (
                all(type(n) is int and 0 <= n <= MAX_SIZE for n in (begin, stop, *shape))
                and code in DTYPES
                and len(shape) <= MAX_DIMS
                and math.prod(n or 1 for n in shape) <= MAX_SIZE
                and math.prod(shape) * DTYPES[code].itemsize == stop - begin
            ):
                stored[name] = Stored(file, DTYPES[code], tuple(shape), start + begin, etag)
            case _ if name != "__metadata__":
                raise ValueError(f"{name!r:.200} is described as {values!s:.200}")
    for name, found in sorted(stored.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if found.offset != end:
            raise ValueError(
                f"{name!r:.200} begins at byte {found.offset}, where the one before ends at {end}"
            )
        end += found.num_bytes
    return stored


class ShardReader:
    """Reads rows of stored tensors and counts the bytes; several threads may use it at once."""

    def __init__(self, storage: Readable, stored: Mapping[str, Stored]) -> None:
        self.storage = storage
        self.stored = stored
        self.bytes_read = 0
        self._lock = threading.Lock()

    def rows(self, name: str, start: int = 0, count: int | None = None) -> torch.Tensor:
        """Read `count` rows of the first dimension from `start` on, or all of the tensor."""
        where = self.stored[name]
        shape = where.shape if count is None else (count, *where.shape[1:])
        nbytes = math.prod(shape) * where.dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=where.dtype)
        offset = where.offset + start * math.prod(where.shape[1:]) * where.dtype.itemsize
        read = self.storage.read(where.file, offset, nbytes, where.etag)
        data = bytearray(read)  # torch wants it writable
        with self._lock:
            self.bytes_read += nbytes
        return torch.frombuffer(data, dtype=where.dtype).reshape(shape)


def layout(tensors: Mapping[str, tuple[torch.dtype, torch.Size]]) -> bytes:
    """Return a file's header length and header; the data follows in this order without gaps."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + shape.numel() * dtype.itemsize
        where = {"shape": list(shape), "data_offsets": [begin, end]}
        header[name] = {"dtype": DTYPE_NAMES[dtype], **where}
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)  # aligns the data to 8 bytes
    return struct.pack("<Q", len(data)) + data
