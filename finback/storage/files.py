"""Open files of a checkpoint, few at a time, read past the page cache where that is possible."""

import errno
import os
import sys
from collections import OrderedDict
from pathlib import Path
from threading import Lock

from finback.errors import ReadError

MOST_OPEN = 32  # below any usual descriptor limit, however many shards there are
DROPPED_FROM = 256 << 10  # bytes of a read through the page cache
F_NOCACHE = 48  # macOS
DIRECT_REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


class OpenFile:
    """A descriptor, whether it reads directly, and how many reads use it now."""

    def __init__(self, path: Path, direct: bool) -> None:
        """Open a file, directly if that is asked for and the file system can."""
        self.path, self.users, self.is_direct = path, 0, False
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
        o_direct = getattr(os, "O_DIRECT", 0)
        if direct and o_direct:
            try:
                self.descriptor = os.open(path, flags | o_direct)
                self.is_direct = True
                return
            except OSError as error:
                if error.errno not in DIRECT_REFUSED:
                    raise
        self.descriptor = os.open(path, flags)
        if direct and sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(self.descriptor, F_NOCACHE, 1)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)

    def read(self, view: memoryview, offset: int) -> int:
        """Fill the start of `view` from `offset`; give the count, 0 at the end of the file."""
        count = os.preadv(self.descriptor, [view], offset)
        if not self.is_direct and count >= DROPPED_FROM and hasattr(os, "posix_fadvise"):
            # What went through the page cache leaves it again.
            os.posix_fadvise(self.descriptor, offset, count, os.POSIX_FADV_DONTNEED)
        return count


class Files:
    """Opens files when they are needed and closes those not used for longest."""

    def __init__(self, direct: bool = True) -> None:
        """Open nothing yet."""
        self._direct, self._lock = direct, Lock()
        self._open: OrderedDict[tuple[Path, bool], OpenFile] = OrderedDict()
        self._is_closed = False

    def acquire(self, path: Path, direct: bool = True) -> OpenFile:
        """Hold a file open for a read, until it is released.

        Raises:
            ReadError: The model has been closed.
            OSError: The file cannot be opened.
        """
        key = (path, direct and self._direct)
        with self._lock:
            if self._is_closed:
                raise ReadError(f"{path}: the model has been closed")
            file = self._open.pop(key, None)
            if file is None:
                self._close_unused(MOST_OPEN - 1)
                file = OpenFile(*key)
            self._open[key] = file
            file.users += 1
            return file

    def release(self, file: OpenFile) -> None:
        """Let go of a file."""
        with self._lock:
            file.users -= 1
            if self._is_closed:
                self._close_unused(0)

    def forget(self, path: Path) -> None:
        """Close a file that may be replaced or deleted, unless it is being read."""
        with self._lock:
            for key in [key for key in self._open if key[0] == path]:
                if self._open[key].users == 0:
                    self._open.pop(key).close()

    def close(self) -> None:
        """Close every file; those in use are closed when their reads end."""
        with self._lock:
            self._is_closed = True
            self._close_unused(0)

    def _close_unused(self, most: int) -> None:
        for key in [key for key, file in self._open.items() if file.users == 0]:
            if len(self._open) <= most:
                return
            self._open.pop(key).close()
