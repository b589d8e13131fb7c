"""The native library: finding and loading it, its structures, instruction sets and threads.

Python's half of native/finback.h. `cpu.py` calls the kernels.
"""

import ctypes
import os
from ctypes import Structure, byref, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

import finback.kernels
from finback.errors import UsageError

ABI = 9
ISAS = ("base", "avx2", "avx512", "neon")
LIBRARY_NAMES = ("libfinback.so", "libfinback.dylib")
FORMAT_NUMBERS = {"f32": 0, "bf16": 1, "f16": 2, "mxfp4": 3, "int8": 4, "int4": 5, "fp8": 6}
ACTIVATION_NUMBERS = {"silu": 0, "situ": 1, "bounded situ": 2}


class WeightStruct(Structure):
    """finback_weight"""

    _fields_ = [
        ("format", c_int32),
        ("rows", c_int64),
        ("cols", c_int64),
        ("data", c_void_p),
        ("scale", c_void_p),
    ]


class ActivationStruct(Structure):
    """finback_activation"""

    _fields_ = [("kind", c_int32), ("beta", c_float), ("linear", c_float)]


class DeltaStruct(Structure):
    """finback_delta"""

    _fields_ = [
        *((name, c_int64) for name in ("tokens", "heads", "width", "taps")),
        *((name, c_void_p) for name in ("q", "k", "v", "decay", "beta", "gate")),
    ]


class DeltaWeightsStruct(Structure):
    """finback_delta_weights"""

    _fields_ = [
        *((name, c_void_p) for name in ("taps", "dt_bias", "a_log", "norm")),
        ("bound", c_float),
        ("eps", c_float),
    ]


class LatentStruct(Structure):
    """finback_latent"""

    _fields_ = [
        *(
            (name, c_int64)
            for name in ("tokens", "seen", "heads", "nope", "extra", "rank", "value")
        ),
        ("scale", c_float),
    ]


class RouterStruct(Structure):
    """finback_router"""

    _fields_ = [
        *((name, c_int64) for name in ("experts", "top_k", "groups", "top_groups")),
        ("is_sigmoid", c_int32),
        ("renormalise", c_int32),
        ("scale", c_float),
    ]


_ARGUMENTS = {
    "linears": (c_void_p, c_int64, c_void_p, c_int64, c_int32, c_void_p),
    "mlp": (c_void_p, c_int64, c_void_p, c_void_p, c_int32, c_void_p),
    "experts": (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p)
    + (c_int32, c_void_p),
    "add_experts": (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64)
    + (c_void_p, c_int32, c_void_p),
    "combine": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "rms_norm": (c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p),
    "mix": (c_void_p, c_int64, c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p),
    "gated": (c_void_p, c_void_p, c_int64, c_int64, c_void_p),
    "delta_attention": (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p),
    "latent_attention": (c_void_p,) * 6,
    "shares": (c_void_p, c_int64, c_float, c_float, c_void_p, c_void_p),
    "likeliest": (c_void_p, c_int64, c_int64, c_void_p),
    "read_memory": (c_void_p, c_int64, c_void_p),
    "route": (c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p),
}


@cache
def library() -> ctypes.CDLL | None:
    """Load the library beside this module; None where it was not built or is of another version."""
    for folder in finback.kernels.__path__:
        for name in LIBRARY_NAMES:
            if (path := Path(folder) / name).exists():
                loaded = ctypes.CDLL(str(path))
                if loaded.finback_abi() != ABI:
                    return None
                for kernel, arguments in _ARGUMENTS.items():
                    function = getattr(loaded, f"finback_{kernel}")
                    function.argtypes, function.restype = arguments, None
                loaded.finback_compiler.restype = loaded.finback_isa.restype = c_char_p
                loaded.finback_set_isa.argtypes = [c_char_p]
                return loaded
    return None


def describe() -> str:
    """Say which native library there is, for people."""
    loaded = library()
    if loaded is None:
        return "of another version than this package" if _is_there() else "not built"
    isa, compiler = (bytes(f()).decode() for f in (loaded.finback_isa, loaded.finback_compiler))
    return f"{isa}, built with compiler {compiler}"


def _is_there() -> bool:
    folders = [Path(folder) for folder in finback.kernels.__path__]
    return any((folder / name).exists() for folder in folders for name in LIBRARY_NAMES)


@cache
def instruction_sets() -> tuple[str, ...]:
    """Name the instruction sets that this build and this machine have, none without a library."""
    loaded = library()
    if loaded is None:
        return ()
    best = loaded.finback_isa()
    found = [name for name in ISAS if loaded.finback_set_isa(name.encode())]
    loaded.finback_set_isa(best)
    return tuple(found)


def read_memory(data: npt.NDArray[np.uint8]) -> None:
    """Read an array once with all threads, to measure how fast that goes.

    Raises:
        UsageError: There is no library.
    """
    loaded = library()
    if loaded is None:
        raise UsageError("the native library was not built; install a C compiler and reinstall")
    loaded.finback_read_memory(data.ctypes.data, data.nbytes, byref(c_float()))


def available_threads() -> int:
    """Count the cores this process may use: by its affinity and its cgroup's quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no cgroup v2: the affinity is all there is to know
    return cores
