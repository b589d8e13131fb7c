"""Which tensors a model needs, whether a checkpoint has them, and loading them on demand."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from finback.checkpoint.formats import (
    BAD_SCALE,
    FORMATS,
    PLAIN_FORMATS,
    Array,
    Bytes,
    Weight,
    has_bad_scale,
    unpack,
)
from finback.checkpoint.index import Checkpoint, compact_names
from finback.checkpoint.safetensors import TensorRef
from finback.errors import CheckpointError, DamagedFile, MissingTensor
from finback.kernels.ops import Ids, Ops
from finback.spans import Spans
from finback.storage.arena import reserve
from finback.storage.extents import ExpertLayout, Extent, Part, merge, place
from finback.storage.reader import Reader
from finback.storage.spine import Group, Spine

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
MAX_SHOWN = 20  # contradictions in one message
MAX_MISSING = 100_000  # beyond the names there are: then the config belongs to something else
PACKED_FORMATS = frozenset(name for name, fmt in FORMATS.items() if fmt.suffixes != ("",))


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
    as_values: bool = False  # a matrix that is used as plain numbers, see `Weights.values`

    @property
    def is_matrix(self) -> bool:
        """Tell whether it is multiplied with as it is stored."""
        return len(self.shape) == 2 and not self.as_values

    @property
    def group(self) -> str:
        """Name what is read together: one layer, or one end of the model."""
        found = re.search(r"\.layers\.([0-9]+)\.", self.name)
        return f"layer {found[1]}" if found else self.role


@dataclass(frozen=True, slots=True)
class Stored:
    """A spec as a checkpoint holds it."""

    spec: TensorSpec
    format: str
    num_bytes: int  # of all parts: from the headers, or by the spec where there are none yet

    @property
    def names(self) -> tuple[str, ...]:
        """Name the tensors that hold its parts."""
        return tuple(self.spec.name + suffix for suffix in FORMATS[self.format].suffixes)


@dataclass(slots=True)
class TensorCheck:
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
            more = len(self.wrong) - MAX_SHOWN
            shown = self.wrong[:MAX_SHOWN] + ([f"and {more} more"] if more > 0 else [])
            raise CheckpointError(f"{where}: does not fit its config.json: {'; '.join(shown)}")


def check_tensors(checkpoint: Checkpoint, specs: Iterable[TensorSpec]) -> TensorCheck:
    """Compare specs with names and, where the files are there, with dtypes and shapes."""
    headers = None if checkpoint.missing_files else checkpoint.tensors
    unclaimed = set(checkpoint.names)
    check = TensorCheck()
    for spec in specs:
        stored = _find(spec, checkpoint.names, headers)
        if stored is None:
            check.missing.append(spec.name)
            if len(check.missing) > len(checkpoint.names) + MAX_MISSING:
                raise CheckpointError(
                    f"{checkpoint.folder}: config.json describes over {len(check.missing)} tensors "
                    f"that are not there, the checkpoint names {len(checkpoint.names)}; "
                    "the config is damaged or belongs to another model"
                )
            continue
        check.stored.append(stored)
        unclaimed.difference_update(stored.names)
        if headers is not None:
            check.wrong += _contradictions(stored, headers)
    check.extra = sorted(unclaimed)
    return check


def _find(
    spec: TensorSpec, names: frozenset[str], headers: Mapping[str, TensorRef] | None
) -> Stored | None:
    """Tell how a checkpoint stores a tensor: by which names there are, and by their dtypes."""
    found = [name for name in FORMATS if _is_stored_as(name, spec, names, headers)]
    if not found and spec.name in names:
        found = ["f32"]  # of an impossible dtype, which is a contradiction to report
    if not found:
        return None
    if headers is None:  # no dtypes yet: the published one, or the first packed format of the names
        plain = PLAIN_FORMATS.get(spec.dtype, "f32")
        chosen = plain if plain in found else found[-1]
        return Stored(spec, chosen, FORMATS[chosen].num_bytes(spec.shape))
    parts = [spec.name + suffix for suffix in FORMATS[found[0]].suffixes]
    return Stored(spec, found[0], sum(headers[part].num_bytes for part in parts))


def _is_stored_as(
    name: str, spec: TensorSpec, names: frozenset[str], headers: Mapping[str, TensorRef] | None
) -> bool:
    fmt = FORMATS[name]
    for suffix in fmt.suffixes:  # a million times for a large model
        if spec.name + suffix not in names:
            return False
    if spec.role == "embedding" and name == "fp8":
        return False  # rows are looked up alone, and share their scales there
    if name in PACKED_FORMATS and len(spec.shape) != 2:
        return False
    if headers is None:
        return True
    pairs = zip(fmt.suffixes, fmt.dtypes, strict=True)
    return all(headers[spec.name + suffix].dtype == dtype for suffix, dtype in pairs)


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
    if spec.shape[1] % fmt.columns:
        yield (
            f"{spec.name} has {spec.shape[1]} columns, "
            f"{stored.format} needs a multiple of {fmt.columns}"
        )


def spine_groups(checkpoint: Checkpoint, check: TensorCheck) -> list[Group]:
    """Put the matrices that every token uses into groups, in the order a step uses them."""
    members: dict[str, list[TensorRef]] = {}
    for stored in check.stored:
        if stored.spec.expert is None and stored.spec.is_matrix:
            refs = [checkpoint.tensors[name] for name in stored.names]
            members.setdefault(stored.spec.group, []).extend(refs)
    layers = sorted((n for n in members if n.startswith("layer ")), key=lambda n: int(n[6:]))
    ends = [name for name in members if name not in layers]
    return [
        Group(name, sorted(members[name], key=lambda ref: (str(ref.path), ref.offset)))
        for name in [*layers, *ends]
    ]


class ExpertLayouts:
    """Tells where each expert of a checkpoint lies."""

    def __init__(self, checkpoint: Checkpoint, check: TensorCheck) -> None:
        """Lay out what the check found; nothing is read.

        All at once, because a step asks for them between reads, where every table that is walked
        through is out of the processor's cache. Experts that look the same share their matrices.
        """
        stored: dict[tuple[int, int], list[Stored]] = {}
        for one in check.stored:
            if one.spec.expert is not None:
                stored.setdefault(one.spec.expert, []).append(one)
        shared: dict[tuple[tuple[str, Part], ...], Mapping[str, Part]] = {}
        self._layouts: dict[tuple[int, int], ExpertLayout] = {}
        for key, parts in stored.items():
            extents, matrices = _lay_out(checkpoint.tensors, parts)
            self._layouts[key] = ExpertLayout(
                extents, shared.setdefault(tuple(matrices.items()), matrices)
            )

    @property
    def keys(self) -> list[tuple[int, int]]:
        """List all experts, by layer and number."""
        return list(self._layouts)

    def __call__(self, layer: int, expert: int) -> ExpertLayout:
        """Describe one; its matrices are named by the last part before `.weight`."""
        return self._layouts[layer, expert]


def _lay_out(
    tensors: Mapping[str, TensorRef], parts: Sequence[Stored]
) -> tuple[tuple[Extent, ...], dict[str, Part]]:
    """Give where an expert's bytes lie, and its matrices in them."""
    names = {one.spec.name: one.names for one in parts}
    refs = sorted(
        (tensors[name] for some in names.values() for name in some),
        key=lambda ref: (ref.path, ref.offset),
    )
    ends = list(itertools.accumulate(ref.num_bytes for ref in refs))
    ranges = {ref.name: (end - ref.num_bytes, end) for ref, end in zip(refs, ends, strict=True)}
    matrices = {}
    for one in parts:
        rows, columns = one.spec.shape
        matrices[one.spec.name.split(".")[-2]] = Part(
            one.format, (rows, columns), tuple(ranges[name] for name in names[one.spec.name])
        )
    return tuple(merge(refs)), matrices


class Weights:
    """Hands out the weights of one model: small ones as values, matrices as the spine has them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        check: TensorCheck,
        reader: Reader,
        ops: Ops,
        spine: Spine,
        spans: Spans,
        rows_from_disk: bool = False,
    ) -> None:
        """Index what the check found; nothing is read. `reader` stays the caller's.

        Args:
            spine: Has a group for every matrix, or none where the backend keeps its own form.
            spans: For whoever computes with the weights.
            rows_from_disk: Whether the embedding is looked up in the file.
        """
        self._refs, self._reader, self._ops = checkpoint.tensors, reader, ops
        self.spine, self.spans, self.rows_from_disk = spine, spans, rows_from_disk
        self._stored = {
            stored.spec.name: stored for stored in check.stored if stored.spec.expert is None
        }
        self._views: dict[str, Mapping[str, Bytes]] = {}
        self._matrices: list[tuple[Stored, Weight]] = []

    def matrix(self, name: str) -> Weight:
        """Give a matrix as it is stored; what it holds comes with `Spine.load` or a lease.

        On a backend that cannot multiply published bytes it is read now, in the backend's form.
        """
        if not self._ops.keeps_published_bytes:
            return self._ops.resident(self._read(name))
        stored = self._stored[name]
        group = stored.spec.group
        if group not in self._views:
            self._views[group] = self.spine.views(group)
        parts = tuple(self._views[group][part] for part in stored.names)
        weight = Weight(stored.format, stored.spec.shape, parts)
        self._matrices.append((stored, weight))
        return weight

    def check_matrices(self) -> None:
        """After the spine was loaded: refuse weights that stay and are no numbers.

        Raises:
            DamagedFile: Naming the tensor.
        """
        for stored, weight in self._matrices:
            if self.spine.stays(stored.spec.group):
                self._refuse_bad_scales(stored.names[-1], weight)

    def values(self, name: str) -> Array:
        """Read a tensor as float32 values of its published shape.

        Raises:
            DamagedFile: A value is no finite number.
        """
        values = unpack(self._read(name))
        if not np.isfinite(values).all():
            raise DamagedFile(f"{self._refs[name].path}: {name} holds values that are no numbers")
        return values

    def rows(self, name: str, ids: Ids) -> Weight:
        """Read some rows of a matrix from the file: ids (T,) -> a weight (T, D)."""
        stored = self._stored[name]
        parts = []
        for part in stored.names:
            ref = self._refs[part]
            row_bytes = ref.num_bytes // stored.spec.shape[0]
            extents = [
                Extent(ref.path, ref.offset + int(number) * row_bytes, row_bytes) for number in ids
            ]
            starts, size = place(extents)
            memory = reserve(size)
            self._reader.wait([self._reader.submit(extents, memory)])
            parts.append(np.concatenate([memory[start : start + row_bytes] for start in starts]))
        return Weight(stored.format, (len(ids), stored.spec.shape[1]), tuple(parts))

    def _read(self, name: str) -> Weight:
        stored = self._stored[name]
        parts = tuple(self._reader.read(merge([self._refs[part]])[0]) for part in stored.names)
        # A spec's `also` shapes hold the same values with other dimensions of one.
        shape = self._refs[name].shape if stored.format not in PACKED_FORMATS else stored.spec.shape
        weight = Weight(stored.format, shape, parts)
        self._refuse_bad_scales(stored.names[-1], weight)
        return weight

    def _refuse_bad_scales(self, name: str, weight: Weight) -> None:
        if has_bad_scale(weight):
            raise DamagedFile(
                f"{self._refs[name].path}: {name} {BAD_SCALE}; download the file again"
            )
