"""Moonshot's own modelling code, run on a GPU at the real depth of 93 layers, as the judge.

The weights are uniform draws seeded by tensor name, so they are made here instead of stored. The
stored numbers come from the rivoli project (MIT); tests/data/README.md has the provenance.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from finback.checkpoint.hf import Fields
from finback.kernels.cpu import Cpu
from finback.kernels.library import instruction_sets
from finback.models import kimi_k3
from finback.models.state import RecurrentState, SequenceState
from tests.conftest import DATA
from tests.helpers import Recorder, extend, load

FOLDER = DATA / "k3-firstparty"
TOLERANCE = 2e-4


def draw(name: str, shape: tuple[int, ...], salt: str) -> np.ndarray:
    """Reproduce `uniform_` of a seeded torch generator: 24 bits of each 32-bit draw of MT19937."""
    digest = hashlib.sha256(f"{salt}/{name}".encode()).digest()
    seed = int.from_bytes(digest[:8], "little") & 0xFFFFFFFF  # torch seeds with the low half
    low, high = -0.08, 0.08
    if name.endswith("A_log"):
        low, high = 1.0, 16.0
    elif name.endswith("dt_bias"):
        low, high = -4.0, 1.0
    elif "norm" in name.split(".")[-2]:
        low, high = 0.8, 1.2
    bits = np.random.RandomState(seed).randint(0, 2**32, int(np.prod(shape)), np.uint32)
    unit = (bits & 0xFFFFFF).astype(np.float32) * np.float32(2.0**-24)
    values = unit * np.float32(high - low) + np.float32(low)
    return (np.log(values) if name.endswith("A_log") else values).reshape(shape)


@pytest.fixture(scope="module", params=[1, 2])
def golden(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, dict]]:
    """Write one golden's weights as a checkpoint; give the folder and the stored results."""
    path = FOLDER / f"golden-{request.param}.safetensors"
    with safe_open(path, "np") as file:
        salt = file.metadata()["salt"]
    config = json.loads((FOLDER / "config.json").read_text())
    heads = config["text_config"]["linear_attn_config"]["num_heads"]
    weights = {}
    for spec in kimi_k3.read_config(Fields(config, "")).tensors():
        name = spec.name.removeprefix("language_model.")
        shape = (heads,) if name.endswith("A_log") else spec.shape
        weights[spec.name] = draw(name, shape, salt)
    weights["language_model.model.embed_tokens.weight"][config["text_config"]["pad_token_id"]] = 0
    folder = tmp_path_factory.mktemp("golden")
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    yield folder, load_file(path)
    (folder / "model.safetensors").unlink()


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got.reshape(-1) - expected.reshape(-1)).max() / np.abs(expected).max())


@pytest.mark.parametrize("isa", [None, *instruction_sets()])
def test_a_decode_step_after_a_prompt(golden: tuple[Path, dict], isa: str | None) -> None:
    folder, expected = golden
    model = load(folder, ops=None if isa is None else Cpu(isa=isa))
    assert model.shape.num_layers == 93
    state = SequenceState()
    extend(model, state, expected["prompt_ids"])

    def kda_state(layer: int) -> np.ndarray:
        layer_state = state.layers[layer]
        assert isinstance(layer_state, RecurrentState)
        return layer_state.matrix

    checked = [n for n in range(93) if f"layer.{n}.out" in expected]
    assert checked == [0, 1, 3, 12, 91, 92]
    recurrent = [n for n in checked if f"layer.{n}.kda_state_in" in expected]
    assert recurrent
    for layer in recurrent:
        assert relative(kda_state(layer), expected[f"layer.{layer}.kda_state_in"]) < TOLERANCE
    seen = Recorder()
    logits = extend(model, state, expected["decode_id"].reshape(-1), seen)[0]
    for layer in checked:
        assert relative(seen.layers[layer], expected[f"layer.{layer}.out"]) < TOLERANCE
        if f"layer.{layer}.topk_ids" in expected:
            chosen = sorted(seen.routes[layer][0].tolist())
            assert chosen == sorted(expected[f"layer.{layer}.topk_ids"].reshape(-1).tolist())
    for layer in recurrent:
        assert relative(kda_state(layer), expected[f"layer.{layer}.kda_state_out"]) < TOLERANCE
    assert relative(logits, expected["logits"]) < TOLERANCE
    assert logits.argmax() == expected["logits"].argmax()
