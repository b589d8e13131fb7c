"""The native library, loaded through ctypes; the only caller of native/finback.h."""

import ctypes
from functools import cache
from pathlib import Path

import finback.kernels

ABI = 1
LIBRARY_NAMES = ("libfinback.so", "libfinback.dylib")


@cache
def library() -> ctypes.CDLL | None:
    """Load the library beside this module; None where it was not built or is of another version."""
    for folder in finback.kernels.__path__:
        for name in LIBRARY_NAMES:
            if (path := Path(folder) / name).exists():
                loaded = ctypes.CDLL(str(path))
                return loaded if loaded.finback_abi() == ABI else None
    return None


def compiler() -> str | None:
    """Name the compiler that built the library."""
    loaded = library()
    if loaded is None:
        return None
    loaded.finback_compiler.restype = ctypes.c_char_p
    text: bytes = loaded.finback_compiler()
    return text.decode()
