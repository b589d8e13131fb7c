"""Converted spines: how near they come, what they keep, and that no half file is ever used."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from finback import LLM
from finback.checkpoint.formats import Weight, unpack
from finback.checkpoint.index import open_checkpoint
from finback.errors import CheckpointError, DamagedFile, UsageError
from finback.hub.local import STORYTELLER
from finback.kernels.library import instruction_sets
from finback.models import convert
from finback.models.convert import MANIFEST, convert_spine, with_spine
from tests.conftest import DATA

TEXT = list(range(3, 40))
STORY = "Once upon a time there was a little fox who lived at the edge of a wood. Every morning she"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(
        DATA / "tiny-k3", folder, ignore=shutil.ignore_patterns("*reference*", "indep*")
    )
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("form", "limit"), [("int8", 0.008), ("int4", 0.09)])
def test_values_come_near(form: convert.SpineForm, limit: float) -> None:
    values = np.random.default_rng(2).standard_normal((40, 96)).astype(np.float32)
    values[3], values[5] = 0, 1e-43  # and a row of subnormals
    values[4, :32] = 0
    codes, scale = (convert._int8 if form == "int8" else convert._int4)(values)
    back = unpack(Weight(form, values.shape, (codes, scale)))
    assert np.sqrt(np.square(back - values).mean()) < limit
    assert (back[3] == 0).all()
    assert (back[4, :32] == 0).all()


@pytest.mark.parametrize(("form", "limit"), [("int8", 0.03), ("int4", 0.12)])
def test_a_trained_model_stays_near(tmp_path: Path, form: convert.SpineForm, limit: float) -> None:
    with LLM(activations="float32") as llm:
        exact = llm.logits(llm.tokenize(STORY))
    done = convert_spine(open_checkpoint(STORYTELLER), form, tmp_path / "spine")
    assert done.after_bytes < done.before_bytes * (0.6 if form == "int8" else 0.4)
    with LLM(activations="float32", spine=str(done.folder)) as llm:
        logits = llm.logits(llm.tokenize(STORY))
    error = np.sqrt(np.square(logits - exact).mean() / np.square(exact).mean())
    assert 0 < error < limit
    with LLM(activations="float32") as llm:  # the published form is what it was
        np.testing.assert_array_equal(llm.logits(llm.tokenize(STORY)), exact)


@pytest.mark.skipif(not instruction_sets(), reason="needs the native library")
def test_it_can_be_streamed_with_the_same_bits(model: Path) -> None:
    convert_spine(open_checkpoint(model), "int8")
    with LLM(model, spine="int8") as llm:
        whole = llm.logits(TEXT)
    with LLM(model, spine="int8", stream_spine=True, expert_slots=2) as llm:
        np.testing.assert_array_equal(llm.logits(TEXT), whole)


def test_what_does_not_belong_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no converted spine; make it with `finback convert"):
        LLM(model, spine="int8")
    folder = convert_spine(open_checkpoint(model), "int8").folder
    other = tmp_path / "other"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    config["text_config"]["routed_scaling_factor"] = 1.5
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="was made from other weights"):
        LLM(other, spine="int8")
    shutil.copy(model / "config.json", other / "config.json")
    refs = open_checkpoint(other).tensors
    head = refs["language_model.lm_head.weight"]
    raw = bytearray(head.path.read_bytes())
    raw[head.offset + 1] ^= 0x80  # one weight has another sign
    head.path.write_bytes(bytes(raw))
    with pytest.raises(CheckpointError, match="was made from other weights"):
        LLM(other, spine="int8")
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"files": {}}))
    with pytest.raises(DamagedFile, match="does not hold this model's spine"):
        LLM(model, spine="int8")
    (folder / MANIFEST).write_text(json.dumps(manifest))
    part = sorted(folder.glob("*.safetensors"))[0]
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(DamagedFile, match="is missing or cut; convert the spine again"):
        LLM(model, spine="int8")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("x")
    with pytest.raises(UsageError, match="precious.txt, which is none of ours"):
        convert_spine(open_checkpoint(model), "int8", tmp_path / "full")
    (folder / MANIFEST).write_text(json.dumps({"format": 99}))
    with pytest.raises(CheckpointError, match="another version of finback"):
        with_spine(open_checkpoint(model), "int8")


def test_killed_at_any_moment_it_goes_on_and_gives_the_same(tmp_path: Path) -> None:
    """Ten times kill -9, then a run to the end: the files are those of a run without a break."""
    whole = convert_spine(open_checkpoint(STORYTELLER), "int4", tmp_path / "whole").folder
    command = [sys.executable, "-m", "finback", "convert", str(STORYTELLER), "--spine", "int4"]
    folder, chance = tmp_path / "broken", random.Random(7)
    for _ in range(10):
        process = subprocess.Popen([*command, "--out", str(folder)], stdout=subprocess.DEVNULL)
        time.sleep(0.15 + chance.random() * 0.4)
        process.send_signal(signal.SIGKILL)
        process.wait()
        for path in folder.glob("*.safetensors") if folder.exists() else []:
            assert path.read_bytes() == (whole / path.name).read_bytes()
    done = subprocess.run([*command, "--out", str(folder)], check=True, capture_output=True)
    assert b"matrices" in done.stdout
    left = contents(folder)
    assert {name: data for name, data in left.items() if not name.endswith(".part")} == contents(
        whole
    )
