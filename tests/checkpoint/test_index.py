"""Many ways to lay out a checkpoint, one table."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from finback.checkpoint.index import INDEX, compact_names, open_checkpoint
from finback.errors import CheckpointError, DamagedFile
from tests.conftest import DATA, edit_json
from tests.helpers import load


def arrays_of(folder: Path) -> dict[str, np.ndarray]:
    """Read a checkpoint's bytes with NumPy alone (bf16 as raw 16-bit)."""
    out = {}
    for ref in open_checkpoint(folder).tensors.values():
        raw = ref.path.read_bytes()[ref.offset : ref.offset + ref.num_bytes]
        out[ref.name] = np.frombuffer(raw, np.uint8)
    return out


def test_shards_without_an_index_are_the_same_checkpoint(broken: Path) -> None:
    before = arrays_of(broken)
    (broken / INDEX).unlink()
    after = arrays_of(broken)
    assert before.keys() == after.keys()
    assert all((before[n] == after[n]).all() for n in before)


def test_a_single_file_is_enough(tmp_path: Path) -> None:
    save_file({"w": np.ones((2, 2), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert open_checkpoint(tmp_path).names == {"w"}


def test_the_layout_of_the_hugging_face_cache(broken: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(broken.iterdir())):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    assert open_checkpoint(snapshot).tensors.keys() == open_checkpoint(broken).tensors.keys()
    load(snapshot)


def test_opening_reads_no_header_and_no_weight(broken: Path) -> None:
    for path in broken.glob("*.safetensors"):
        path.write_bytes(b"")
    assert len(open_checkpoint(broken).names) > 1000


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors",
        "/etc/x.safetensors",
        "a/../../x.safetensors",
        "..\\x.safetensors",
        "x",
        "",
        7,
        None,
    ],
)
def test_no_path_leads_out_of_the_folder(broken: Path, file: object) -> None:
    index = json.loads((broken / INDEX).read_text())
    index["weight_map"]["evil"] = file
    (broken / INDEX).write_text(json.dumps(index))
    with pytest.raises(DamagedFile, match="no file of this folder"):
        open_checkpoint(broken)


def test_a_folder_without_weights_or_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="config.json: missing"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="found none"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="is a file"):
        open_checkpoint(tmp_path / "config.json")


def test_a_missing_shard_lists_every_tensor_of_it(broken: Path) -> None:
    shard = "model-00003-of-000011.safetensors"
    names = set(load_names(broken / shard))
    (broken / shard).unlink()
    with pytest.raises(CheckpointError) as caught:
        _ = open_checkpoint(broken).tensors
    text = str(caught.value)
    assert f"with {len(names)} tensors" in text
    for name in names - {n for n in names if ".experts." in n}:
        assert name in text
    assert "experts.[0-15].w1.weight_packed" in text


def load_names(path: Path) -> list[str]:
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    return [name for name in header if name != "__metadata__"]


def test_expert_numbers_are_folded_without_losing_any() -> None:
    names = [f"a.experts.{n}.w1.weight" for n in (0, 1, 2, 5, 7, 8)] + ["norm"]
    assert compact_names(names) == ["a.experts.[0-2,5,7-8].w1.weight", "norm"]


def test_a_tied_head_needs_no_lm_head(broken: Path) -> None:
    untied = load(broken)
    index = json.loads((broken / INDEX).read_text())
    name = "language_model.lm_head.weight"
    shard = broken / index["weight_map"].pop(name)
    (broken / INDEX).write_text(json.dumps(index))
    arrays = {k: v for k, v in load_bf16(shard).items() if k != name}
    save_raw(shard, arrays)
    with pytest.raises(CheckpointError, match="lm_head.weight"):
        load(broken)
    edit_json(broken / "config.json", text_config__tie_word_embeddings=True)
    assert load(broken).shape == untied.shape


def load_bf16(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    return {
        n: (e["dtype"], e["shape"], data[e["data_offsets"][0] : e["data_offsets"][1]])
        for n, e in header.items()
        if n != "__metadata__"
    }


def save_raw(path: Path, arrays: dict[str, tuple[str, list[int], bytes]]) -> None:
    header, data = {}, b""
    for name, (dtype, shape, raw) in arrays.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_reference_files_beside_a_checkpoint_are_ignored() -> None:
    assert "logits_f64" in load_file(DATA / "tiny-k3" / "reference.safetensors")
    assert "logits_f64" not in open_checkpoint(DATA / "tiny-k3").tensors
