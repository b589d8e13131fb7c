"""Experts in memory: read when needed, kept while there is room, least recent given up first."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from finback.checkpoint.formats import MXFP4_BAD_SCALE, Weight, has_bad_scale
from finback.errors import DamagedFile
from finback.spans import Spans
from finback.storage.reader import Extent, Reader


@dataclass(frozen=True, slots=True)
class Part:
    """One matrix inside an expert's bytes: where each of its parts starts and ends."""

    format: str
    shape: tuple[int, int]
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Where one expert lies on disk, and the matrices in its bytes, by published name (`w1`)."""

    extents: tuple[Extent, ...]
    matrices: Mapping[str, Part]

    @property
    def num_bytes(self) -> int:
        """Count the bytes of all extents."""
        return sum(extent.num_bytes for extent in self.extents)


Matrices = Mapping[str, Weight]
Lease = Mapping[int, Matrices]


class ExpertCache:
    """Keeps recently used experts up to a number of bytes."""

    def __init__(
        self,
        layout: Callable[[int, int], ExpertLayout],
        reader: Reader,
        spans: Spans,
        max_bytes: int,
    ) -> None:
        """Start empty.

        Args:
            layout: Gives the layout of an expert from its layer and number.
            reader: Reads what is missing; stays the caller's.
            spans: Counts `expert_hits` and `expert_misses`.
            max_bytes: What is kept between leases; a lease itself may hold more.
        """
        self._layout, self._reader, self._spans, self.max_bytes = layout, reader, spans, max_bytes
        self._kept: OrderedDict[tuple[int, int], tuple[int, Matrices]] = OrderedDict()
        self.kept_bytes = 0

    @contextmanager
    def lease(self, layer: int, experts: Sequence[int]) -> Iterator[Lease]:
        """Bring experts of one layer into memory and hold them there.

        Args:
            layer: Counted from 0 over all layers, routed or not.
            experts: Numbers without repeats, in any order.

        Yields:
            The matrices of each expert by name, read-only, valid until the block ends.

        Raises:
            ReadError: A file ended early or the device failed.
            DamagedFile: The bytes cannot be weights.
        """
        try:
            yield {expert: self._matrices(layer, expert) for expert in experts}
        finally:
            self._shrink()

    def check(self) -> None:
        """Test the invariants: the count of kept bytes is right and within the limit."""
        assert self.kept_bytes == sum(size for size, _ in self._kept.values())
        assert self.kept_bytes <= self.max_bytes

    def _matrices(self, layer: int, expert: int) -> Matrices:
        key = (layer, expert)
        kept = self._kept.pop(key, None)
        if kept is None:
            self._spans.count("expert_misses", 1)
            kept = self._read(layer, expert)
            self.kept_bytes += kept[0]
        else:
            self._spans.count("expert_hits", 1)
        self._kept[key] = kept
        return kept[1]

    def _read(self, layer: int, expert: int) -> tuple[int, Matrices]:
        layout = self._layout(layer, expert)
        data = self._reader.read(layout.extents)
        data.flags.writeable = False
        matrices = {
            name: Weight(part.format, part.shape, tuple(data[a:b] for a, b in part.ranges))
            for name, part in layout.matrices.items()
        }
        for name, matrix in matrices.items():
            if has_bad_scale(matrix):
                raise DamagedFile(
                    f"{layout.extents[0].path}: expert {expert} of layer {layer}, "
                    f"{name}.weight_scale holds the byte {MXFP4_BAD_SCALE}, "
                    "which stands for no number; download the file again"
                )
        return len(data), matrices

    def _shrink(self) -> None:
        while self.kept_bytes > self.max_bytes:
            self.kept_bytes -= self._kept.popitem(last=False)[1][0]
