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
from finback.planner.footprint import measure_footprint

FULL = [*range(4, 93, 4), 93]


def k3_config() -> dict[str, Any]:
    """Give the values of the published config.json that describe the text model."""
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": 163840,
        "hidden_size": 7168,
        "num_hidden_layers": 93,
        "intermediate_size": 33792,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "attn_res_block_size": 12,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            "full_attn_layers": FULL,
            "kda_layers": [n for n in range(1, 94) if n not in FULL],
        },
        "num_experts": 896,
        "num_experts_per_token": 16,
        "top_k": 50,
        "num_shared_experts": 2,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 1048576,
        "tie_word_embeddings": False,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "eos_token_id": 163586,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {"patch_size": 14},
    }


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


def test_bytes_and_counts_are_the_published_ones(k3: Path) -> None:
    f = measure_footprint(open_checkpoint(k3))
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


def test_the_layer_map_and_the_state(k3: Path) -> None:
    shape = measure_footprint(open_checkpoint(k3)).shape
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
    for key, value in k3_config()["text_config"].items():
        assert text["text_config"][key] == value
