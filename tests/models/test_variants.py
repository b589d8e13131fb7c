"""What a config can say beyond the published ones, against a second implementation in float64."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from finback.checkpoint.hf import Fields
from finback.checkpoint.safetensors import TensorRef
from finback.errors import CheckpointError
from finback.models import kimi_k3, kimi_linear
from finback.models.weights import TensorSpec, _contradictions, _find
from tests.conftest import DATA
from tests.helpers import in_chunks, load
from tests.models.naive import Naive

K3 = json.loads((DATA / "tiny-k3" / "config.json").read_text())
LINEAR = json.loads((DATA / "tiny-kimi-linear" / "config.json").read_text())
KDA = K3["text_config"]["linear_attn_config"]


def k3(**changes: Any) -> dict[str, Any]:
    config = copy.deepcopy(K3)
    config["text_config"].update(changes, num_experts=8)
    return config


def linear(**changes: Any) -> dict[str, Any]:
    config = copy.deepcopy(LINEAR)
    config.update(changes)
    return config


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


VARIANTS: dict[str, dict[str, Any]] = {
    "k3 as it is": k3(),
    "expert groups": k3(num_expert_group=4, topk_group=2),
    "experts at full width": k3(routed_expert_hidden_size=None),
    "latent without norm": k3(latent_moe_use_norm=False),
    "tied head": k3(tie_word_embeddings=True),
    "one expert a token": k3(num_experts_per_token=1),
    "no shared expert": k3(num_shared_experts=0),
    "softmax router": k3(moe_router_activation_func="softmax", moe_renormalize=False),
    "every second layer routed": k3(moe_layer_freq=2, first_k_dense_replace=0),
    "unbounded decay, low-rank gate": k3(
        linear_attn_config={**KDA, "gate_lower_bound": None, "use_full_rank_gate": False}
    ),
    "silu": k3(hidden_act="silu"),
    "situ without bounds": k3(activation_situ_linear_beta=None, activation_situ_beta=None),
    "two taps": k3(linear_attn_config={**KDA, "short_conv_kernel_size": 2}),
    "a block every layer": k3(attn_res_block_size=1),
    "one block": k3(attn_res_block_size=9),
    "recurrent layers only": k3(
        linear_attn_config={**KDA, "kda_layers": list(range(1, 10)), "full_attn_layers": []}
    ),
    "kimi-linear as it is": linear(),
    "kimi-linear with query rank": linear(q_lora_rank=56),
    "kimi-linear with output gate": linear(mla_use_output_gate=True),
    "kimi-linear with latent experts": linear(
        routed_expert_hidden_size=64, latent_moe_use_norm=True
    ),
    "kimi-linear that does not say it renormalises": without(linear(), "moe_renormalize"),
}


def write(folder: Path, config: dict[str, Any], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Write a checkpoint of random weights; give them in float64 by name without prefix."""
    family = kimi_k3 if "text_config" in config else kimi_linear
    rng = np.random.default_rng(5)
    tensors = {}
    for spec in family.read_config(Fields(config, "")).tensors():
        shape, name = spec.shape, spec.name
        values = rng.standard_normal(shape) * 1.5 / np.sqrt(shape[-1])
        if "norm" in name.split(".")[-2]:
            values = rng.uniform(0.6, 1.4, shape)
        elif name.endswith("A_log"):
            values = np.log(rng.uniform(0.5, 4, shape))
        elif name.endswith("dt_bias"):
            values = rng.uniform(-3, 0.5, shape)
        elif name.endswith("correction_bias"):
            values = rng.uniform(-0.25, 0.25, shape)
        elif "embed" in name or "conv1d" in name:
            values = rng.standard_normal(shape) * 0.6
        tensors[name] = values.astype(dtype)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return {n.removeprefix("language_model."): t.astype(np.float64) for n, t in tensors.items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_agrees(tmp_path: Path, variant: str) -> None:
    config = VARIANTS[variant]
    weights = write(tmp_path, config)
    ids = np.random.default_rng(1).integers(0, 384, 12).tolist()
    expected = Naive(config.get("text_config", config), weights).logits(ids)
    logits = in_chunks(load(tmp_path), ids, 5)
    assert np.abs(logits - expected).max() < 1e-3
    assert (logits.argmax(-1) == expected.argmax(-1)).all()


def test_half_precision_weights(tmp_path: Path) -> None:
    weights = write(tmp_path, k3(), np.float16)
    ids = list(range(40, 50))
    expected = Naive(k3()["text_config"], weights).logits(ids)
    assert np.abs(in_chunks(load(tmp_path), ids, 10) - expected).max() < 1e-3


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (k3(attn_res_block_size=None), "attn_res_block_size must be a whole number"),
        (linear(attn_res_block_size=4), "which this family does not have"),
        (without(linear(), "mla_use_nope"), "rotary positions are not supported"),
        (linear(num_nextn_predict_layers=1), "draft layers are not supported"),
        (linear(q_lora_rank=0), "q_lora_rank must be a whole number from 1"),
    ],
)
def test_what_is_not_supported_is_refused_by_key(config: dict[str, Any], says: str) -> None:
    family = kimi_k3 if "text_config" in config else kimi_linear
    with pytest.raises(CheckpointError, match=says):
        family.read_config(Fields(config, "config.json: "))


def test_an_embedding_whose_rows_share_scales_is_refused() -> None:
    """Rows are looked up alone; block FP8 keeps one scale for 128 of them."""
    spec = TensorSpec("embed.weight", (256, 128), "embedding")
    parts = (("embed.weight", "F8_E4M3", (256, 128)), ("embed.weight_scale_inv", "F32", (2, 1)))
    headers = {name: TensorRef(name, Path("x"), dtype, shape, 0, 4) for name, dtype, shape in parts}
    stored = _find(spec, frozenset(headers), headers)
    assert stored is not None
    assert any("is F8_E4M3, expected one of" in line for line in _contradictions(stored, headers))
    matrix = TensorSpec("embed.weight", (256, 128), "head")
    found = _find(matrix, frozenset(headers), headers)
    assert found is not None
    assert found.format == "fp8"
