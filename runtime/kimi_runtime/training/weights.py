"""The weights under training: fp32 masters, the fused leaves that products use, and checkpoints.

Masters have one tensor for each matrix that the optimiser treats as one, with a layer's experts
stacked: `{layer}.gate` [E, ffn, hidden]. Leaves join those that are multiplied with the same input.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kimi_runtime.models.tensors import k2_tensors
from kimi_runtime.spec.model import ModelSpec
from kimi_runtime.training.autograd import through_mxfp4

Masters = dict[str, Tensor]

_JOINED = {
    "down_qkv": ("q_down", "kv_down"),
    "gate_up": ("gate", "up"),
    "shared_gate_up": ("shared_gate", "shared_up"),
}
_LAYER = {
    "norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "q_down": "self_attn.q_a_proj",
    "q_norm": "self_attn.q_a_layernorm",
    "q_up": "self_attn.q_b_proj",
    "kv_down": "self_attn.kv_a_proj_with_mqa",
    "kv_norm": "self_attn.kv_a_layernorm",
    "kv_up": "self_attn.kv_b_proj",
    "o": "self_attn.o_proj",
}
_DENSE = {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_MOE = {f"shared_{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_MOE["router"] = "mlp.gate"
_WHOLE = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}


def leaves_of(masters: Masters, dtype: torch.dtype, *, quantise: bool) -> dict[str, Tensor]:
    """What `TrainingK2` multiplies with: rounded copies that collect gradients.

    With `quantise` routed experts get the value they will have once saved as MXFP4; the router's
    bias collects nothing.
    """
    groups: dict[str, list[Tensor]] = {}
    for name, master in masters.items():
        routed = quantise and master.dim() == 3
        value = through_mxfp4(master) if routed else master
        groups.setdefault(_leaf_of(name)[0], []).append(value)
    return {
        name: values[0].clone()
        if name.endswith("router_bias")
        else torch.cat(values, dim=-2 if values[0].dim() > 1 else 0).to(dtype).requires_grad_()
        for name, values in groups.items()
    }


def gradients_of(masters: Masters, leaves: Mapping[str, Tensor]) -> Masters:
    """Each master's gradient, fp32, cut out of its leaf's."""
    result = {}
    for name, master in masters.items():
        leaf, place = _leaf_of(name)
        gradient = leaves[leaf].grad
        if gradient is None:
            continue
        if place is not None:
            rows = master.shape[-2]
            gradient = gradient[..., :rows, :] if place == 0 else gradient[..., -rows:, :]
        result[name] = gradient.float()
    return result


def _leaf_of(master: str) -> tuple[str, int | None]:
    """The leaf that holds a master, and its place among the two that are joined there."""
    layer, dot, part = master.rpartition(".")
    for leaf, parts in _JOINED.items():
        if part in parts:
            return f"{layer}{dot}{leaf}", parts.index(part)
    return master, None


def names_of(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Hugging Face names of each master; a stack of experts has one name for each."""
    names: dict[str, tuple[str, ...]] = {master: (name,) for master, name in _WHOLE.items()}
    for index in range(spec.layers):
        prefix = f"model.layers.{index}."
        dense = index < spec.first_dense_layers
        own = _LAYER | (_DENSE if dense else _MOE)
        names |= {f"{index}.{part}": (f"{prefix}{name}.weight",) for part, name in own.items()}
        if dense:
            continue
        names[f"{index}.router_bias"] = (f"{prefix}mlp.gate.e_score_correction_bias",)
        for part in _DENSE:
            names[f"{index}.{part}"] = tuple(
                f"{prefix}mlp.experts.{expert}.{part}_proj.weight"
                for expert in range(spec.moe.experts)
            )
    return names


def masters_of(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> Masters:
    """Masters with the values of a checkpoint's tensors."""
    return {
        master: (
            torch.stack([tensors[name].float() for name in names])
            if len(names) > 1
            else tensors[names[0]].float().clone()
        )
        for master, names in names_of(spec).items()
    }


def tensors_of(spec: ModelSpec, masters: Masters) -> dict[str, Tensor]:
    """The masters, fp32, under Hugging Face names in the order of `k2_tensors`."""
    result: dict[str, Tensor] = {}
    for master, names in names_of(spec).items():
        parts = masters[master].unbind(0) if len(names) > 1 else (masters[master],)
        result |= zip(names, parts, strict=True)
    return {name: result[name] for name in k2_tensors(spec)}
