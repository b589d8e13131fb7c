"""Which tensors a model needs, whether a checkpoint has them, and loading them on demand."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from finback.checkpoint.formats import FORMATS, PLAIN_FORMATS, Array, Weight, unpack
from finback.checkpoint.index import Checkpoint, compact_names
from finback.checkpoint.safetensors import TensorRef
from finback.errors import CheckpointError, MissingTensor
from finback.kernels.ops import Ops
from finback.storage.cache import ExpertLayout, Part
from finback.storage.reader import Reader, merge

Role = Literal[
    "embedding",
    "head",
    "norm",
    "residual",
    "attention",
    "dense",
    "router",
    "latent",
    "shared expert",
    "expert",
]
PACKED_FORMATS = tuple(name for name, fmt in FORMATS.items() if fmt.suffixes != ("",))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor a model needs: its published name and shape, and what it is for.

    `dtype` is the published one, used for sizes where no header is at hand; any float dtype is
    accepted. `also` lists other accepted shapes. Matrices (two dimensions) may be stored packed.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    dtype: str = "BF16"
    also: tuple[tuple[int, ...], ...] = ()
    expert: tuple[int, int] | None = None  # layer and number


@dataclass(frozen=True, slots=True)
class Stored:
    """A spec as a checkpoint holds it."""

    spec: TensorSpec
    format: str

    @property
    def names(self) -> tuple[str, ...]:
        """Name the tensors that hold its parts."""
        return tuple(self.spec.name + suffix for suffix in FORMATS[self.format].suffixes)

    @property
    def num_bytes(self) -> int:
        """Count the bytes of all parts."""
        return FORMATS[self.format].num_bytes(self.spec.shape)


@dataclass(slots=True)
class Census:
    """A model's needs beside a checkpoint's names."""

    stored: list[Stored] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)

    def raise_if_broken(self, where: str) -> None:
        """Refuse a checkpoint that lacks or contradicts something.

        Raises:
            MissingTensor: Listing every missing tensor.
            CheckpointError: Listing every contradiction.
        """
        if self.missing:
            names = ", ".join(compact_names(self.missing))
            raise MissingTensor(
                f"{where}: {len(self.missing)} tensors of the model are missing: {names}"
            )
        if self.wrong:
            raise CheckpointError(f"{where}: does not fit its config.json: {'; '.join(self.wrong)}")


def take_census(checkpoint: Checkpoint, specs: Iterable[TensorSpec]) -> Census:
    """Compare specs with names and, where the files are there, with dtypes and shapes."""
    headers = None if checkpoint.missing_files else checkpoint.tensors
    unclaimed = set(checkpoint.names)
    census = Census()
    for spec in specs:
        stored = _find(spec, checkpoint.names, headers)
        if stored is None:
            census.missing.append(spec.name)
            continue
        census.stored.append(stored)
        unclaimed.difference_update(stored.names)
        if headers is not None:
            census.wrong += _contradictions(stored, headers)
    census.extra = sorted(unclaimed)
    return census


def _find(
    spec: TensorSpec, names: frozenset[str], headers: Mapping[str, TensorRef] | None
) -> Stored | None:
    if spec.name in names:
        dtype = headers[spec.name].dtype if headers is not None else spec.dtype
        return Stored(spec, PLAIN_FORMATS.get(dtype, "f32"))
    if len(spec.shape) == 2:
        for name in PACKED_FORMATS:
            if all(spec.name + suffix in names for suffix in FORMATS[name].suffixes):
                return Stored(spec, name)
    return None


def _contradictions(stored: Stored, headers: Mapping[str, TensorRef]) -> Iterator[str]:
    spec, fmt = stored.spec, FORMATS[stored.format]
    if stored.format not in PACKED_FORMATS:
        ref = headers[spec.name]
        if ref.dtype not in PLAIN_FORMATS:
            yield f"{spec.name} is {ref.dtype}, expected one of {', '.join(PLAIN_FORMATS)}"
        if ref.shape not in (spec.shape, *spec.also):
            yield f"{spec.name} has shape {list(ref.shape)}, the config says {list(spec.shape)}"
        return
    for name, dtype, shape in zip(
        stored.names, fmt.dtypes, fmt.part_shapes(spec.shape), strict=True
    ):
        ref = headers[name]
        if ref.dtype != dtype or ref.shape != shape:
            yield f"{name} is {ref.dtype}{list(ref.shape)}, the config says {dtype}{list(shape)}"


class Weights:
    """Loads the weights of one model from its checkpoint, each when it is asked for."""

    def __init__(self, checkpoint: Checkpoint, census: Census, reader: Reader, ops: Ops) -> None:
        """Index the census; nothing is read. `reader` stays the caller's."""
        self._refs, self._reader, self._ops = checkpoint.tensors, reader, ops
        self._stored = {
            stored.spec.name: stored for stored in census.stored if stored.spec.expert is None
        }
        self._experts: dict[tuple[int, int], list[Stored]] = {}
        for stored in census.stored:
            if stored.spec.expert is not None:
                self._experts.setdefault(stored.spec.expert, []).append(stored)

    def matrix(self, name: str) -> Weight:
        """Read a weight that stays in memory, in the backend's own form."""
        return self._ops.resident(self._read(name))

    def vector(self, name: str) -> Array:
        """Read a small tensor as float32 values of its published shape."""
        return unpack(self._read(name))

    def expert_layout(self, layer: int, expert: int) -> ExpertLayout:
        """Tell where an expert lies; its matrices are named by the last part before `.weight`."""
        stored = self._experts[layer, expert]
        refs = sorted(
            (self._refs[name] for one in stored for name in one.names),
            key=lambda ref: (ref.path, ref.offset),
        )
        starts: dict[str, int] = {}
        position = 0
        for ref in refs:
            starts[ref.name] = position
            position += ref.num_bytes
        matrices = {}
        for one in stored:
            spans = tuple((starts[n], starts[n] + self._refs[n].num_bytes) for n in one.names)
            rows, columns = one.spec.shape
            matrices[one.spec.name.split(".")[-2]] = Part(one.format, (rows, columns), spans)
        return ExpertLayout(tuple(merge(refs)), matrices)

    def _read(self, name: str) -> Weight:
        stored = self._stored[name]
        parts = tuple(self._reader.read(merge([self._refs[part]])) for part in stored.names)
        # A spec's `also` shapes hold the same values with other dimensions of one.
        shape = self._refs[name].shape if stored.format not in PACKED_FORMATS else stored.spec.shape
        return Weight(stored.format, shape, parts)


LayoutOf = Callable[[int, int], ExpertLayout]
