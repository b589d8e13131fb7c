"""All files of a checkpoint as one table: tensor name to where it lies."""

import gc
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from finback.checkpoint.files import exists, read_json
from finback.checkpoint.safetensors import TensorRef, read_header
from finback.errors import CheckpointError, DamagedFile, MissingTensor

INDEX = "model.safetensors.index.json"
MAX_LISTED = 200
MAX_SHARDS = 10_000
SHARD = re.compile(r"(.+)-([0-9]{1,9})-of-([0-9]{1,9})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """A model folder: its config, and which file should hold which tensor.

    Nothing but JSON is read until `tensors` is asked for; no weight is read at all.
    """

    folder: Path
    config: Mapping[str, object]
    weight_map: Mapping[str, str] | None  # tensor name to file name; None without an index
    files: tuple[str, ...]
    total_bytes: int | None  # as the index claims

    @cached_property
    def tensors(self) -> Mapping[str, TensorRef]:
        """Read every header and give the tensors by name.

        Raises:
            MissingTensor: Files named by the index are not there; every tensor they hold is listed.
            DamagedFile: A header is wrong, or two files hold one tensor.
        """
        if missing := self.missing_files:
            names = [n for n, file in (self.weight_map or {}).items() if file in missing]
            holding = (
                f", with {len(names)} tensors: {', '.join(compact_names(names))}" if names else ""
            )
            raise MissingTensor(
                f"{self.folder}: {len(missing)} of {len(self.files)} files are missing "
                f"({', '.join(_some(sorted(missing)))}){holding}. Finish the download."
            )
        tensors: dict[str, TensorRef] = {}
        paths = {file: self.folder / file for file in self.files}
        with collection_paused():
            for file, path in paths.items():
                for name, ref in read_header(path).items():
                    if name in tensors:
                        raise DamagedFile(
                            f"{self.folder}: tensor {name} is in two files, "
                            f"{tensors[name].path.name} and {file}"
                        )
                    tensors[name] = ref
            self._check_against_index(tensors, paths)
        return tensors

    @cached_property
    def names(self) -> frozenset[str]:
        """Name every tensor: from the index alone where there is one, else from the headers."""
        return frozenset(self.weight_map if self.weight_map is not None else self.tensors)

    @cached_property
    def missing_files(self) -> frozenset[str]:
        """Name the files that are not there (a link to nowhere counts as not there)."""
        return frozenset(file for file in self.files if not exists(self.folder / file))

    def _check_against_index(
        self, tensors: Mapping[str, TensorRef], paths: Mapping[str, Path]
    ) -> None:
        if self.weight_map is None:
            return
        absent = [
            name
            for name, file in self.weight_map.items()
            if name not in tensors or tensors[name].path is not paths[file]
        ]
        if absent:
            raise MissingTensor(
                f"{self.folder / INDEX}: {len(absent)} tensors are not in the file it names: "
                f"{', '.join(compact_names(absent))}"
            )


@contextmanager
def collection_paused() -> Iterator[None]:
    """Make many objects that stay without Python looking through all of them again and again.

    Half of the time it takes to read the headers of half a million tensors went there.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a model folder: `config.json`, then an index, a single file, or numbered shards.

    Raises:
        CheckpointError: It is no model folder, or its JSON files contradict themselves.
    """
    if not exists(folder) or not folder.is_dir():
        what = "is a file, not a folder" if exists(folder) else "does not exist"
        raise CheckpointError(f"{folder}: {what}; give the folder that holds config.json")
    config = read_json(folder / "config.json")
    if exists(folder / INDEX) or (folder / INDEX).is_symlink():
        return _from_index(folder, config)
    if exists(folder / "model.safetensors"):
        return Checkpoint(folder, config, None, ("model.safetensors",), None)
    return Checkpoint(folder, config, None, _shards_without_index(folder), None)


def _from_index(folder: Path, config: Mapping[str, object]) -> Checkpoint:
    path = folder / INDEX
    index = read_json(path)
    weight_map, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedFile(f"{path}: weight_map must be an object that names tensors")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_inside(file):
            raise DamagedFile(
                f"{path}: tensor {name} is said to be in {file!r}, which is no file of this folder"
            )
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(total, int) or isinstance(total, bool) or not 0 <= total < 2**63:
        total = None
    files = tuple(dict.fromkeys(weight_map.values()))
    return Checkpoint(folder, config, weight_map, files, total)


def _is_inside(file: str) -> bool:
    """Tell whether a name from an index stays in its folder and ends as it should."""
    parts = PurePosixPath(file).parts
    return (
        file.endswith(".safetensors")
        and bool(parts)
        and not any(c in file for c in "\\:\0")
        and not file.startswith("/")
        and ".." not in parts
    )


def _shards_without_index(folder: Path) -> tuple[str, ...]:
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    shards = [match for name in names if (match := SHARD.fullmatch(name))]
    if not shards:
        if len(names) == 1:
            return (names[0],)
        found = "several and no index" if names else "none"
        raise CheckpointError(
            f"{folder}: expected one .safetensors file, numbered shards or {INDEX}; found {found}"
        )
    stem, _, count = shards[0].groups()
    if int(count) > MAX_SHARDS:
        raise DamagedFile(f"{folder / shards[0].string}: {count} shards is not a plausible number")
    digits = len(shards[0].group(2))
    return tuple(f"{stem}-{n:0{digits}d}-of-{count}.safetensors" for n in range(1, int(count) + 1))


def compact_names(names: Iterable[str]) -> list[str]:
    """List every name, with runs of layer and expert numbers folded.

    `layers.[1-8].experts.[0-15].w1.weight` stands for 128 names. No more than 200 such entries
    are given; the rest is counted.
    """
    folded: Iterable[str] = names
    for word in ("experts", "layers"):
        folded = _fold(folded, re.compile(rf"(.*\b{word}\.)(0|[1-9][0-9]{{0,8}})(\..*)"))
    return _some(sorted(folded))


def _some(names: list[str]) -> list[str]:
    more = len(names) - MAX_LISTED
    return [*names[:MAX_LISTED], f"and {more} more"] if more > 0 else names


def _fold(names: Iterable[str], pattern: re.Pattern[str]) -> list[str]:
    groups: dict[tuple[str, str], list[int]] = {}
    out: list[str] = []
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            out.append(name)
        else:
            groups.setdefault((match[1], match[3]), []).append(int(match[2]))
    for (before, after), numbers in groups.items():
        ranges = _ranges(sorted(numbers))
        one = len(ranges) == 1 and "-" not in ranges[0]
        out.append(f"{before}{ranges[0] if one else '[' + ','.join(ranges) + ']'}{after}")
    return out


def _ranges(numbers: list[int]) -> list[str]:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return [str(a) if a == b else f"{a}-{b}" for a, b in runs]
