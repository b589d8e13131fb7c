"""A Kimi K3 checkpoint as a GGUF that llama.cpp's `kimi-k3` graph loads, to compare with it.

For comparing results everything is widened to float32, the MXFP4 experts too: llama.cpp's own
MXFP4 kernels round the activations to 8 bits, which would hide errors of the size looked for. For
comparing speed matrices keep their published types. Only the writer of the `gguf` package is used;
its name tables need not know Kimi K3.
"""

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

from finback.checkpoint.formats import FORMATS, PLAIN_FORMATS, Array, Bytes
from finback.checkpoint.hf import Fields
from finback.checkpoint.index import Checkpoint, open_checkpoint
from finback.checkpoint.safetensors import TensorRef

ARCHITECTURE = "kimi-k3"
TEXT = "language_model."
FLOAT32_IN_LLAMA_CPP = (
    "ffn_gate_inp.weight",
    "ssm_conv1d_q.weight",
    "ssm_conv1d_k.weight",
    "ssm_conv1d_v.weight",
)
SIGMOID = 2  # llama.cpp's number for a sigmoid router

# Names inside a layer: ours on the left, llama.cpp's on the right. What needs more than
# another name (residual scores, A_log, kv_b_proj, routed experts) is in the functions below.
NORMS = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
KDA = {
    "q_proj.weight": "attn_q.weight",
    "k_proj.weight": "attn_k.weight",
    "v_proj.weight": "attn_v.weight",
    "q_conv1d.weight": "ssm_conv1d_q.weight",
    "k_conv1d.weight": "ssm_conv1d_k.weight",
    "v_conv1d.weight": "ssm_conv1d_v.weight",
    "f_a_proj.weight": "ssm_f_a.weight",
    "f_b_proj.weight": "ssm_f_b.weight",
    "b_proj.weight": "ssm_beta.weight",
    "dt_bias": "ssm_dt.bias",
    "g_proj.weight": "ssm_g.weight",
    "o_norm.weight": "ssm_norm.weight",
    "o_proj.weight": "attn_output.weight",
}
MLA = {
    "q_a_proj.weight": "attn_q_a.weight",
    "q_a_layernorm.weight": "attn_q_a_norm.weight",
    "q_b_proj.weight": "attn_q_b.weight",
    "kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "g_proj.weight": "attn_gate.weight",
    "o_proj.weight": "attn_output.weight",
}
DENSE = {f"{name}_proj.weight": f"ffn_{name}.weight" for name in ("gate", "up", "down")}
MOE = {
    "gate.weight": "ffn_gate_inp.weight",
    "gate.e_score_correction_bias": "exp_probs_b.bias",
    "routed_expert_down_proj.weight": "ffn_routed_down.weight",
    "routed_expert_norm.weight": "ffn_routed_norm.weight",
    "routed_expert_up_proj.weight": "ffn_routed_up.weight",
    "shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}
EXPERT = {"w1": "ffn_gate_exps.weight", "w2": "ffn_down_exps.weight", "w3": "ffn_up_exps.weight"}


def write_gguf(folder: Path, out: Path, *, keep_types: bool = False) -> None:
    """Convert the text model of a K3 checkpoint folder.

    Args:
        folder: The checkpoint.
        out: The file to write.
        keep_types: Keep BF16 matrices and MXFP4 experts as they are instead of widening them.

    Raises:
        ValueError: The folder holds something that llama.cpp's graph has no place for.
    """
    converter = Converter(open_checkpoint(folder), keep_types)
    writer = gguf.GGUFWriter(out, ARCHITECTURE, use_temp_file=keep_types)
    converter.add_metadata(writer)
    add_placeholder_vocabulary(writer, converter.config)
    for name, values in converter.tensors():
        _add(writer, name, values, keep_types)
    if left := converter.unused():
        raise ValueError(f"{folder}: {len(left)} tensors have no place: {', '.join(left[:5])} …")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, values: Array | Bytes, keep_types: bool) -> None:
    """Write a tensor; with its types kept, matrices that came from BF16 go back to it exactly."""
    if values.dtype == np.uint8:
        writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        return
    values = np.ascontiguousarray(values, np.float32)
    is_vector = min(values.shape) < 32 or values.ndim == 1 or name.endswith(FLOAT32_IN_LLAMA_CPP)
    if not keep_types or is_vector:
        writer.add_tensor(name, values)
        return
    half = (values.view(np.uint32) >> 16).astype(np.uint16)
    writer.add_tensor(name, half.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)


def as_ggml_blocks(codes: Bytes, scales: Bytes, shape: tuple[int, int]) -> Bytes:
    """Reorder MXFP4 (R, C) into ggml's blocks: -> (R, C/32 · 17).

    A block of 32 columns is its scale byte, then 16 bytes of which byte j holds column j low and
    column j + 16 high; the checkpoint's byte j holds columns 2j and 2j + 1.
    """
    rows, columns = shape
    pairs = codes.reshape(rows, columns // 32, 16)
    flat = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(rows, columns // 32, 32)
    packed = flat[..., :16] | (flat[..., 16:] << 4)
    blocks = np.concatenate([scales.reshape(rows, columns // 32, 1), packed], axis=-1)
    return np.ascontiguousarray(blocks.reshape(rows, -1))


class Converter:
    """One checkpoint, with a note of which of its tensors were taken."""

    def __init__(self, checkpoint: Checkpoint, keep_types: bool = False) -> None:
        """Wrap an opened folder; no weight is read before `tensors`."""
        self.refs, self.keep_types = checkpoint.tensors, keep_types
        self.taken: set[str] = set()
        top = Fields(checkpoint.config, f"{checkpoint.folder}/config.json: ")
        self.config = top.section("text_config")
        self.linear = self.config.section("linear_attn_config")
        self.layers = self.config.integer("num_hidden_layers")
        self.heads = self.config.integer("num_attention_heads")
        self.full = {number - 1 for number in self.linear.integers("full_attn_layers")}
        self.dense = self.config.integer("first_k_dense_replace", low=0)
        if self.linear.integer("num_heads") != self.heads:
            raise ValueError("llama.cpp has one head count for KDA and MLA; this folder has two")
        if self.config.integer("num_expert_group", 1) != 1:
            raise ValueError("llama.cpp's graph has no expert groups")

    def add_metadata(self, writer: gguf.GGUFWriter) -> None:
        """Write the numbers that llama.cpp's loader asks for."""
        config, linear = self.config, self.linear
        latent = config.integer("kv_lora_rank")
        extra, value = config.integer("qk_rope_head_dim"), config.integer("v_head_dim")
        integers = {
            "vocab_size": config.integer("vocab_size"),
            "context_length": config.integer("max_position_embeddings"),
            "embedding_length": config.integer("hidden_size"),
            "block_count": self.layers,
            "feed_forward_length": config.integer("intermediate_size"),
            "attention.head_count": self.heads,
            # The cache holds one shared row per token: the latent, then the unrotated extra part.
            "attention.key_length": latent + extra,
            "attention.value_length": latent,
            "attention.key_length_mla": config.integer("qk_nope_head_dim") + extra,
            "attention.value_length_mla": value,
            "attention.q_lora_rank": config.integer("q_lora_rank"),
            "attention.kv_lora_rank": latent,
            "rope.dimension_count": extra,  # a size only: nothing is rotated
            "ssm.conv_kernel": linear.integer("short_conv_kernel_size"),
            "kda.head_dim": linear.integer("head_dim"),
            "attn_res.block_size": config.integer("attn_res_block_size"),
            "leading_dense_block_count": self.dense,
            "expert_count": config.integer("num_experts"),
            "expert_used_count": config.integer("num_experts_per_token"),
            "expert_shared_count": config.integer("num_shared_experts"),
            "expert_feed_forward_length": config.integer("moe_intermediate_size"),
            "expert_latent_length": config.integer("routed_expert_hidden_size"),
            "expert_gating_func": SIGMOID,
        }
        floats = {
            "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps"),
            "kda.gate_lower_bound": linear.number("gate_lower_bound"),
            "activation.situ_beta": config.number("activation_situ_beta"),
            "activation.situ_linear_beta": config.number("activation_situ_linear_beta"),
            "expert_weights_scale": config.number("routed_scaling_factor"),
        }
        for key, integer in integers.items():
            writer.add_uint32(f"{ARCHITECTURE}.{key}", integer)
        for key, number in floats.items():
            writer.add_float32(f"{ARCHITECTURE}.{key}", number)
        writer.add_bool(f"{ARCHITECTURE}.expert_weights_norm", config.flag("moe_renormalize"))
        # No key/value heads is how llama.cpp recognises a KDA layer.
        kv_heads = [int(layer in self.full) for layer in range(self.layers)]
        writer.add_array(f"{ARCHITECTURE}.attention.head_count_kv", kv_heads)

    def tensors(self) -> Iterator[tuple[str, Array | Bytes]]:
        """Give every tensor of the text model under llama.cpp's name."""
        yield "token_embd.weight", self.plain("model.embed_tokens.weight")
        yield "output_norm.weight", self.plain("model.norm.weight")
        yield "output.weight", self.plain("lm_head.weight")
        yield "output_res_score.weight", self.score("model.output_attn_res")
        for layer in range(self.layers):
            for name, values in self.layer_tensors(layer):
                yield f"blk.{layer}.{name}", values

    def layer_tensors(self, layer: int) -> Iterator[tuple[str, Array | Bytes]]:
        """Give the tensors of one layer, under their names inside it."""
        here = f"model.layers.{layer}."
        attention, experts = here + "self_attn.", here + "block_sparse_moe."
        yield from self.renamed(here, NORMS)
        yield "attn_res_score.weight", self.score(here + "self_attention_res")
        yield "ffn_res_score.weight", self.score(here + "mlp_res")
        if layer in self.full:
            yield from self.renamed(attention, MLA)
            yield from self.split_kv(attention + "kv_b_proj.weight")
        else:
            yield from self.renamed(attention, KDA)
            yield "ssm_a", -np.exp(self.plain(attention + "A_log").reshape(-1)[: self.heads])
        if layer < self.dense:
            yield from self.renamed(here + "mlp.", DENSE)
        else:
            yield from self.renamed(experts, MOE)
            count = self.config.integer("num_experts")
            for part, name in EXPERT.items():
                names = [f"{experts}experts.{expert}.{part}.weight" for expert in range(count)]
                yield name, self.stacked(names)

    def renamed(self, prefix: str, names: dict[str, str]) -> Iterator[tuple[str, Array | Bytes]]:
        """Give tensors that only change their name."""
        for ours, theirs in names.items():
            yield theirs, self.plain(prefix + ours)

    def score(self, prefix: str) -> Array:
        """Fuse the norm and the projection of one residual mix, which only occur as a product."""
        norm = self.plain(f"{prefix}_norm.weight").reshape(-1)
        fused: Array = norm * self.plain(f"{prefix}_proj.weight").reshape(-1)
        return fused

    def split_kv(self, name: str) -> Iterator[tuple[str, Array | Bytes]]:
        """Split each head's rows into keys, transposed for absorption, and values."""
        per_head = self.plain(name).reshape(self.heads, -1, self.config.integer("kv_lora_rank"))
        nope = self.config.integer("qk_nope_head_dim")
        yield "attn_k_b.weight", per_head[:, :nope].transpose(0, 2, 1)
        yield "attn_v_b.weight", per_head[:, nope:]

    def plain(self, name: str) -> Array:
        """Read one BF16, F16 or F32 tensor."""
        ref = self.take(name)
        return FORMATS[PLAIN_FORMATS[ref.dtype]].unpack((read_bytes(ref),), ref.shape)

    def stacked(self, names: list[str]) -> Array | Bytes:
        """Read one matrix of every expert of a layer."""
        out: Array | Bytes = np.stack([self.expert(name) for name in names])  # type: ignore[assignment]
        return out

    def expert(self, name: str) -> Array | Bytes:
        """Read one expert matrix from its codes and scales: values, or ggml's blocks of them."""
        codes, scales = self.take(name + "_packed"), self.take(name + "_scale")
        shape = (codes.shape[0], 2 * codes.shape[1])
        parts = (read_bytes(codes), read_bytes(scales))
        if self.keep_types:
            return as_ggml_blocks(*parts, shape)
        return FORMATS["mxfp4"].unpack(parts, shape)

    def take(self, name: str) -> TensorRef:
        """Look a tensor of the text model up, and note that it has found its place."""
        self.taken.add(TEXT + name)
        return self.refs[TEXT + name]

    def unused(self) -> list[str]:
        """Name the tensors of the text model that were never read."""
        return sorted(
            name for name in self.refs if name.startswith(TEXT) and name not in self.taken
        )


def read_bytes(ref: TensorRef) -> Bytes:
    """Read the bytes of a tensor."""
    return np.fromfile(ref.path, np.uint8, count=ref.num_bytes, offset=ref.offset)


def add_placeholder_vocabulary(writer: gguf.GGUFWriter, config: Fields) -> None:
    """Number the tokens: llama.cpp wants texts, and whole ones, but is only given token ids."""
    size = config.integer("vocab_size")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{n}" for n in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(config.integer("bos_token_id"))
    writer.add_eos_token_id(config.integer("eos_token_id"))
    writer.add_add_bos_token(False)
