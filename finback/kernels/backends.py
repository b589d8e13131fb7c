"""Which backend a model runs on."""

import logging

from finback.config import DEFAULT_ACTIVATIONS, Activations
from finback.kernels.cpu import Cpu
from finback.kernels.library import describe, library
from finback.kernels.ops import Ops
from finback.kernels.reference import Reference

logger = logging.getLogger(__name__)


def best_backend(threads: int | None = None, activations: Activations = DEFAULT_ACTIVATIONS) -> Ops:
    """Take the native library where it was built, else NumPy, and say so."""
    if library() is None:
        logger.warning(
            "the native library is %s, so finback computes with NumPy, many times slower; "
            "reinstall finback where there is a C compiler",
            describe(),
        )
        return Reference(activations)
    return Cpu(threads, activations=activations)
