"""One safetensors file's header, checked as a whole before anything is allocated or believed."""

import json
import os
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeGuard

from finback.checkpoint.files import open_file
from finback.errors import DamagedFile

# The reference implementation's limit on a header.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 8
ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where one tensor lies: `num_bytes` bytes at `offset` of `path`."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_header(path: Path) -> dict[str, TensorRef]:
    """Read and check the header of one file.

    Checked in this order: the file's size, the header's length, JSON, every entry, that the
    tensors fill the rest of the file without gaps or overlaps.

    Returns:
        The tensors by name, in the order in which they lie.

    Raises:
        DamagedFile: Naming the file, what is wrong, and the sizes that do not agree.
    """
    try:
        with os.fdopen(open_file(path), "rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            if file_bytes < 8:
                raise DamagedFile(
                    f"{path}: only {file_bytes} bytes, too short for a header; download it again"
                )
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise DamagedFile(
                    f"{path}: the header claims {header_bytes} bytes, but the file has "
                    f"{file_bytes} and a header at most {MAX_HEADER_BYTES}; it is cut, or no "
                    "safetensors file"
                )
            text = file.read(header_bytes)
    except OSError as error:
        raise DamagedFile(f"{path}: cannot be read ({error.strerror})") from error
    if len(text) != header_bytes:
        raise DamagedFile(f"{path}: the header ended after {len(text)} of {header_bytes} bytes")
    entries = _parse(path, text)
    data_start = 8 + header_bytes
    refs = [_entry(path, name, value, data_start) for name, value in entries.items()]
    refs.sort(key=lambda ref: (ref.offset, ref.num_bytes))
    end = data_start
    for ref in refs:
        if ref.offset != end:
            kind = "overlaps the tensor before it" if ref.offset < end else "leaves a gap before it"
            raise DamagedFile(
                f"{path}: tensor {ref.name} {kind} (at byte {ref.offset}, expected {end})"
            )
        end += ref.num_bytes
    if end != file_bytes:
        state = "cut short" if file_bytes < end else "too long"
        raise DamagedFile(
            f"{path}: {state}: its header describes {end} bytes, the file has {file_bytes}; "
            "download it again"
        )
    return {ref.name: ref for ref in refs}


def make_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Give the header of a file that holds tensors (name, dtype, shape) one after the other."""
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, dtype, shape in tensors:
        end = position + prod(shape) * ITEM_BYTES[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _parse(path: Path, text: bytes) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a key appears twice")
        return table

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path}: the header is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise DamagedFile(f"{path}: the header must be a JSON object")
    value.pop("__metadata__", None)
    return value


def _entry(path: Path, name: str, value: object, data_start: int) -> TensorRef:
    entry = value if isinstance(value, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise DamagedFile(f"{path}: tensor {name} has the unknown dtype {reprlib.repr(dtype)}")
    if not _is_size_list(shape) or len(shape) > MAX_DIMENSIONS:
        raise DamagedFile(f"{path}: tensor {name} has the impossible shape {reprlib.repr(shape)}")
    if not _is_size_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise DamagedFile(
            f"{path}: tensor {name} has the impossible data_offsets {reprlib.repr(offsets)}"
        )
    start, stop = offsets
    expected = prod(shape) * ITEM_BYTES[dtype]
    if stop - start != expected:
        raise DamagedFile(
            f"{path}: tensor {name} {dtype}{list(shape)} needs {expected} bytes, "
            f"its data_offsets give {stop - start}"
        )
    return TensorRef(name, path, dtype, tuple(shape), data_start + start, expected)


def _is_size_list(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**63 for n in value
    )
