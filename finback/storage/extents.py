"""Where bytes lie in files, and where they come to lie in memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from finback.checkpoint.formats import Bytes
from finback.checkpoint.safetensors import TensorRef
from finback.storage.arena import BLOCK


@dataclass(frozen=True, slots=True)
class Extent:
    """A piece of a file."""

    path: Path
    offset: int
    num_bytes: int


def merge(refs: Iterable[TensorRef]) -> list[Extent]:
    """Join tensors that lie side by side into as few extents as possible, keeping their order."""
    out: list[Extent] = []
    path, start, end = None, 0, 0
    for ref in refs:
        if ref.offset != end or ref.path != path:
            if path is not None:
                out.append(Extent(path, start, end - start))
            path, start = ref.path, ref.offset
        end = ref.offset + ref.num_bytes
    if path is not None:
        out.append(Extent(path, start, end - start))
    return out


def place(extents: Sequence[Extent]) -> tuple[list[int], int]:
    """Lay extents out in memory, each grown outwards to whole blocks.

    Returns:
        Where each extent's first byte comes to lie, and the bytes needed in all.
    """
    starts, end = [], 0
    for extent in extents:
        before = extent.offset % BLOCK
        starts.append(end + before)
        end += -(-(before + extent.num_bytes) // BLOCK) * BLOCK
    return starts, end


@dataclass(frozen=True, slots=True)
class Part:
    """One matrix inside an expert's bytes: where each of its parts starts and ends."""

    format: str
    shape: tuple[int, int]
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Where one expert lies on disk, and the matrices in its bytes, by published name (`w1`).

    Ranges count the extents' bytes one after the other.
    """

    extents: tuple[Extent, ...]
    matrices: Mapping[str, Part]

    @property
    def num_bytes(self) -> int:
        """Count the bytes of all extents."""
        return sum(extent.num_bytes for extent in self.extents)


def find(
    memory: Bytes, extents: Sequence[Extent], starts: list[int], begin: int, end: int
) -> Bytes:
    """Find a range of the extents' bytes in memory; a range lies within one extent."""
    before = 0
    for extent, start in zip(extents, starts, strict=True):
        if before <= begin and end <= before + extent.num_bytes:
            part = memory[start + begin - before : start + end - before]
            part.flags.writeable = False
            return part
        before += extent.num_bytes
    raise AssertionError("a tensor lies in two extents")
