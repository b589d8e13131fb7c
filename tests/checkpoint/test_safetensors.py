"""A header is believed only after everything in it was checked."""

import contextlib
import json
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from finback.checkpoint.safetensors import read_header
from finback.errors import DamagedFile
from tests.conftest import write_safetensors


def entry(
    dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)
) -> dict[str, object]:
    def plain(value: object) -> object:
        return list(value) if isinstance(value, tuple) else value

    return {"dtype": dtype, "shape": plain(shape), "data_offsets": plain(offsets)}


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros((0, 4), np.uint8)}
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    refs = read_header(tmp_path / "x.safetensors")
    raw = (tmp_path / "x.safetensors").read_bytes()
    assert {name: ref.shape for name, ref in refs.items()} == {"a": (2, 3), "b": (0, 4)}
    ref = refs["a"]
    assert raw[ref.offset : ref.offset + ref.num_bytes] == arrays["a"].tobytes()


@pytest.mark.parametrize(
    ("header", "data", "length", "says"),
    [
        (b"", b"", 10**15, "claims 1000000000000000 bytes"),
        (b"{}", b"", 3, "claims 3 bytes"),
        (b"{", b"", None, "not valid JSON"),
        (b"[" * 200_000, b"", None, "not valid JSON"),
        (b'{"a": 1, "a": 2}', b"", None, "twice"),
        (b"\xff{}", b"", None, "not valid JSON"),
        (b"[]", b"", None, "must be a JSON object"),
        ({"a": 3}, b"", None, "unknown dtype None"),
        ({"a": entry(dtype="Q9")}, b"\0" * 8, None, "unknown dtype 'Q9'"),
        ({"a": entry(shape=(-1,))}, b"\0" * 8, None, "impossible shape"),
        ({"a": entry(shape=(True, 2))}, b"\0" * 8, None, "impossible shape"),
        ({"a": entry(shape=(1,) * 9 + (2,))}, b"\0" * 8, None, "impossible shape"),
        ({"a": entry(shape=(2.0,))}, b"\0" * 8, None, "impossible shape"),
        ({"a": entry(shape=(10**30,))}, b"\0" * 8, None, "impossible shape"),
        ({"a": entry(shape=(2**62, 2**62))}, b"\0" * 8, None, "needs"),
        ({"a": entry(offsets=(8, 0))}, b"\0" * 8, None, "impossible data_offsets"),
        ({"a": entry(offsets=(0, 4))}, b"\0" * 8, None, "needs 8 bytes, its data_offsets give 4"),
        ({"a": entry(), "b": entry()}, b"\0" * 8, None, "overlaps"),
        ({"a": entry(), "b": entry(offsets=(12, 20))}, b"\0" * 20, None, "leaves a gap"),
        ({"a": entry()}, b"\0" * 7, None, "cut short: its header describes"),
        ({"a": entry()}, b"\0" * 9, None, "too long"),
    ],
)
def test_each_fault_is_named(
    tmp_path: Path, header: object, data: bytes, length: int | None, says: str
) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", header, data, length=length)
    with pytest.raises(DamagedFile, match=says) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_file_too_short_for_a_header(tmp_path: Path, size: int) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"\0" * size)
    with pytest.raises(DamagedFile, match=f"only {size} bytes"):
        read_header(tmp_path / "x.safetensors")


def test_a_huge_claim_allocates_nothing(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", b"{}", length=2**40)
    big = write_safetensors(
        tmp_path / "y.safetensors", {"a": entry(shape=(2**40,), offsets=(0, 2**42))}
    )
    tracemalloc.start()
    for file in (path, big):
        with pytest.raises(DamagedFile):
            read_header(file)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_or_read_never_worse(raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        path.write_bytes(raw)
        with contextlib.suppress(DamagedFile):
            read_header(path)


@given(st.data())
def test_a_changed_header_is_refused_or_consistent(data: st.DataObject) -> None:
    table = {"a": entry(), "b": entry(shape=(1, 2), offsets=(8, 16)), "__metadata__": {"k": "v"}}
    text = bytearray(json.dumps(table).encode())
    at = data.draw(st.integers(0, len(text) - 1))
    text[at] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = write_safetensors(Path(folder) / "x.safetensors", bytes(text), b"\0" * 16)
        try:
            refs = read_header(path)
        except DamagedFile:
            return
        assert sum(ref.num_bytes for ref in refs.values()) == 16
