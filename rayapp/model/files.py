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

import torch

from rayapp.storage import Readable

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
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


def read_headers(storage: Readable) -> dict[str, Stored]:
    """Locate every tensor of a model folder.

    Raises: ValueError if there are no safetensors, or one is missing or damaged.
    """
    return {
        name: where
        for file in weight_files(storage)
        for name, where in read_header(storage, file).items()
    }


def weight_files(storage: Readable) -> list[str]:
    """List the safetensors of a model folder: those in the index, else the single file.

    Raises: ValueError if there are none, or the index is unreadable.
    """
    if storage.exists(INDEX):
        try:
            return sorted(set(json.loads(storage.read(INDEX))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{storage.url}/{INDEX} is no index: {error!r}. Copy it anew"
            ) from error
    if storage.exists(SINGLE):
        return [SINGLE]
    names = [entry.name for entry in storage.list() if "/" not in entry.name]
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
        header.pop("__metadata__", None)
        stored, end = {}, 0
        for name, values in header.items():
            begin, stop = values["data_offsets"]
            dtype, shape = DTYPES[values["dtype"]], tuple(map(int, values["shape"]))
            if stop - begin != math.prod(shape) * dtype.itemsize or begin < 0:
                raise ValueError(f"{name} has {stop - begin} bytes for {list(shape)} of {dtype}")
            stored[name] = Stored(file, dtype, shape, 8 + length + begin, etag)
            end = max(end, 8 + length + stop)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} has a broken header: {error!r}. Copy it anew") from error
    if end > size:
        raise ValueError(f"{where} is truncated: {size} of {end} bytes. Copy it anew")
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
