"""Checkpoints of random weights in the published layout, to measure a machine before a download.

The shapes are a config's own, or cut down from it. Values are of a trained model's size, so that
activations neither vanish nor overflow; what the model says is nonsense. A file depends on the
config, the seed and its number alone, so an interrupted run goes on where it stopped.
"""

import base64
import copy
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import log2, prod
from pathlib import Path
from typing import Any

import numpy as np

from finback.checkpoint.files import exists, read_json, require_room
from finback.checkpoint.formats import FORMATS, PLAIN_FORMATS, Bytes
from finback.checkpoint.index import INDEX
from finback.checkpoint.safetensors import ITEM_BYTES, make_header
from finback.errors import UsageError
from finback.models.base import read_layout_of
from finback.models.weights import TensorSpec

KNOWN = Path(__file__).resolve().parent.parent / "data" / "configs"
CHUNK_VALUES = 1 << 22
ENDS = 1 << 30  # what belongs to no layer lies in the last file
SPECIALS = 256  # ids after the vocabulary's ranks, as Kimi numbers them
DTYPE_OF_CONFIG = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
MEAN_CODE = 2.8  # root mean square of uniformly drawn MXFP4 codes


def known_configs() -> list[str]:
    """Name the configs that come with finback."""
    return sorted(path.stem for path in KNOWN.glob("*.json"))


def find_config(name: str) -> dict[str, Any]:
    """Read a config by the name of a known one, or from a file or a model folder.

    Raises:
        UsageError: There is no such config; the known ones are listed.
        DamagedFile: The file is no JSON object.
    """
    path = KNOWN / f"{name}.json"
    if name not in known_configs():
        path = Path(name).expanduser()
        path = path / "config.json" if path.is_dir() else path
        if not exists(path):
            known = ", ".join(known_configs())
            raise UsageError(f"{name}: no such config; give a config.json, a folder, or {known}")
    return read_json(path)


def cut_down(
    config: Mapping[str, Any],
    layers: int | None = None,
    hidden: int | None = None,
    experts: int | None = None,
    changes: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Give a smaller config of the same kind.

    Args:
        config: A whole config.json.
        layers: Keep so many of the first layers.
        hidden: The new width; heads, dense layers and query rank shrink in proportion, routed
            experts keep their shapes where they work on a latent.
        experts: Routed experts of a layer.
        changes: Other keys of the text model's section, set last.

    Raises:
        CheckpointError: No family runs the config, or a value of it is impossible.
        UsageError: The vocabulary would be too small for a tokenizer.
    """
    read_layout_of(config, "config.json: ")  # so that what is cut down is known to be sound
    out = copy.deepcopy(dict(config))
    text = out.get("text_config", out)
    if layers is not None:
        text["num_hidden_layers"] = layers
        for key in ("kda_layers", "full_attn_layers"):
            linear = text.get("linear_attn_config", {})
            if key in linear:
                linear[key] = [n for n in linear[key] if n <= layers]
    if hidden is not None:
        ratio = hidden / text["hidden_size"]
        text["hidden_size"] = hidden
        for section in (text, text.get("linear_attn_config", {})):
            for key in ("num_attention_heads", "num_key_value_heads", "num_heads"):
                if key in section:
                    section[key] = max(1, round(section[key] * ratio))
        for key in ("intermediate_size", "q_lora_rank"):
            if text.get(key):
                text[key] = max(32, round(text[key] * ratio / 32) * 32)
    if experts is not None:
        text["num_experts"] = experts
        text["num_experts_per_token"] = min(experts, text["num_experts_per_token"])
    text.update(changes or {})
    size = text["vocab_size"]
    if not isinstance(size, int) or size < 2 * SPECIALS:
        raise UsageError(f"vocab_size must be at least {2 * SPECIALS}, not {size!r}")
    for section in (out, text):  # ids of the tokenizer written beside the weights
        for key, at in (("bos_token_id", 0), ("eos_token_id", 2), ("pad_token_id", SPECIALS - 1)):
            if key in section:
                section[key] = size - SPECIALS + at
    return out


def synthesise(
    folder: Path,
    config: Mapping[str, Any],
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write a checkpoint of random weights with a tokenizer, and give its bytes.

    One file per layer, an expert's tensors side by side, as Kimi K3 is published. Files of an
    earlier, interrupted run with the same config and seed are kept; the index comes last.

    Args:
        folder: Made if it is not there.
        config: A whole config.json.
        seed: Other seeds give other weights.
        progress: Told the bytes written so far and in all.

    Raises:
        UsageError: The folder holds something else.
        CapacityError: The disk has no room.
        CheckpointError: No family runs this config, or a value of it is impossible.
    """
    tensors = [t for spec in read_layout_of(config, "").tensors() for t in _parts(spec, config)]
    files: dict[str, list[_Tensor]] = {}
    groups = itertools.groupby(sorted(tensors, key=lambda t: t.group), key=lambda t: t.group)
    members = [list(group) for _, group in groups]
    for number, group in enumerate(members, 1):
        files[f"model-{number:05d}-of-{len(members):05d}.safetensors"] = group
    _prepare(folder, config, seed)
    total = sum(_file_bytes(group) for group in files.values())
    there = {name for name, group in files.items() if _is_whole(folder / name, group)}
    needed = sum(_file_bytes(group) for name, group in files.items() if name not in there)
    require_room(folder, needed, "choose another disk or fewer --layers or --experts")
    done = 0
    for number, (name, group) in enumerate(files.items()):
        if name not in there:
            rng = np.random.default_rng([seed, number])
            _write(folder / name, group, rng, partial(_add_to, progress, done, total))
        done += _file_bytes(group)
        progress(done, total)
    _write_tokenizer(folder, config)
    weight_map = {tensor.name: name for name, group in files.items() for tensor in group}
    _write_json(
        folder / INDEX,
        {"metadata": {"total_size": sum(t.num_bytes for t in tensors)}, "weight_map": weight_map},
    )
    return total


def _add_to(progress: Callable[[int, int], None], before: int, total: int, count: int) -> None:
    progress(before + count, total)


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    spec: TensorSpec
    group: int  # which file

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def _parts(spec: TensorSpec, config: Mapping[str, Any]) -> Iterator[_Tensor]:
    """Give the tensors that hold a spec: packed for the experts of a quantised checkpoint."""
    text = config.get("text_config", config)
    quantised = text.get("quantization_config") or config.get("quantization_config") or {}
    quantised = quantised if isinstance(quantised, dict) else {}
    fmt = PLAIN_FORMATS[spec.dtype]
    if spec.expert is not None and "mxfp4" in str(quantised.get("format")):
        fmt = "mxfp4"
    elif spec.dtype == "BF16":
        fmt = PLAIN_FORMATS[DTYPE_OF_CONFIG.get(str(text.get("dtype")), "BF16")]
    group = ENDS
    if ".layers." in spec.name:
        group = int(spec.name.split(".layers.")[1].split(".")[0])
    form = FORMATS[fmt]
    for suffix, dtype, shape in zip(
        form.suffixes, form.dtypes, form.part_shapes(spec.shape), strict=True
    ):
        yield _Tensor(spec.name + suffix, dtype, shape, spec, group)


def _prepare(folder: Path, config: Mapping[str, Any], seed: int) -> None:
    """Make the folder, or see that it holds an earlier run of the same."""
    folder.mkdir(parents=True, exist_ok=True)
    note = {"finback_synth": {"seed": seed}}
    wanted = {**config, **note}
    if exists(folder / "config.json"):
        if read_json(folder / "config.json") != json.loads(json.dumps(wanted)):
            raise UsageError(f"{folder}: holds another model; choose an empty folder")
        return
    if any(folder.iterdir()):
        raise UsageError(f"{folder}: is not empty; choose another folder")
    _write_json(folder / "config.json", wanted)


def _write_json(path: Path, value: object) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1) + "\n")
    part.replace(path)


def _header(group: list[_Tensor]) -> bytes:
    return make_header((tensor.name, tensor.dtype, tensor.shape) for tensor in group)


def _file_bytes(group: list[_Tensor]) -> int:
    return len(_header(group)) + sum(tensor.num_bytes for tensor in group)


def _is_whole(path: Path, group: list[_Tensor]) -> bool:
    return path.is_file() and path.stat().st_size == _file_bytes(group)


def _write(
    path: Path, group: list[_Tensor], rng: np.random.Generator, progress: Callable[[int], None]
) -> None:
    part = path.with_name(path.name + ".part")
    done = 0
    with part.open("wb") as file:
        done += file.write(_header(group))
        for tensor in group:
            for data in _values(tensor, rng):
                done += file.write(data.data)
            progress(done)
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # the rest of the machine keeps its cached files
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    part.replace(path)


def _values(tensor: _Tensor, rng: np.random.Generator) -> Iterator[Bytes]:
    """Draw a tensor's bytes, a piece at a time: matrices keep the size of what they multiply."""
    spec, count = tensor.spec, prod(tensor.shape)
    columns = spec.shape[-1]
    for start in range(0, count, CHUNK_VALUES):
        size = min(CHUNK_VALUES, count - start)
        if tensor.name.endswith("_packed"):
            yield rng.integers(0, 256, size, np.uint8)
        elif tensor.name.endswith("_scale"):
            exponent = 127 - round(log2(MEAN_CODE * columns**0.5))
            yield rng.integers(exponent - 1, exponent + 1, size, np.uint8)
        elif tensor.dtype == "BF16" and len(spec.shape) > 1:
            yield _bf16_noise(rng, size, columns)
        else:
            yield _as_bytes(_small_values(spec, rng, size), tensor.dtype)


def _bf16_noise(rng: np.random.Generator, size: int, columns: int) -> Bytes:
    """Draw values of both signs and two neighbouring exponents: faster than normal ones."""
    bits = rng.integers(0, 1 << 16, size, np.uint16)
    exponent = 127 - round(log2(1.2 * columns**0.5))
    drawn = (np.uint16(exponent) - ((bits >> 8) & 1)) << 7
    return ((bits & np.uint16(0x807F)) | drawn).view(np.uint8)


def _small_values(spec: TensorSpec, rng: np.random.Generator, size: int) -> np.ndarray:
    """Draw what is no large matrix by what its name says it is."""
    name = spec.name
    if "norm" in name and len(spec.shape) == 1:
        return np.ones(size, np.float32)
    if name.endswith("A_log"):
        return np.log(rng.uniform(1, 4, size)).astype(np.float32)
    if name.endswith(("bias", "dt_bias")):
        return rng.normal(0, 0.01, size).astype(np.float32)
    columns = 4 if "conv" in name else spec.shape[-1]
    return rng.normal(0, columns**-0.5, size).astype(np.float32)


def _as_bytes(values: np.ndarray, dtype: str) -> Bytes:
    if dtype == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype({"F32": np.float32, "F16": np.float16}[dtype]).view(np.uint8)


def _write_tokenizer(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a vocabulary of single bytes, then pairs, then triples: enough to encode any text."""
    size = config.get("text_config", config)["vocab_size"]
    tokens = itertools.chain(
        bytes(t) for length in (1, 2, 3) for t in itertools.product(range(256), repeat=length)
    )
    ranks = [
        base64.b64encode(token).decode() + f" {rank}\n"
        for rank, token in enumerate(itertools.islice(tokens, size - SPECIALS))
    ]
    (folder / "tiktoken.model").write_text("".join(ranks))
    names = {0: "[BOS]", 2: "[EOS]", SPECIALS - 1: "[PAD]"}
    added = {str(size - SPECIALS + at): {"content": text} for at, text in names.items()}
    _write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": added})
