"""The published Kimi K3 without its weights: values of its config, bytes of its tensors."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finback.checkpoint.hf import Fields
from finback.checkpoint.index import open_checkpoint
from finback.models import kimi_k3
from finback.planner.footprint import Footprint, measure_footprint
from finback.planner.synth import find_config


def k3_config() -> dict[str, Any]:
    """Give the values of the published config.json that describe the text model."""
    return find_config("kimi-k3")


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published config beside an index made from the specification; no shard at all."""
    folder = tmp_path_factory.mktemp("k3")
    (folder / "config.json").write_text(json.dumps(k3_config()))
    weight_map = {}
    for spec in kimi_k3.read_config(Fields(k3_config(), "")).tensors():
        suffixes = ("_packed", "_scale") if spec.expert else ("",)
        layer = (
            int(spec.name.split(".layers.")[1].split(".")[0]) + 1 if ".layers." in spec.name else 94
        )
        for suffix in suffixes:
            weight_map[spec.name + suffix] = f"model-{layer:05d}-of-000096.safetensors"
    weight_map |= {f"vision_tower.t{n}": "model-00095-of-000096.safetensors" for n in range(165)}
    weight_map |= {f"mm_projector.t{n}": "model-00096-of-000096.safetensors" for n in range(3)}
    index = {"metadata": {"total_size": 1_560_860_324_864}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def f(k3: Path) -> Footprint:
    """Measure it once; half a million names take their time."""
    return measure_footprint(open_checkpoint(k3))


def test_bytes_and_counts_are_the_published_ones(f: Footprint) -> None:
    assert f.expert_bytes == 1_446_456_066_048
    assert f.spine_bytes == 113_509_540_864
    assert f.expert_bytes_per_token == 25_829_572_608
    assert f.num_parameters == 2_779_484_478_208
    assert f.tensors_by_role["expert"] == 494_592
    assert sum(f.tensors_by_role.values()) == 497_220 - 168
    assert f.skipped_tensors == 168
    assert f.skipped_bytes == 894_717_952
    assert f.bytes_by_role["embedding"] + f.bytes_by_role["head"] == 2 * 163840 * 7168 * 2
    assert not f.missing
    assert not f.odd
    assert len(f.missing_files) == 96


def test_the_layer_map_and_the_state(f: Footprint) -> None:
    shape = f.shape
    assert len(shape.routed_layers) == 92
    assert shape.routed_layers[0] == 1
    assert shape.state_bytes == 434_110_464 + 30_523_392
    assert (
        shape.state_bytes_per_token == 2 * 27_648
    )  # float32 rows; the specification counts bfloat16


def test_inspect_prints_the_table(k3: Path) -> None:
    command = [sys.executable, "-m", "finback", "inspect", str(k3), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["spine_bytes"] == 113_509_540_864


def test_the_real_file_is_accepted_where_it_is_at_hand(k3: Path) -> None:
    real = Path(__file__).parents[3] / "shared" / "fixtures" / "k3-meta" / "config.json"
    if not real.exists():
        pytest.skip("needs the published config.json of Kimi K3 in ../shared/fixtures/k3-meta")
    text = json.loads(real.read_text())
    assert kimi_k3.read_config(Fields(text, "")) == kimi_k3.read_config(Fields(k3_config(), ""))
    ours = k3_config()["text_config"]
    packing = ours.pop("quantization_config")  # only what tells how experts are packed
    assert text["text_config"]["quantization_config"]["format"] == packing["format"]
    for key, value in ours.items():
        assert text["text_config"][key] == value
