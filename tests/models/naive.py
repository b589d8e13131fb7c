"""Both families once more, written from the formulas alone: float64 NumPy, token loops, no caches.

Shares no code with the package. Weights go by their published names without prefix.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def rms(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


class Naive:
    """One prompt through one model."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Array]) -> None:
        self.c, self.w = config, weights
        self.linear = config["linear_attn_config"]
        self.eps = config["rms_norm_eps"]

    def __getitem__(self, name: str) -> Array:
        return self.w[name + ".weight"]

    def act(self, gate: Array, up: Array) -> Array:
        if self.c["hidden_act"] == "silu":
            return gate * sigmoid(gate) * up
        beta = self.c.get("activation_situ_beta") or 1.0
        bound = self.c.get("activation_situ_linear_beta")
        up = bound * np.tanh(up / bound) if bound else up
        return beta * np.tanh(gate / beta) * sigmoid(gate) * up

    def mlp(self, p: str, x: Array) -> Array:
        inner = self.act(x @ self[p + "gate_proj"].T, x @ self[p + "up_proj"].T)
        return inner @ self[p + "down_proj"].T

    def kda(self, p: str, x: Array) -> Array:
        T, H, D = len(x), self.linear["num_heads"], self.linear["head_dim"]
        taps = self.linear["short_conv_kernel_size"]

        def conv(n: str) -> Array:
            z = np.vstack([np.zeros((taps - 1, H * D)), x @ self[f"{p}{n}_proj"].T])
            weight = self[f"{p}{n}_conv1d"].reshape(-1, taps)
            y = sum(z[j : j + T] * weight[:, j] for j in range(taps))
            return (y * sigmoid(y)).reshape(T, H, D)

        def unit(t: Array) -> Array:
            return t / np.sqrt((t * t).sum(-1, keepdims=True) + 1e-6)

        q, k, v = conv("q"), conv("k"), conv("v")
        q, k = unit(q) * D**-0.5, unit(k)
        f = (x @ self[p + "f_a_proj"].T) @ self[p + "f_b_proj"].T + self.w[p + "dt_bias"]
        f = f.reshape(T, H, D)
        rate = np.exp(self.w[p + "A_log"].reshape(-1)[:H])[:, None]
        bound = self.linear.get("gate_lower_bound")
        g = -rate * np.logaddexp(0, f) if bound is None else bound * sigmoid(rate * f)
        beta = sigmoid(x @ self[p + "b_proj"].T)
        state, out = np.zeros((H, D, D)), np.zeros((T, H, D))
        for t in range(T):
            for h in range(H):
                s = np.diag(np.exp(g[t, h])) @ state[h]
                state[h] = s + beta[t, h] * np.outer(k[t, h], v[t, h] - s.T @ k[t, h])
                out[t, h] = state[h].T @ q[t, h]
        if self.linear.get("use_full_rank_gate"):
            gate = x @ self[p + "g_proj"].T
        else:
            gate = (x @ self[p + "g_a_proj"].T) @ self[p + "g_b_proj"].T
        out = rms(out, self[p + "o_norm"], self.eps) * sigmoid(gate.reshape(T, H, D))
        return out.reshape(T, -1) @ self[p + "o_proj"].T

    def mla(self, p: str, x: Array) -> Array:
        """Attention with keys and values of every head written out."""
        c, T, H = self.c, len(x), self.c["num_attention_heads"]
        nope, extra, rank = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
        if c.get("q_lora_rank"):
            low = rms(x @ self[p + "q_a_proj"].T, self[p + "q_a_layernorm"], 1e-6)
            q = low @ self[p + "q_b_proj"].T
        else:
            q = x @ self[p + "q_proj"].T
        q = q.reshape(T, H, nope + extra)
        down = x @ self[p + "kv_a_proj_with_mqa"].T
        latent = rms(down[:, :rank], self[p + "kv_a_layernorm"], 1e-6)
        kv = (latent @ self[p + "kv_b_proj"].T).reshape(T, H, -1)
        out = np.zeros((T, H, c["v_head_dim"]))
        for t in range(T):
            for h in range(H):
                keys = np.concatenate([kv[: t + 1, h, :nope], down[: t + 1, rank:]], 1)
                share = softmax(keys @ q[t, h] * (nope + extra) ** -0.5)
                out[t, h] = share @ kv[: t + 1, h, nope:]
        joined = out.reshape(T, -1)
        if c.get("mla_use_output_gate"):
            joined = joined * sigmoid(x @ self[p + "g_proj"].T)
        return joined @ self[p + "o_proj"].T

    def choose(self, scores: Array, bias: Array) -> Array:
        groups, top = self.c.get("num_expert_group", 1), self.c.get("topk_group", 1)
        choice = scores + bias
        if groups > top:
            by_group = choice.reshape(groups, -1)
            best = np.argsort(-np.sort(by_group, 1)[:, -2:].sum(1), kind="stable")[:top]
            kept = np.full(by_group.shape, -np.inf)
            kept[best] = by_group[best]
            choice = kept.reshape(-1)
        return np.argsort(-choice, kind="stable")[: self.c["num_experts_per_token"]]

    def moe(self, p: str, x: Array) -> Array:
        c = self.c
        has_latent = c.get("routed_expert_hidden_size") is not None
        logits = x @ self[p + "gate"].T
        is_sigmoid = c["moe_router_activation_func"] == "sigmoid"
        scores = sigmoid(logits) if is_sigmoid else softmax(logits)
        z = x @ self[p + "routed_expert_down_proj"].T if has_latent else x
        y = np.zeros_like(z)
        for t in range(len(x)):
            ids = self.choose(scores[t], self.w[p + "gate.e_score_correction_bias"])
            share = scores[t, ids]
            if c.get("moe_renormalize", True) and len(ids) > 1:
                share = share / (share.sum() + 1e-20)
            for e, s in zip(ids, share * c["routed_scaling_factor"], strict=True):
                q = f"{p}experts.{e}."
                inner = self.act(z[t] @ self[q + "w1"].T, z[t] @ self[q + "w3"].T)
                y[t] += s * (inner @ self[q + "w2"].T)
        if has_latent:
            if c.get("latent_moe_use_norm"):
                y = rms(y, self[p + "routed_expert_norm"], self.eps)
            y = y @ self[p + "routed_expert_up_proj"].T
        return y + self.mlp(p + "shared_experts.", x) if c.get("num_shared_experts") else y

    def mix(self, name: str, entries: list[Array]) -> Array:
        e = np.stack(entries)
        unit = e / np.sqrt((e * e).mean(-1, keepdims=True) + self.eps)
        scores = (unit * self[name + "_norm"] * self[name + "_proj"].reshape(-1)).sum(-1)
        return (softmax(scores.T).T[..., None] * e).sum(0)

    def sublayers(self, i: int) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
        p, c = f"model.layers.{i}.", self.c
        attend = self.kda if i + 1 in self.linear["kda_layers"] else self.mla
        routed = i >= c["first_k_dense_replace"] and i % c.get("moe_layer_freq", 1) == 0
        feed, place = (self.moe, "block_sparse_moe.") if routed else (self.mlp, "mlp.")
        return lambda x: attend(p + "self_attn.", x), lambda x: feed(p + place, x)

    def logits(self, ids: list[int]) -> Array:
        x, bank, block = self["model.embed_tokens"][ids], [], self.c.get("attn_res_block_size")
        for i in range(self.c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            norms = self[p + "input_layernorm"], self[p + "post_attention_layernorm"]
            attend, feed = self.sublayers(i)
            if block is None:
                x = x + attend(rms(x, norms[0], self.eps))
                x = x + feed(rms(x, norms[1], self.eps))
                continue
            h = self.mix(p + "self_attention_res", [*bank, x]) if bank else x
            starts = i % block == 0
            if starts:
                bank.append(x)
            a = attend(rms(h, norms[0], self.eps))
            x = a if starts else x + a
            x = x + feed(rms(self.mix(p + "mlp_res", [*bank, x]), norms[1], self.eps))
        if block is not None:
            x = self.mix("model.output_attn_res", [*bank, x])
        head = "model.embed_tokens" if self.c.get("tie_word_embeddings") else "lm_head"
        return rms(x, self["model.norm"], self.eps) @ self[head].T
