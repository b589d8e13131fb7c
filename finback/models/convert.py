"""A smaller form of what every token uses, beside the published files: row int8 or group-32 int4.

Not exact, so it is chosen by name. Experts stay as published. Kept as safetensors files, one for
each group of the spine, and a manifest that is written last: without it, or for other weights than
those it was made from, nothing is used. A run that was interrupted goes on where it stopped.

The router stays as published: it is small, and another choice of experts is no rounding error. So
does the embedding, whose rows are only looked up.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from finback.checkpoint.files import exists, read_json, require_room
from finback.checkpoint.formats import FORMATS, INT4_GROUP, Array, Bytes, Weight, unpack
from finback.checkpoint.index import Checkpoint
from finback.checkpoint.safetensors import ITEM_BYTES, TensorRef, make_header, read_header
from finback.errors import CheckpointError, DamagedFile, UsageError
from finback.models.base import read_layout
from finback.models.weights import Stored, check_tensors

SpineForm = Literal["int8", "int4"]
MANIFEST = "finback-spine.json"
FORMAT = 1
ROLES = frozenset({"attention", "dense", "shared expert", "latent", "head"})
SAMPLES, SAMPLE_BYTES = 4, 512  # of each matrix, to know the weights again
CHUNK_VALUES = 1 << 23  # of a matrix in memory at once
CONVERTED_FROM = frozenset({"bf16", "f16", "f32"})


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion gave."""

    folder: Path
    num_tensors: int
    before_bytes: int
    after_bytes: int


def default_folder(model: Path, form: SpineForm) -> Path:
    """Name the folder a converted spine lies in, inside the model's own."""
    return model / f"finback-spine-{form}"


def convert_spine(
    checkpoint: Checkpoint,
    form: SpineForm,
    folder: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Converted:
    """Convert the matrices that every token uses, a few megabytes at a time.

    Args:
        checkpoint: A whole checkpoint.
        form: `int8`: whole numbers under one float32 scale a row, half the bytes of bfloat16;
            `int4`: under one bfloat16 scale per 32, a little over a quarter.
        folder: Where to; `default_folder` if None.
        progress: Told the published bytes converted so far and in all.

    Raises:
        CheckpointError: The checkpoint is damaged or of an unsupported kind.
        UsageError: The folder holds something else.
        CapacityError: The disk has no room.
    """
    folder = default_folder(checkpoint.folder, form) if folder is None else folder
    groups = _groups(checkpoint, form)
    mark = fingerprint(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    _refuse_strangers(folder, groups)
    before = sum(one.num_bytes for group in groups.values() for one in group)
    sizes = {file: _file_bytes(group, form) for file, group in groups.items()}
    done_before = {name for name in groups if _is_of(folder / name, mark, sizes[name])}
    needed = sum(size for name, size in sizes.items() if name not in done_before)
    require_room(folder, needed, "choose another place with --out")
    done = 0
    for name, group in groups.items():
        if name not in done_before:
            _write(folder / name, group, form, mark, checkpoint)
        done += sum(one.num_bytes for one in group)
        progress(done, before)
    manifest = {"format": FORMAT, "spine": form, "source": mark, "files": sizes}
    part = folder / (MANIFEST + ".part")
    part.write_text(json.dumps(manifest, indent=1) + "\n")
    part.replace(folder / MANIFEST)
    return Converted(folder, sum(map(len, groups.values())), before, sum(sizes.values()))


def with_spine(checkpoint: Checkpoint, spine: str) -> Checkpoint:
    """Give a checkpoint whose spine is read from a converted form.

    Args:
        checkpoint: The published one.
        spine: `published`, `int8`, `int4`, or the folder a conversion wrote.

    Raises:
        CheckpointError: There is no such form yet, or it belongs to other weights.
        DamagedFile: A file of it is cut or missing.
    """
    if spine == "published":
        return checkpoint
    is_form = spine in get_args(SpineForm)
    folder = default_folder(checkpoint.folder, spine) if is_form else Path(spine)  # type: ignore[arg-type]
    if not exists(folder / MANIFEST):
        raise CheckpointError(
            f"{folder}: no converted spine; make it with "
            f"`finback convert {checkpoint.folder} --spine {spine if is_form else 'int8'}`"
        )
    manifest = read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT or not isinstance(manifest.get("files"), dict):
        raise CheckpointError(f"{folder / MANIFEST}: was written by another version of finback")
    if manifest.get("source") != fingerprint(checkpoint):
        raise CheckpointError(
            f"{folder}: was made from other weights than those in {checkpoint.folder}; "
            "convert them again"
        )
    files = manifest["files"]
    assert isinstance(files, dict)
    refs: dict[str, TensorRef] = {}
    for name, size in files.items():
        path = folder / str(name)
        if "/" in str(name) or not exists(path) or path.stat().st_size != size:
            raise DamagedFile(f"{path}: is missing or cut; convert the spine again")
        refs.update(read_header(path))
    form = manifest.get("spine")
    groups = _groups(checkpoint, form).values() if form in get_args(SpineForm) else ()  # type: ignore[arg-type]
    expected = {name for group in groups for name, _, _ in _entries(group, form)}  # type: ignore[arg-type]
    if not expected or set(refs) != expected:
        raise DamagedFile(f"{folder}: does not hold this model's spine; convert it again")
    return _Overlaid(checkpoint, refs)


class _Overlaid(Checkpoint):
    """A checkpoint some of whose tensors lie in other files."""

    def __init__(self, base: Checkpoint, refs: Mapping[str, TensorRef]) -> None:
        super().__init__(base.folder, base.config, base.weight_map, base.files, base.total_bytes)
        kept = {name: ref for name, ref in base.tensors.items() if name not in _sources(refs)}
        self.__dict__["tensors"] = {**kept, **refs}
        self.__dict__["names"] = frozenset(self.tensors)


def _sources(refs: Mapping[str, TensorRef]) -> set[str]:
    """Name the published tensors that converted ones stand for."""
    return {name.removesuffix("_packed").removesuffix("_scale") for name in refs}


def fingerprint(checkpoint: Checkpoint) -> str:
    """Give a mark of a checkpoint: config, names, shapes, and samples of every large matrix."""
    digest = hashlib.sha256(json.dumps(dict(checkpoint.config), sort_keys=True).encode())
    for name in sorted(checkpoint.tensors):
        ref = checkpoint.tensors[name]
        digest.update(f"{name} {ref.path.name} {ref.offset} {ref.dtype} {ref.shape}\n".encode())
    check = check_tensors(checkpoint, read_layout(checkpoint).tensors())
    names = [n for s in check.stored if s.spec.expert is None and s.spec.is_matrix for n in s.names]
    for name in sorted(names):
        ref = checkpoint.tensors[name]
        with ref.path.open("rb") as file:
            for part in range(SAMPLES):
                file.seek(ref.offset + max(0, ref.num_bytes - SAMPLE_BYTES) * part // (SAMPLES - 1))
                digest.update(file.read(min(SAMPLE_BYTES, ref.num_bytes)))
    return digest.hexdigest()


def _groups(checkpoint: Checkpoint, form: SpineForm) -> dict[str, list[Stored]]:
    """List what is converted, by the file it goes into."""
    check = check_tensors(checkpoint, read_layout(checkpoint).tensors())
    check.raise_if_broken(str(checkpoint.folder))
    groups: dict[str, list[Stored]] = {}
    for stored in check.stored:
        spec = stored.spec
        if spec.expert is None and spec.is_matrix and spec.role in ROLES:
            fits = spec.shape[1] % FORMATS[form].columns == 0
            if stored.format in CONVERTED_FROM and fits:
                name = f"{spec.group.replace(' ', '-')}.safetensors"
                groups.setdefault(name, []).append(stored)
    return groups


def _refuse_strangers(folder: Path, groups: Mapping[str, object]) -> None:
    known = {MANIFEST, MANIFEST + ".part", *groups, *(name + ".part" for name in groups)}
    strangers = sorted(path.name for path in folder.iterdir() if path.name not in known)
    if strangers:
        raise UsageError(f"{folder}: holds {strangers[0]}, which is none of ours; choose another")


def _entries(group: list[Stored], form: SpineForm) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    fmt = FORMATS[form]
    for stored in group:
        parts = zip(fmt.suffixes, fmt.dtypes, fmt.part_shapes(stored.spec.shape), strict=True)
        for suffix, dtype, shape in parts:
            yield stored.spec.name + suffix, dtype, shape


def _header(group: list[Stored], form: SpineForm, mark: str) -> bytes:
    return make_header(_entries(group, form), {"source": mark})


def _file_bytes(group: list[Stored], form: SpineForm) -> int:
    data = sum(prod(shape) * ITEM_BYTES[dtype] for _, dtype, shape in _entries(group, form))
    return len(_header(group, form, "0" * 64)) + data


def _is_of(path: Path, mark: str, size: int) -> bool:
    """Tell whether a file is whole and of this conversion: it has its name only once it is."""
    if not exists(path) or path.stat().st_size != size:
        return False
    with path.open("rb") as file:
        return mark.encode() in file.read(8 + 200)


def _write(
    path: Path, group: list[Stored], form: SpineForm, mark: str, checkpoint: Checkpoint
) -> None:
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(_header(group, form, mark))
        for stored in group:
            scales = []
            for values in _rows(stored, checkpoint):
                if not np.isfinite(values).all():
                    raise DamagedFile(f"{stored.spec.name} holds values that are no numbers")
                codes, scale = _int8(values) if form == "int8" else _int4(values)
                file.write(codes.data)
                scales.append(scale)
            for scale in scales:
                file.write(scale.data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _rows(stored: Stored, checkpoint: Checkpoint) -> Iterator[Array]:
    """Give a matrix a few rows at a time, as float32."""
    ref = checkpoint.tensors[stored.names[0]]
    rows, columns = stored.spec.shape
    step, row_bytes = max(1, CHUNK_VALUES // columns), ref.num_bytes // rows
    with ref.path.open("rb") as file:
        for first in range(0, rows, step):
            count = min(step, rows - first)
            file.seek(ref.offset + first * row_bytes)
            raw = np.frombuffer(file.read(count * row_bytes), np.uint8)
            if len(raw) != count * row_bytes:
                raise DamagedFile(f"{ref.path}: ended in {stored.spec.name}; it shrank in use")
            yield unpack(Weight(stored.format, (count, columns), (raw,)))


def _int8(values: Array) -> tuple[Bytes, Bytes]:
    """Round rows to whole numbers up to 127 under their largest size."""
    scale = np.abs(values).max(1) / np.float32(127)
    safe = np.where(scale > 0, scale, np.float32(1))
    codes = np.clip(np.rint(values / safe[:, None]), -127, 127).astype(np.int8)
    return codes.reshape(-1).view(np.uint8), scale.astype(np.float32).view(np.uint8)


def _int4(values: Array) -> tuple[Bytes, Bytes]:
    """Round groups of 32 to −8 … 7; the value of the largest size becomes −8, whatever its sign."""
    groups = values.reshape(len(values), -1, INT4_GROUP)
    at = np.abs(groups).argmax(-1, keepdims=True)
    scale = np.take_along_axis(groups, at, -1)[..., 0] / np.float32(-8)
    bits = scale.astype(np.float32).view(np.uint32)
    half = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # nearest bfloat16
    kept = (half.astype(np.uint32) << 16).view(np.float32)
    safe = np.where(kept != 0, kept, np.float32(1))
    codes = (np.clip(np.rint(groups / safe[..., None]), -8, 7) + 8).astype(np.uint8)
    flat = codes.reshape(len(values), -1)
    packed = (flat[:, ::2] | flat[:, 1::2] << 4).astype(np.uint8).reshape(-1)
    return packed, half.reshape(-1).view(np.uint8)
