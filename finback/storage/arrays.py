"""Small files of named arrays, read without trust: nothing in them is ever run."""

import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from finback.checkpoint.files import open_file
from finback.errors import DamagedFile

MAX_FILE_BYTES = 1 << 31
MAX_ARRAY_BYTES = 1 << 31
UNREADABLE: tuple[type[Exception], ...] = (
    *(OSError, EOFError, ValueError, KeyError, TypeError, MemoryError),
    # What zipfile raises for broken archives, unknown compression and encrypted members.
    *(zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError),
)


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, npt.NDArray[np.generic]]:
    """Read arrays from an `.npz` file, in the order of `names`.

    Raises:
        DamagedFile: It is missing, cut, too large unpacked, or lacks one of them.
    """
    os.close(open_file(path))  # a file, and no pipe that would never end
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError("it is too large")
        with zipfile.ZipFile(path) as archive:
            if any(entry.file_size > MAX_ARRAY_BYTES for entry in archive.infolist()):
                raise ValueError("it is too large unpacked")
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in names}
    except UNREADABLE as error:
        raise DamagedFile(f"{path}: is no file of finback's ({error})") from error
    for name, array in found.items():
        if array.dtype.kind not in "iuf":
            raise DamagedFile(f"{path}: {name} does not hold numbers")
    return found
