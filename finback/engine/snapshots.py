"""States kept on disk: what was computed for a prefix once need not be computed again.

One file holds one state at one boundary (`engine/statefile.py`). What cannot be trusted is set
aside, never loaded and never tried again.
"""

import hashlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finback.checkpoint.files import require_room
from finback.engine.statefile import (
    NotOurs,
    bytes_of_arrays,
    read_header,
    read_state,
    write_state,
)
from finback.errors import CapacityError, DamagedFile, FinbackError, ReadError
from finback.models.base import Model
from finback.models.state import SequenceState
from finback.storage.arena import MemoryPool
from finback.storage.reader import Reader
from finback.units import human_bytes

SUFFIX, ASIDE = ".state", ".damaged"
QUOTA = 32 << 30
MAX_SLACK = 1 << 16  # of a file, besides its arrays, about
LEAST_TOKENS = 16  # shorter prefixes are computed faster than they are found
logger = logging.getLogger(__name__)


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
        except (NotOurs, ReadError) as error:
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
            num_bytes = bytes_of_arrays(state, len(tokens))
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
            header, start = read_header(path)
            size = path.stat()
            if size.st_size != start + header["bytes"]:
                raise DamagedFile(f"{path}: {size.st_size} bytes, its header says otherwise")
            tokens = header["tokens"]
            model = str(header["model"])
            found.append(
                Snapshot(path, _key(model, tokens), model, len(tokens), size.st_size, size.st_mtime)
            )
        except (NotOurs, OSError):
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


def _key(fingerprint: str, tokens: Sequence[int]) -> str:
    digest = hashlib.sha256(fingerprint.encode())
    digest.update(np.asarray(tokens, np.int64).tobytes())
    return digest.hexdigest()[:40]
