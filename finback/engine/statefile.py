"""A state in a file: all layers' parts of one boundary, and what made them.

The file is written under another name, synced, and renamed, so there is a whole file or none. It is
untrusted when it is read: nothing of it is used before everything about it was checked.

    magic (16) · header bytes (8) · header sum (8) · header JSON · zeros to a block · arrays, those
    of each layer one after the other from a block's border on
"""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from finback.checkpoint.files import open_file
from finback.checkpoint.formats import Array, Bytes
from finback.errors import DamagedFile
from finback.models.state import LatentState, RecurrentState, SequenceState
from finback.storage.arena import BLOCK, MemoryPool, reserve
from finback.storage.extents import Extent
from finback.storage.reader import Reader, Ticket

MAGIC = b"finback state 2\n"
MAGIC_START = b"finback state "
HEAD = len(MAGIC) + 16
MAX_HEADER = 64 << 20  # a million token ids
SUM_WORDS = 512  # 64-bit words that are added up together: 4 KiB
ROOM = 64  # latent rows that follow before memory for more is taken


class NotOurs(DamagedFile):
    """A file that is none of ours, of a later version, gone, or out of reach: to be left alone."""


class HasState(Protocol):
    """What a state is checked against: a model."""

    def state_shapes(self, position: int) -> dict[tuple[int, str], tuple[int, ...]]:
        """See `Model.state_shapes`."""
        ...


def write_state(path: Path, fingerprint: str, tokens: Sequence[int], state: SequenceState) -> int:
    """Write a state, whole or not at all; gives the bytes of the file.

    Raises:
        OSError: The disk is full, or the folder cannot be written.
    """
    arrays = list(_arrays_of(state, len(tokens)))
    described, at, last = [], 0, -1
    for layer, kind, values in arrays:
        raw = _bytes_of(values)
        at, last = at if layer == last else _in_blocks(at), layer
        described.append(
            {
                "layer": layer,
                "kind": kind,
                "shape": list(values.shape),
                "at": at,
                "bytes": raw.nbytes,
                "sum": _sum(raw),
            }
        )
        at += raw.nbytes
    at = _in_blocks(at)
    header = {"model": fingerprint, "tokens": list(tokens), "arrays": described, "bytes": at}
    text = json.dumps(header, separators=(",", ":")).encode()
    head = MAGIC + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(8, "little") + text
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(head)
            last = -1
            for layer, _, values in arrays:
                if layer != last:
                    file.write(b"\0" * (-file.tell() % BLOCK))
                    last = layer
                file.write(_bytes_of(values).data)
            file.write(b"\0" * (-file.tell() % BLOCK))
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        part.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return len(head) + -len(head) % BLOCK + at


def read_state(
    path: Path,
    fingerprint: str,
    tokens: Sequence[int],
    model: HasState,
    reader: Reader,
    memory: MemoryPool,
) -> SequenceState:
    """Read a state and check it: the model, the tokens, every layer's part, every sum.

    Raises:
        DamagedFile: Naming what is wrong; nothing of it is used.
        ReadError: The device failed.
    """
    header, start = read_header(path)
    if header["model"] != fingerprint:
        raise DamagedFile(f"{path}: is a state of another model, or of other activations")
    if header["tokens"] != list(tokens):
        raise DamagedFile(f"{path}: is a state of another text")
    wanted = model.state_shapes(len(tokens))
    parts = {(one["layer"], one["kind"]): one for one in header["arrays"]}
    order = sorted(wanted, key=lambda key: key[0])
    if len(parts) != len(header["arrays"]) or list(parts) != order:
        raise DamagedFile(f"{path}: lacks parts of the state, or has others than the model")
    end, last = 0, -1
    for key, one in parts.items():
        size = 4 * int(np.prod(wanted[key]))
        end, last = end if key[0] == last else _in_blocks(end), key[0]
        if tuple(one["shape"]) != wanted[key] or one["bytes"] != size or one["at"] != end:
            raise DamagedFile(f"{path}: {one['kind']} of layer {key[0]} has another size")
        end += size
    if _in_blocks(end) != header["bytes"]:
        raise DamagedFile(f"{path}: its header contradicts itself")
    return _read_parts(path, start, parts, wanted, len(tokens), reader, memory)


def _read_parts(
    path: Path,
    start: int,
    parts: Mapping[tuple[int, str], Mapping[str, Any]],
    shapes: Mapping[tuple[int, str], tuple[int, ...]],
    position: int,
    reader: Reader,
    pool: MemoryPool,
) -> SequenceState:
    """Read all layers at once, each into the memory where it stays, and check them as they come."""
    state, tickets = SequenceState(position=position, memory=pool), dict[int, Ticket]()
    places: dict[int, tuple[int, Bytes]] = {}
    try:
        for layer in dict.fromkeys(layer for layer, _ in parts):
            mine = [one for key, one in parts.items() if key[0] == layer]
            if (layer, "rows") in parts:
                rows = shapes[layer, "rows"]
                memory = reserve(_in_blocks(mine[0]["bytes"] + ROOM * 4 * rows[1]))
                state.layers[layer] = LatentState.on(memory, rows[1], rows[0])
            else:
                pair = shapes[layer, "matrix"], shapes[layer, "history"]
                memory = pool.take(RecurrentState.bytes_of(*pair))
                state.layers[layer] = RecurrentState.on(memory, *pair)
            num_bytes = sum(one["bytes"] for one in mine)
            extent = Extent(path, start + mine[0]["at"], num_bytes)
            tickets[layer] = reader.submit([extent], memory, role="state")
            places[layer] = (mine[0]["at"], memory)
        for (layer, kind), one in parts.items():
            reader.wait([tickets[layer]])
            first, memory = places[layer]
            begin = one["at"] - first
            if _sum(memory[begin : begin + one["bytes"]]) != one["sum"]:
                raise DamagedFile(f"{path}: {kind} of layer {layer} is damaged")
    except BaseException:
        for ticket in tickets.values():
            reader.cancel(ticket)
        reader.settle(list(tickets.values()))
        state.release()
        raise
    finally:
        reader.forget(path)  # another file may take its name
    return state


def bytes_of_arrays(state: SequenceState, position: int) -> int:
    """Count what the parts of a state at a position take in a file."""
    return sum(_in_blocks(values.nbytes) for *_, values in _arrays_of(state, position))


def _in_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK) * BLOCK


def _arrays_of(state: SequenceState, position: int) -> list[tuple[int, str, Array]]:
    held = state.position - position
    out: list[tuple[int, str, Array]] = []
    for layer, part in sorted(state.layers.items()):
        if isinstance(part, RecurrentState):
            assert held == (0 if part.pending is None else len(part.pending.q))
            out += [(layer, "matrix", part.matrix), (layer, "history", part.history)]
        else:
            out.append((layer, "rows", part.rows[: len(part.rows) - held]))
    return out


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Read and check a header; gives it and where the arrays begin."""
    try:
        file = os.fdopen(open_file(path), "rb")
    except DamagedFile as error:
        raise NotOurs(str(error)) from error
    with file:
        head = file.read(HEAD)
        if head[: len(MAGIC)] != MAGIC:
            told = f"{path}: is no state of this version of finback"
            is_older = head.startswith(MAGIC_START) and head < MAGIC
            raise DamagedFile(told) if is_older else NotOurs(told)
        size = int.from_bytes(head[len(MAGIC) : len(MAGIC) + 8], "little")
        if len(head) < HEAD or size > MAX_HEADER:
            raise DamagedFile(f"{path}: its header is cut, or larger than any")
        text = file.read(size)
    if len(text) < size or zlib.crc32(text).to_bytes(8, "little") != head[-8:]:
        raise DamagedFile(f"{path}: its header is cut or damaged")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path}: its header is no JSON") from error
    if not _is_sound(header):
        raise DamagedFile(f"{path}: its header is none of finback's")
    return header, -(-(HEAD + size) // BLOCK) * BLOCK


def _is_sound(header: object) -> bool:
    """Tell whether a header has the parts that are read from it, with their types."""

    def is_count(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48

    if not isinstance(header, dict) or not isinstance(header.get("model"), str):
        return False
    if not header["model"].isascii():
        return False
    tokens, arrays = header.get("tokens"), header.get("arrays")
    if not isinstance(tokens, list) or not tokens or not all(map(is_count, tokens)):
        return False
    if not is_count(header.get("bytes")) or not isinstance(arrays, list):
        return False
    return all(
        isinstance(one, dict)
        and all(is_count(one.get(name)) for name in ("layer", "at", "bytes", "sum"))
        and isinstance(one.get("kind"), str)
        and isinstance(one.get("shape"), list)
        and all(is_count(size) for size in one["shape"])
        for one in arrays
    )


def _bytes_of(values: Array) -> Bytes:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _sum(raw: Bytes) -> int:
    """Sum bytes up: a checksum over the sums of 4 KiB each, at the speed of memory."""
    words = raw[: len(raw) // 8 * 8].view(np.uint64)
    whole = len(words) // SUM_WORDS * SUM_WORDS
    sums = words[:whole].reshape(-1, SUM_WORDS).sum(1, dtype=np.uint64)
    return zlib.crc32(raw[whole * 8 :].tobytes(), zlib.crc32(sums.tobytes()))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
