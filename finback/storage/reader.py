"""Reads of exact byte ranges from a checkpoint's files, counted and timed."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finback.checkpoint.formats import Bytes
from finback.checkpoint.safetensors import TensorRef
from finback.errors import ReadError
from finback.spans import Spans

MAX_OPEN_FILES = 32  # below any usual descriptor limit, however many shards there are


@dataclass(frozen=True, slots=True)
class Extent:
    """A piece of a file."""

    path: Path
    offset: int
    num_bytes: int


def merge(refs: Iterable[TensorRef]) -> list[Extent]:
    """Join tensors that lie side by side into as few extents as possible, keeping their order."""
    out: list[Extent] = []
    for ref in refs:
        last = out[-1] if out else None
        if last and last.path == ref.path and last.offset + last.num_bytes == ref.offset:
            out[-1] = Extent(last.path, last.offset, last.num_bytes + ref.num_bytes)
        else:
            out.append(Extent(ref.path, ref.offset, ref.num_bytes))
    return out


class Reader:
    """Reads extents into memory. Owns the open files until it is closed."""

    def __init__(self, spans: Spans) -> None:
        """Open nothing yet; reads are timed as `read` and counted as `bytes_read` in `spans`."""
        self._spans = spans
        self._descriptors: dict[Path, int] = {}
        self._is_closed = False

    def read(self, extents: Iterable[Extent]) -> Bytes:
        """Read extents one after the other into one new array, owned by the caller.

        Raises:
            ReadError: A file ended early, cannot be opened, or the device failed.
        """
        wanted = list(extents)
        buffer = np.empty(sum(extent.num_bytes for extent in wanted), np.uint8)
        position = 0
        with self._spans.span("read"):
            for extent in wanted:
                self._read_into(extent, buffer.data[position : position + extent.num_bytes])
                position += extent.num_bytes
        self._spans.count("bytes_read", len(buffer))
        self._spans.count("reads", len(wanted))
        return buffer

    def close(self) -> None:
        """Close every file; later reads are errors."""
        self._is_closed = True
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _read_into(self, extent: Extent, view: memoryview) -> None:
        done = 0
        try:
            descriptor = self._descriptor(extent.path)
            while done < len(view):
                count = os.preadv(descriptor, [view[done:]], extent.offset + done)
                if count == 0:
                    break
                done += count
        except OSError as error:
            raise ReadError(
                f"{extent.path}: reading at byte {extent.offset} failed ({error.strerror})"
            ) from error
        if done < len(view):
            raise ReadError(
                f"{extent.path}: ended after {extent.offset + done} bytes, "
                f"{extent.offset + len(view)} are needed; it shrank while in use"
            )

    def _descriptor(self, path: Path) -> int:
        if self._is_closed:
            raise ReadError(f"{path}: the model has been closed")
        if path not in self._descriptors:
            if len(self._descriptors) >= MAX_OPEN_FILES:
                oldest = next(iter(self._descriptors))
                os.close(self._descriptors.pop(oldest))
            self._descriptors[path] = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        return self._descriptors[path]
