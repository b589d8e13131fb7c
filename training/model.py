"""Kimi K3's architecture in PyTorch, for training: whole sequences, no caches.

Not a second engine: it exists to make weights, and the exported checkpoint is compared with the
engine's own forward pass in the tests. Names follow the published tensors.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import mxfp4

CHUNK = 16  # the decay bound of -5 keeps exp(5 * 16) inside float32


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def linear(inner: int, outer: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inner, outer, bias=False)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(inner))
    return layer


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    return (
        beta
        * torch.tanh(gate / beta)
        * torch.sigmoid(gate)
        * linear_beta
        * torch.tanh(up / linear_beta)
    )


class Mix(nn.Module):
    """One attention-residual fold: a softmax over the banked block starts and the running sum."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.norm, self.proj = Norm(width, eps), nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.proj.weight)

    def forward(self, entries: list[Tensor]) -> Tensor:
        values = torch.stack(entries, dim=-2)  # (B, T, N, D)
        share = (self.norm(values) @ self.proj.weight.T).softmax(-2)
        return (share * values).sum(-2)


class Kda(nn.Module):
    """Kimi delta attention in its chunked form."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        lin, width, eps = c["linear_attn_config"], c["hidden_size"], c["rms_norm_eps"]
        self.H, self.D, taps = lin["num_heads"], lin["head_dim"], lin["short_conv_kernel_size"]
        self.bound = lin["gate_lower_bound"]
        inner = self.H * self.D
        for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
            setattr(self, name, linear(width, inner))
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            conv = nn.Conv1d(inner, inner, taps, groups=inner, padding=taps - 1, bias=False)
            with torch.no_grad():
                conv.weight.normal_(std=0.1)
                conv.weight[:, :, -1] += 1.0
            setattr(self, name, conv)
        self.f_a_proj, self.f_b_proj = linear(width, self.D), linear(self.D, inner)
        self.b_proj = linear(width, self.H)
        self.A_log = nn.Parameter(torch.zeros(self.H))
        # From a forgetting time of about 2 tokens to about 400, spread over the channels.
        self.dt_bias = nn.Parameter(torch.linspace(-8.0, -1.0, self.D).repeat(self.H))
        self.o_norm = Norm(self.D, eps)
        self.o_proj = linear(inner, width, 0.5)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.H, self.D)).transpose(1, 2)  # (B, H, T, D)

    def short_conv(self, name: str, x: Tensor) -> Tensor:
        conv: nn.Conv1d = getattr(self, f"{name}_conv1d")
        z = getattr(self, f"{name}_proj")(x)
        taps = conv.weight.shape[-1]
        padded = F.pad(z, (0, 0, taps - 1, 0))
        # Shifted sums: the grouped convolution is far slower on a CPU.
        y = sum(padded[:, j : j + z.shape[1]] * conv.weight[:, 0, j] for j in range(taps))
        return self.heads(F.silu(y))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.short_conv(name, x) for name in "qkv")
        q = F.normalize(q, dim=-1, eps=1e-6) * self.D**-0.5
        k = F.normalize(k, dim=-1, eps=1e-6)
        r = self.heads(self.f_b_proj(self.f_a_proj(x)) + self.dt_bias)
        g = self.bound * torch.sigmoid(self.A_log.exp()[:, None, None] * r)
        beta = torch.sigmoid(self.b_proj(x)).transpose(1, 2)
        o = delta_rule(q.float(), k.float(), v.float(), g.float(), beta.float())
        gate = torch.sigmoid(self.heads(self.g_proj(x)))
        o = (self.o_norm(o) * gate).transpose(1, 2).flatten(-2)
        out: Tensor = self.o_proj(o)
        return out


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Run the gated delta rule over (B, H, T, D), T a multiple of CHUNK, from an empty state.

    Within a chunk every product of decays is factored around the chunk's start, which float32
    allows because `g` is bounded; chunks follow each other through the state.
    """
    B, H, T, D = q.shape
    q, k, v, g = (t.reshape(B, H, T // CHUNK, CHUNK, D) for t in (q, k, v, g))
    beta = beta.reshape(B, H, T // CHUNK, CHUNK, 1)
    decay = g.cumsum(-2)
    into, out_of = decay.exp(), (-decay).exp()
    k_in, q_in, k_out = k * into, q * into, k * out_of
    overlap = torch.tril(k_in @ k_out.transpose(-1, -2), -1) * beta
    seen = torch.tril(q_in @ k_out.transpose(-1, -2))
    eye = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    solve = torch.linalg.solve_triangular(
        eye + overlap, torch.cat((beta * v, beta * k_in), -1), upper=False, unitriangular=True
    )
    u_v, u_k = solve.split(D, -1)
    total = decay[..., -1:, :].exp()
    k_end = k * (decay[..., -1:, :] - decay).exp()
    state = q.new_zeros(B, H, D, D)
    outputs = []
    # unbind, not indexing: the gradient of an index is a whole tensor of zeros.
    chunks = (
        t.unbind(2)
        for t in (u_v, u_k, q_in, seen, total.transpose(-1, -2), k_end.transpose(-1, -2))
    )
    for uv, uk, q_n, seen_n, total_n, k_n in zip(*chunks, strict=True):
        u = uv - uk @ state
        outputs.append(q_n @ state + seen_n @ u)
        state = state * total_n + k_n @ u
    return torch.cat(outputs, 2)


class Mla(nn.Module):
    """Gated latent attention without positions."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        width, self.H = c["hidden_size"], c["num_attention_heads"]
        self.nope, self.rope, self.v_dim = (
            c["qk_nope_head_dim"],
            c["qk_rope_head_dim"],
            c["v_head_dim"],
        )
        self.rank = c["kv_lora_rank"]
        self.q_a_proj, self.q_a_layernorm = (
            linear(width, c["q_lora_rank"]),
            Norm(c["q_lora_rank"], 1e-6),
        )
        self.q_b_proj = linear(c["q_lora_rank"], self.H * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = linear(width, self.rank + self.rope)
        self.kv_a_layernorm = Norm(self.rank, 1e-6)
        self.kv_b_proj = linear(self.rank, self.H * (self.nope + self.v_dim))
        self.g_proj = linear(width, self.H * self.v_dim)
        self.o_proj = linear(self.H * self.v_dim, width, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        q = (
            self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
            .unflatten(-1, (self.H, -1))
            .transpose(1, 2)
        )
        c, extra = self.kv_a_proj_with_mqa(x).split((self.rank, self.rope), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(c)).unflatten(-1, (self.H, -1)).transpose(1, 2)
        k, v = kv.split((self.nope, self.v_dim), -1)
        k = torch.cat((k, extra[:, None].expand(-1, self.H, -1, -1)), -1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        out: Tensor = self.o_proj(o * torch.sigmoid(self.g_proj(x)))
        return out


class Mlp(nn.Module):
    """Dense or shared feed-forward."""

    def __init__(self, c: dict[str, Any], inner: int) -> None:
        super().__init__()
        width = c["hidden_size"]
        self.betas = (c["activation_situ_beta"], c["activation_situ_linear_beta"])
        self.gate_proj, self.up_proj = linear(width, inner), linear(width, inner)
        self.down_proj = linear(inner, width, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(situ(self.gate_proj(x), self.up_proj(x), *self.betas))
        return out


class Moe(nn.Module):
    """Routed experts in a latent space, and a shared one beside them."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        width, latent, inner = (
            c["hidden_size"],
            c["routed_expert_hidden_size"],
            c["moe_intermediate_size"],
        )
        self.num, self.top = c["num_experts"], c["num_experts_per_token"]
        self.betas = (c["activation_situ_beta"], c["activation_situ_linear_beta"])
        self.gate = linear(width, self.num)
        self.register_buffer("bias", torch.zeros(self.num))
        self.register_buffer("load", torch.zeros(self.num), persistent=False)
        self.down, self.up = linear(width, latent), linear(latent, width, 0.5)
        self.norm = Norm(latent, c["rms_norm_eps"])
        self.w1 = nn.Parameter(torch.randn(self.num, inner, latent) / math.sqrt(latent))
        self.w3 = nn.Parameter(torch.randn(self.num, inner, latent) / math.sqrt(latent))
        self.w2 = nn.Parameter(torch.randn(self.num, latent, inner) / math.sqrt(inner))
        self.shared = Mlp(c, inner * c["num_shared_experts"])
        self.quantised = False

    def forward(self, x: Tensor) -> Tensor:
        u = x.flatten(0, -2)
        scores = torch.sigmoid(self.gate(u).float())
        ids = (scores.detach() + self.bias).topk(self.top, -1).indices
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        order = ids.flatten().argsort()
        counts = torch.bincount(ids.flatten(), minlength=self.num)
        self.load += counts
        rows = self.down(u)[order // self.top]
        w1, w2, w3 = (
            mxfp4.round_through(w) if self.quantised else w for w in (self.w1, self.w2, self.w3)
        )
        sizes = counts.tolist()
        inner = situ(grouped(rows, w1, sizes), grouped(rows, w3, sizes), *self.betas)
        routed = grouped(inner, w2, sizes)[order.argsort()].unflatten(0, (-1, self.top))
        out = self.up(self.norm((routed * weights[..., None]).sum(1))) + self.shared(u)
        return out.view_as(x)

    @torch.no_grad()
    def balance(self, rate: float) -> float:
        """Nudge the correction bias against the load since the last call; give max load / mean."""
        mean = self.load.mean()
        worst = float(self.load.max() / mean.clamp_min(1))
        self.bias += rate * torch.sign(mean - self.load)
        self.load.zero_()
        return worst


def grouped(rows: Tensor, weights: Tensor, sizes: list[int]) -> Tensor:
    """Multiply consecutive groups of rows with one matrix each: (N, C), (E, R, C) -> (N, R)."""
    pairs = zip(rows.split(sizes), weights.unbind(0), strict=True)
    return torch.cat([z @ w.T for z, w in pairs])


class Layer(nn.Module):
    """Attention and feed-forward with their norms and residual folds."""

    def __init__(self, c: dict[str, Any], index: int) -> None:
        super().__init__()
        width, eps = c["hidden_size"], c["rms_norm_eps"]
        self.input_layernorm, self.post_attention_layernorm = Norm(width, eps), Norm(width, eps)
        self.self_attention_res, self.mlp_res = Mix(width, eps), Mix(width, eps)
        is_kda = index + 1 in c["linear_attn_config"]["kda_layers"]
        self.self_attn = Kda(c) if is_kda else Mla(c)
        self.ffn = Mlp(c, c["intermediate_size"]) if index < c["first_k_dense_replace"] else Moe(c)


class Storyteller(nn.Module):
    """The whole model: ids (B, T) to logits (B, T, V)."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        c = self.config = config["text_config"]
        width, eps = c["hidden_size"], c["rms_norm_eps"]
        self.embed = nn.Embedding(c["vocab_size"], width)
        nn.init.normal_(self.embed.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c["num_hidden_layers"]))
        self.output_attn_res, self.norm = Mix(width, eps), Norm(width, eps)
        self.lm_head = linear(width, c["vocab_size"], 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x, bank = self.embed(ids), []
        for i, layer in enumerate(self.layers):
            h = layer.self_attention_res([*bank, x]) if bank else x
            restart = i % self.config["attn_res_block_size"] == 0
            if restart:
                bank.append(x)
            a = layer.self_attn(layer.input_layernorm(h))
            x = a if restart else x + a
            x = x + layer.ffn(layer.post_attention_layernorm(layer.mlp_res([*bank, x])))
        logits: Tensor = self.lm_head(self.norm(self.output_attn_res([*bank, x])))
        return logits

    @property
    def moes(self) -> list[Moe]:
        """List the routed feed-forwards."""
        return [layer.ffn for layer in self.layers if isinstance(layer.ffn, Moe)]
