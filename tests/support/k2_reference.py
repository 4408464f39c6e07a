"""The K2 decoder written a second time: numpy, fp64, one token at a time, nothing shared.

Straight from the formulas: expanded attention, experts one by one, no cache, no padding.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kimi_runtime.spec.model import ModelSpec, RopeSpec

Array = NDArray[np.float64]


def reference_logits(spec: ModelSpec, weights: Mapping[str, Array], ids: tuple[int, ...]) -> Array:
    """[len(ids), vocab]."""
    x = weights["model.embed_tokens.weight"][list(ids)]
    for index in range(spec.layers):
        own = {
            name.removeprefix(f"model.layers.{index}."): value
            for name, value in weights.items()
            if name.startswith(f"model.layers.{index}.")
        }
        x = x + attention(spec, own, _norm(x, own["input_layernorm.weight"], spec.norm_eps))
        y = _norm(x, own["post_attention_layernorm.weight"], spec.norm_eps)
        if index < spec.first_dense_layers:
            x = x + _swiglu(own, "mlp", y)
        else:
            x = x + np.stack([experts(spec, own, row) for row in y])
    x = _norm(x, weights["model.norm.weight"], spec.norm_eps)
    return x @ weights["lm_head.weight"].T


def attention(spec: ModelSpec, own: Mapping[str, Array], x: Array) -> Array:
    nope, rope, latent = spec.qk_nope_dim, spec.qk_rope_dim, spec.kv_lora_rank
    if spec.q_lora_rank is None:
        q = x @ own["self_attn.q_proj.weight"].T
    else:
        c_q = x @ own["self_attn.q_a_proj.weight"].T
        c_q = _norm(c_q, own["self_attn.q_a_layernorm.weight"], spec.latent_norm_eps)
        q = c_q @ own["self_attn.q_b_proj.weight"].T
    q = q.reshape(len(x), spec.heads, nope + rope)
    down = x @ own["self_attn.kv_a_proj_with_mqa.weight"].T
    c = _norm(down[:, :latent], own["self_attn.kv_a_layernorm.weight"], spec.latent_norm_eps)
    up = (c @ own["self_attn.kv_b_proj.weight"].T).reshape(len(x), spec.heads, nope + spec.v_dim)
    out = np.zeros((len(x), spec.heads, spec.v_dim))
    keys_r = np.stack([turn(spec.rope, down[t, latent:], t) for t in range(len(x))])
    for t in range(len(x)):
        for h in range(spec.heads):
            q_r = turn(spec.rope, q[t, h, nope:], t)
            scores = up[: t + 1, h, :nope] @ q[t, h, :nope] + keys_r[: t + 1] @ q_r
            weights = np.exp((scores - scores.max()) * scale(spec))
            out[t, h] = (weights / weights.sum()) @ up[: t + 1, h, nope:]
    return out.reshape(len(x), -1) @ own["self_attn.o_proj.weight"].T


def scale(spec: ModelSpec) -> float:
    yarn = spec.rope.yarn if spec.rope else None
    m = 0.1 * yarn.mscale_all_dim * np.log(yarn.factor) + 1.0 if yarn else 1.0
    return float(m * m / np.sqrt(spec.qk_nope_dim + spec.qk_rope_dim))


def turn(rope: RopeSpec | None, x: Array, position: int) -> Array:
    """Rotate pairs (x0, x1), (x2, x3), ... as complex numbers."""
    if rope is None:
        return x
    pairs = x[0::2] + 1j * x[1::2]
    turned = pairs * np.exp(1j * position * yarn_frequencies(rope, x.size))
    if rope.yarn is not None:
        log = 0.1 * np.log(rope.yarn.factor)
        turned *= (log * rope.yarn.mscale + 1) / (log * rope.yarn.mscale_all_dim + 1)
    return np.stack((turned.real, turned.imag), axis=-1).reshape(-1)


def yarn_frequencies(rope: RopeSpec, dim: int) -> Array:
    """One pair after the other, by how often it turns within the original positions."""
    result = []
    yarn = rope.yarn
    for pair in range(dim // 2):
        frequency = 1.0 / rope.theta ** (2 * pair / dim)
        if yarn is not None:
            bounds = [
                dim
                * np.log(yarn.original_positions / (2 * np.pi * beta))
                / (2 * np.log(rope.theta))
                for beta in (yarn.beta_fast, yarn.beta_slow)
            ]
            low, high = max(np.floor(bounds[0]), 0), min(np.ceil(bounds[1]), dim - 1)
            share = min(max((pair - low) / max(high - low, 0.001), 0.0), 1.0)
            frequency = (1 - share) * frequency + share * frequency / yarn.factor
        result.append(frequency)
    return np.array(result)


def experts(spec: ModelSpec, own: Mapping[str, Array], x: Array) -> Array:
    chosen, weights = route(spec, own, x)
    y = np.zeros_like(x)
    for expert, weight in zip(chosen, weights, strict=True):
        y += weight * _swiglu(own, f"mlp.experts.{expert}", x)
    return y + _swiglu(own, "mlp.shared_experts", x) if spec.moe.shared else y


def route(spec: ModelSpec, own: Mapping[str, Array], x: Array) -> tuple[list[int], Array]:
    """Expert numbers, best first, and their weights."""
    moe = spec.moe
    chances = 1 / (1 + np.exp(-(own["mlp.gate.weight"] @ x)))
    ranked = chances + own["mlp.gate.e_score_correction_bias"]
    size = moe.experts // moe.groups
    merit = [np.sort(ranked[g * size : (g + 1) * size])[-2:].sum() for g in range(moe.groups)]
    groups = sorted(range(moe.groups), key=lambda g: (-merit[g], g))[: moe.top_groups]
    eligible = [e for e in range(moe.experts) if e // size in groups]
    chosen = sorted(eligible, key=lambda e: (-ranked[e], e))[: moe.top_k]
    weights = chances[chosen]
    if moe.renormalise:
        weights = weights / (weights.sum() + 1e-20)
    return chosen, weights * moe.scaling


def _swiglu(own: Mapping[str, Array], prefix: str, x: Array) -> Array:
    gate = x @ own[f"{prefix}.gate_proj.weight"].T
    up = x @ own[f"{prefix}.up_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * up) @ own[f"{prefix}.down_proj.weight"].T


def _norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight
