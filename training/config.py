"""The storyteller's shape, as the `config.json` it will be published with."""

from typing import Any

NUM_RANKS = 4096
NUM_SPECIALS = 256
FULL_ATTENTION = (4, 8)  # counted from 1, as published


def checkpoint_config(
    *, hidden: int = 192, layers: int = 8, experts: int = 48, ranks: int = NUM_RANKS
) -> dict[str, Any]:
    """Build `config.json` in K3's nested layout; the arguments shrink it for the smoke test."""
    full = [n for n in range(1, layers + 1) if n % 4 == 0]
    ids = {"bos_token_id": ranks, "eos_token_id": ranks + 2, "pad_token_id": ranks + 255}
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": ranks + NUM_SPECIALS,
        "hidden_size": hidden,
        "intermediate_size": 512,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "use_cache": True,
        "attn_res_block_size": 4,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "full_attn_layers": full,
            "kda_layers": [n for n in range(1, layers + 1) if n not in full],
            "num_heads": 4,
            "head_dim": 64,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
        "num_experts": experts,
        "num_experts_per_token": 4,
        "num_shared_experts": 1,
        "moe_intermediate_size": 96,
        "routed_expert_hidden_size": 96,
        "latent_moe_use_norm": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        **ids,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "format": "mxfp4-pack-quantized",
                    "targets": ["Linear"],
                    "input_activations": None,
                    "output_activations": None,
                    "weights": {
                        "num_bits": 4,
                        "type": "float",
                        "group_size": 32,
                        "strategy": "group",
                        "symmetric": True,
                        "dynamic": False,
                        "scale_dtype": "torch.uint8",
                    },
                }
            },
            "ignore": [
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
                "re:.*lm_head.*",
            ],
        },
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        **ids,
        "text_config": text,
    }
