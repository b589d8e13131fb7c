"""Random checkpoints: the published layout, the same bytes again, and none of them lost."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from finback import LLM
from finback.checkpoint.index import open_checkpoint
from finback.errors import CapacityError, CheckpointError, UsageError
from finback.planner.footprint import measure_footprint
from finback.planner.synth import cut_down, find_config, synthesise
from tests.conftest import DATA

TINY = cut_down(find_config(str(DATA / "tiny-k3")), layers=5, experts=8)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_checkpoint_is_whole_and_runs(tmp_path: Path) -> None:
    size = synthesise(tmp_path, TINY)
    footprint = measure_footprint(open_checkpoint(tmp_path))
    assert footprint.is_complete
    assert not footprint.odd
    assert footprint.formats["expert"] == "mxfp4"
    assert size == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    with LLM(tmp_path) as llm:
        logits = llm.logits(llm.tokenize("any text: é"))
        assert np.isfinite(logits).all()
        assert 0.01 < logits.std() < 100
        assert len(llm.generate("x", max_tokens=3, ignore_eos=True).token_ids) == 3


def test_another_family(tmp_path: Path) -> None:
    synthesise(tmp_path, cut_down(find_config(str(DATA / "tiny-kimi-linear" / "config.json"))))
    assert measure_footprint(open_checkpoint(tmp_path)).is_complete


def test_kimi_k3_keeps_its_experts_when_its_width_shrinks() -> None:
    whole, small = find_config("kimi-k3"), cut_down(find_config("kimi-k3"), 7, 2048, 112)
    text = small["text_config"]
    assert (text["num_hidden_layers"], text["hidden_size"], text["num_experts"]) == (7, 2048, 112)
    assert text["num_attention_heads"] == text["linear_attn_config"]["num_heads"] == 27
    assert text["linear_attn_config"]["full_attn_layers"] == [4]
    for key in ("moe_intermediate_size", "routed_expert_hidden_size", "num_experts_per_token"):
        assert text[key] == whole["text_config"][key]


def test_equal_seeds_give_equal_files_and_a_broken_run_goes_on(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    synthesise(first, TINY, seed=4)
    files = contents(first)
    synthesise(second, TINY, seed=5)
    assert (
        contents(second)["model-00002-of-00006.safetensors"]
        != files["model-00002-of-00006.safetensors"]
    )
    kept = first / "model-00001-of-00006.safetensors"
    before = kept.stat().st_mtime_ns
    (first / "model-00003-of-00006.safetensors").unlink()
    (first / "model-00004-of-00006.safetensors").write_bytes(b"half")
    (first / "model.safetensors.index.json").unlink()
    synthesise(first, TINY, seed=4)
    assert contents(first) == files
    assert kept.stat().st_mtime_ns == before


def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(UsageError, match="is not empty"):
        synthesise(tmp_path, TINY)
    other = tmp_path / "other"
    synthesise(other, TINY)
    with pytest.raises(UsageError, match="holds another model"):
        synthesise(other, TINY, seed=1)
    with pytest.raises(UsageError, match="no such config; .*kimi-k3"):
        find_config("kimi-k4")
    with pytest.raises(UsageError, match="vocab_size must be at least 512"):
        cut_down(TINY, changes={"vocab_size": 100})
    for section, changes in (
        (None, {"model_type": "llama"}),
        (None, {"text_config": 5}),
        ("text_config", {"hidden_size": 0}),
        ("text_config", {"linear_attn_config": 5}),
    ):
        config = json.loads(json.dumps(TINY))
        (config if section is None else config[section]).update(changes)
        with pytest.raises(CheckpointError):
            cut_down(config, 2, 64, 4)
    strange = cut_down(TINY, changes={"quantization_config": 5})
    synthesise(tmp_path / "plain", strange)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(CapacityError, match="are needed, 10 B are free"):
        synthesise(tmp_path / "third", TINY)


def test_the_command(tmp_path: Path) -> None:
    options = ["--like", str(DATA / "tiny-k3"), "--layers", "2", "--set", "vocab_size=600"]
    command = [sys.executable, "-m", "finback", "synth", str(tmp_path / "m"), *options]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bytes"] > 0
    assert done.stderr == ""
    text = json.loads((tmp_path / "m" / "config.json").read_text())["text_config"]
    assert (text["vocab_size"], text["eos_token_id"]) == (600, 346)
    bad = subprocess.run([*command, "--set", "x"], capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert "is not KEY=VALUE" in bad.stderr
