"""States kept on disk: what was computed for a prefix once need not be computed again.

One file holds one state at one boundary: all layers' parts, the token ids they stand for, and which
model, activations and spine made them. It is written under another name, synced, and renamed, so
there is a whole file or none. What cannot be trusted is set aside, never loaded and never tried
again.

    magic (16) · header bytes (8) · header sum (8) · header JSON · zeros to a block · arrays, those
    of each layer one after the other from a block's border on
"""

import hashlib
import json
import logging
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from finback.checkpoint.files import open_file, require_room
from finback.checkpoint.formats import Array, Bytes
from finback.errors import CapacityError, DamagedFile, FinbackError, ReadError
from finback.models.base import Model
from finback.models.state import LatentState, RecurrentState, SequenceState
from finback.storage.arena import BLOCK, MemoryPool, reserve
from finback.storage.extents import Extent
from finback.storage.reader import Reader, Ticket
from finback.units import human_bytes

MAGIC = b"finback state 2\n"
MAGIC_START = b"finback state "
SUFFIX, ASIDE = ".state", ".damaged"
HEAD = len(MAGIC) + 16
MAX_HEADER = 64 << 20  # a million token ids
SUM_WORDS = 512  # 64-bit words that are added up together: 4 KiB
QUOTA = 32 << 30
MAX_SLACK = 1 << 16  # of a file, besides its arrays, about
ROOM = 64  # latent rows that follow before memory for more is taken
LEAST_TOKENS = 16  # shorter prefixes are computed faster than they are found
logger = logging.getLogger(__name__)


class _NotOurs(DamagedFile):
    """A file that is none of ours, of a later version, gone, or out of reach: to be left alone."""


class HasState(Protocol):
    """What a state is checked against: a model."""

    def state_shapes(self, position: int) -> dict[tuple[int, str], tuple[int, ...]]:
        """See `Model.state_shapes`."""
        ...


@dataclass(slots=True)
class Snapshot:
    """One file, as its header describes it."""

    path: Path
    key: str  # of model and tokens
    model: str  # the fingerprint of model, activations and spine
    position: int  # tokens computed
    num_bytes: int
    used_at: float  # seconds since the epoch

    @property
    def worth(self) -> float:
        """Rate it for keeping: what it saves, less for what was not used for long."""
        days = (time.time() - self.used_at) / 86_400
        return self.position / (1 + max(0.0, days))


class SnapshotStore:
    """A folder of states, used for one model by one thread; other processes may share it."""

    def __init__(self, folder: Path, fingerprint: str, reader: Reader, quota: int = QUOTA) -> None:
        """Look at what is there; a file that is no state of this version is set aside.

        Args:
            folder: Made when something is saved.
            fingerprint: Of the model and everything that changes its results.
            reader: Reads states; stays the caller's.
            quota: Bytes of all states in the folder.
        """
        self.folder, self.fingerprint, self._reader = folder, fingerprint, reader
        self._quota = quota
        self._known = {one.key: one for one in list_snapshots(folder) if one.model == fingerprint}
        self._is_full = False  # the disk: said once

    def find(self, tokens: Sequence[int]) -> Snapshot | None:
        """Give the longest state that `tokens` begin with, short of their end."""
        positions = sorted({one.position for one in self._known.values()}, reverse=True)
        for position in positions:
            if position < len(tokens):
                found = self._known.get(_key(self.fingerprint, tokens[:position]))
                if found is not None:
                    return found
        return None

    def load(
        self, snapshot: Snapshot, tokens: Sequence[int], model: Model, memory: MemoryPool
    ) -> SequenceState | None:
        """Read a state; None if it cannot be trusted, and then it is set aside.

        Args:
            snapshot: From `find`.
            tokens: What it must stand for.
            model: Says what parts a state has.
            memory: Of the state's parts.
        """
        try:
            state = read_state(snapshot.path, self.fingerprint, tokens, model, self._reader, memory)
        except (_NotOurs, ReadError) as error:
            self._known.pop(snapshot.key, None)
            logger.info("%s; computed anew", error)
            return None
        except FinbackError as error:
            self._known.pop(snapshot.key, None)
            set_aside(snapshot.path, str(error))
            return None
        snapshot.used_at = time.time()
        try:
            os.utime(snapshot.path)
        except OSError:
            logger.debug("%s: its time of use could not be noted", snapshot.path)
        return state

    def save(self, tokens: Sequence[int], state: SequenceState) -> Snapshot | None:
        """Keep a state of `tokens`; None where it is not worth it or there is no room.

        The state may be some tokens ahead if those are still held back from its matrices.
        A full disk or a folder that cannot be written is said once; the run goes on without.
        """
        key = _key(self.fingerprint, tokens)
        if len(tokens) < LEAST_TOKENS or key in self._known or self._is_full:
            return self._known.get(key)
        path = self.folder / f"{key}{SUFFIX}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            num_bytes = sum(_in_blocks(a.nbytes) for *_, a in _arrays_of(state, len(tokens)))
            if num_bytes + MAX_SLACK > self._quota:
                raise CapacityError(f"one state has {human_bytes(num_bytes)}, over the quota")
            self._make_room(num_bytes)
            size = write_state(path, self.fingerprint, tokens, state)
        except (OSError, FinbackError) as error:
            self._is_full = True
            reason = getattr(error, "strerror", None) or error
            logger.warning("%s: states cannot be kept any more (%s); going on", path, reason)
            return None
        self._known[key] = Snapshot(path, key, self.fingerprint, len(tokens), size, time.time())
        return self._known[key]

    def _make_room(self, num_bytes: int) -> None:
        there = list_snapshots(self.folder)
        for one in evicted(there, self._quota - num_bytes - MAX_SLACK):
            one.path.unlink(missing_ok=True)
            self._known.pop(one.key, None)
        require_room(self.folder, num_bytes + (64 << 20), "delete some with `finback cache prune`")


def evicted(there: Sequence[Snapshot], most: int) -> list[Snapshot]:
    """Choose which states go, the least worth first, so that the others take at most `most`."""
    left, gone = sum(one.num_bytes for one in there), []
    for one in sorted(there, key=lambda one: one.worth):
        if left <= most:
            break
        left -= one.num_bytes
        gone.append(one)
    return gone


def list_snapshots(folder: Path) -> list[Snapshot]:
    """Describe the states of a folder, of whatever models; what is none is set aside."""
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            header, start = _read_header(path)
            size = path.stat()
            if size.st_size != start + header["bytes"]:
                raise DamagedFile(f"{path}: {size.st_size} bytes, its header says otherwise")
            tokens = header["tokens"]
            model = str(header["model"])
            found.append(
                Snapshot(path, _key(model, tokens), model, len(tokens), size.st_size, size.st_mtime)
            )
        except (_NotOurs, OSError):
            continue
        except FinbackError as error:
            set_aside(path, str(error))
    return found


def set_aside(path: Path, reason: str) -> None:
    """Give a file that cannot be trusted another name, so that it is not tried again."""
    logger.warning("%s; it is set aside and computed anew", reason)
    try:
        path.replace(path.with_suffix(ASIDE))
    except OSError:
        logger.debug("%s: could not be set aside", path)


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
    header, start = _read_header(path)
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


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Read and check a header; gives it and where the arrays begin."""
    try:
        file = os.fdopen(open_file(path), "rb")
    except DamagedFile as error:
        raise _NotOurs(str(error)) from error
    with file:
        head = file.read(HEAD)
        if head[: len(MAGIC)] != MAGIC:
            told = f"{path}: is no state of this version of finback"
            is_older = head.startswith(MAGIC_START) and head < MAGIC
            raise DamagedFile(told) if is_older else _NotOurs(told)
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


def _key(fingerprint: str, tokens: Sequence[int]) -> str:
    digest = hashlib.sha256(fingerprint.encode())
    digest.update(np.asarray(tokens, np.int64).tobytes())
    return digest.hexdigest()[:40]


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
