"""Hold the tokens of many documents: in memory, or in temporary files when they are more."""

from __future__ import annotations

import os
import tempfile
from array import array
from contextlib import ExitStack
from typing import IO, Any

import numpy as np

from rayapp.data.packing import Document, Slices

SPOOL_TOKENS = 2**20  # most that are held in memory, at 7 bytes each
TYPES: list[np.dtype[Any]] = [np.dtype(t) for t in (np.int32, np.bool_, np.uint16)]  # a Document's


class Spool:
    """Documents laid end to end: what `packing.filled` takes its slices from."""

    def __init__(self) -> None:
        self.lengths, self.values, self.size = array("q"), array("f"), 0
        self.open = False
        self.buffers = [bytearray() for _ in TYPES]
        self.files: list[IO[bytes]] = []
        self.stack = ExitStack()

    def add(
        self, document: Document, goes_on: bool = False, values: tuple[float, ...] = ()
    ) -> None:
        """Add a copy of a document, or of the next part of one that goes on, at the end."""
        if not self.open:
            self.lengths.append(0)
            self.values.extend(values)
        self.lengths[-1] += len(document.tokens)
        self.open = goes_on
        self.size += len(document.tokens)
        columns = (document.tokens, document.loss, document.num_bytes)
        plain = [np.ascontiguousarray(c, dtype) for c, dtype in zip(columns, TYPES, strict=True)]
        large = len(document.tokens) >= SPOOL_TOKENS
        if large or len(self.buffers[0]) >= SPOOL_TOKENS * TYPES[0].itemsize:
            self._spill()
        for number, column in enumerate(plain):
            if large:
                self.files[number].write(column.data)
            else:
                self.buffers[number] += column.data

    def arrays(self) -> tuple[Slices, Slices, Slices]:
        """Return the tokens, whether they bear loss, and their bytes; nothing is added any more."""
        if not self.files:
            tokens, loss, num_bytes = map(np.frombuffer, self.buffers, TYPES)
            return tokens, loss, num_bytes
        self._spill()
        return tuple(map(FileSlices, self.files, TYPES))  # type: ignore[return-value]  # of three

    def close(self) -> None:
        """Remove the temporary files; slices of them can be taken no more."""
        self.stack.close()

    def _spill(self) -> None:
        if not self.files:
            self.files = [self.stack.enter_context(tempfile.TemporaryFile()) for _ in TYPES]  # noqa: SIM115
        for file, buffer in zip(self.files, self.buffers, strict=True):
            file.write(buffer)
            file.flush()
            buffer.clear()


class FileSlices:
    """An array in a file, read slice by slice: a memory map would count as memory of the task."""

    def __init__(self, file: IO[bytes], dtype: np.dtype[Any]) -> None:
        self.number, self.dtype = file.fileno(), dtype

    def __getitem__(self, index: slice, /) -> np.ndarray[Any, Any]:
        first, last = index.start or 0, index.stop
        size = self.dtype.itemsize
        return np.frombuffer(os.pread(self.number, (last - first) * size, first * size), self.dtype)
