"""Small files of a checkpoint, read whole up to a limit, and only if they are files."""

import json
import os
import shutil
import stat
from pathlib import Path

from finback.errors import CapacityError, DamagedFile
from finback.units import human_bytes

MAX_JSON_BYTES = 1 << 30  # the index of Kimi K3 has 60 MB


def open_file(path: Path) -> int:
    """Open a regular file for reading and give its descriptor, owned by the caller.

    Raises:
        DamagedFile: It is missing, cannot be opened, or is a folder, a pipe or a device.
    """
    try:
        # Without waiting: a pipe in the place of a file must not hang the program.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError as error:
        link = " (a link to a file that is not there)" if path.is_symlink() else ""
        raise DamagedFile(f"{path}: missing{link}; is this a model folder?") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DamagedFile(f"{path}: cannot be opened ({reason})") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedFile(f"{path}: is no regular file")
    return descriptor


def read_file(path: Path, max_bytes: int) -> bytes:
    """Read a whole small file.

    Raises:
        DamagedFile: As `open_file`, or it is larger than `max_bytes`, or the device failed.
    """
    with os.fdopen(open_file(path), "rb") as file:
        try:
            raw = file.read(max_bytes + 1)
        except OSError as error:
            raise DamagedFile(f"{path}: cannot be read ({error.strerror})") from error
    if len(raw) > max_bytes:
        raise DamagedFile(f"{path}: more than {max_bytes} bytes, larger than any file of its kind")
    return raw


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object.

    Raises:
        DamagedFile: As `read_file`, or it is something else.
    """
    raw = read_file(path, MAX_JSON_BYTES)
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise DamagedFile(f"{path}: must hold a JSON object")
    return value


def read_json_if_there(path: Path) -> dict[str, object]:
    """Read a JSON object; a file that is not there is an empty one."""
    return read_json(path) if exists(path) or path.is_symlink() else {}


def exists(path: Path) -> bool:
    """Tell whether a path leads somewhere; an impossible name leads nowhere."""
    try:
        os.stat(path)
    except (OSError, ValueError):
        return False
    return True


def write_json(path: Path, value: object) -> None:
    """Write a small JSON file, whole or not at all; its folder is made if it is not there.

    Raises:
        OSError: The folder cannot be written, or the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def require_room(folder: Path, needed: int, advice: str) -> None:
    """Refuse to write what the disk has no room for; `advice` ends the sentence.

    Raises:
        CapacityError: Fewer than `needed` bytes are free.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CapacityError(
            f"{folder}: {human_bytes(needed)} are needed, {human_bytes(free)} are free; {advice}"
        )
