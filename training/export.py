"""Trained weights to a checkpoint in K3's published layout: one shard a layer, one for the rest."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from training import mxfp4
from training.model import Kda, Layer, Moe, Storyteller

PREFIX = "language_model."


def write_checkpoint(model: Storyteller, config: dict[str, Any], folder: Path) -> int:
    """Write config, shards and index; return the bytes of all tensors."""
    layers = len(model.layers)
    shards = [layer_tensors(layer, f"model.layers.{i}.") for i, layer in enumerate(model.layers)]
    shards.append(global_tensors(model))
    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{layers + 1:06d}.safetensors"
        named = {PREFIX + key: value.detach().contiguous().cpu() for key, value in tensors.items()}
        save_file(named, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(named, name)
        total += sum(t.numel() * t.element_size() for t in named.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=0) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    eos = {"eos_token_id": config["eos_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(eos) + "\n")
    return total


def global_tensors(model: Storyteller) -> dict[str, Tensor]:
    """Name the embedding, the head and the final norms."""
    fold = model.output_attn_res
    return {
        "model.embed_tokens.weight": model.embed.weight.bfloat16(),
        "lm_head.weight": model.lm_head.weight.bfloat16(),
        "model.norm.weight": model.norm.weight.bfloat16(),
        "model.output_attn_res_norm.weight": fold.norm.weight.bfloat16(),
        "model.output_attn_res_proj.weight": fold.proj.weight.bfloat16(),
    }


def layer_tensors(layer: Layer, prefix: str) -> dict[str, Tensor]:
    """Name one layer's tensors; norms of the folds, attention and feed-forward included."""
    out = {
        f"{prefix}{name}.weight": getattr(layer, name).weight.bfloat16()
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    for name, fold in (
        ("self_attention_res", layer.self_attention_res),
        ("mlp_res", layer.mlp_res),
    ):
        out[f"{prefix}{name}_norm.weight"] = fold.norm.weight.bfloat16()
        out[f"{prefix}{name}_proj.weight"] = fold.proj.weight.bfloat16()
    for name, value in layer.self_attn.state_dict().items():
        is_float32 = isinstance(layer.self_attn, Kda) and name.split(".")[0] in FLOAT32_PARTS
        out[f"{prefix}self_attn.{name}"] = value.float() if is_float32 else value.bfloat16()
    if isinstance(layer.self_attn, Kda):
        key = f"{prefix}self_attn.A_log"
        out[key] = torch.nn.functional.pad(out[key], (0, -out[key].numel() % 128))
    if isinstance(layer.ffn, Moe):
        out |= moe_tensors(layer.ffn, f"{prefix}block_sparse_moe.")
    else:
        out |= {f"{prefix}mlp.{n}": v.bfloat16() for n, v in layer.ffn.state_dict().items()}
    return out


FLOAT32_PARTS = frozenset({"q_conv1d", "k_conv1d", "v_conv1d", "A_log", "dt_bias", "o_norm"})


def moe_tensors(moe: Moe, prefix: str) -> dict[str, Tensor]:
    """Name the router, the latent projections, the shared expert and the packed experts."""
    out = {
        f"{prefix}gate.weight": moe.gate.weight.bfloat16(),
        f"{prefix}gate.e_score_correction_bias": moe.bias.float(),
        f"{prefix}routed_expert_down_proj.weight": moe.down.weight.bfloat16(),
        f"{prefix}routed_expert_up_proj.weight": moe.up.weight.bfloat16(),
        f"{prefix}routed_expert_norm.weight": moe.norm.weight.bfloat16(),
    }
    out |= {f"{prefix}shared_experts.{n}": v.bfloat16() for n, v in moe.shared.state_dict().items()}
    for name in ("w1", "w2", "w3"):
        codes, scale, _ = mxfp4.encode(getattr(moe, name).detach())
        packed = mxfp4.pack(codes)
        for e in range(moe.num):
            out[f"{prefix}experts.{e}.{name}.weight_packed"] = packed[e]
            out[f"{prefix}experts.{e}.{name}.weight_scale"] = scale[e]
    return out
