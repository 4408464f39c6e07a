"""Muon for matrices, AdamW for the rest.

Muon orthogonalises a matrix's momentum before the step (Jordan et al. 2024); the scale that makes
its steps as large as AdamW's, so that both share a learning rate, is Moonshot's (arXiv 2502.16982).
Both work on fp32 masters outside of autograd.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kimi_runtime.training.weights import Masters

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_MOMENTUM = 0.95
_BETAS = (0.9, 0.98)
_EPS = 1e-10
_PROJECTIONS = ("q_down", "q_up", "kv_down", "kv_up")


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates of one step. `projections` are attention's from hidden states to heads."""

    matrices: float
    projections: float
    others: float
    decay: float


def is_matrix(name: str) -> bool:
    """Whether Muon updates it: embeddings, head, router and norms are AdamW's."""
    return not name.endswith(("norm", "router", "router_bias", "embedding", "head"))


@dataclass(slots=True)
class Optimiser:
    """State: Muon's momentum, AdamW's two moments, and the number of steps made."""

    steps: int = 0
    first: dict[str, Tensor] = field(default_factory=dict)
    second: dict[str, Tensor] = field(default_factory=dict)

    def step(self, masters: Masters, gradients: Mapping[str, Tensor], rates: Rates) -> None:
        """Change `masters` in place."""
        self.steps += 1
        for name, gradient in gradients.items():
            first = self.first.setdefault(name, torch.zeros_like(gradient))
            if is_matrix(name):
                first.lerp_(gradient, 1 - _MOMENTUM)
                update = orthogonal(gradient.lerp(first, _MOMENTUM))
                update *= 0.2 * max(update.shape[-2:]) ** 0.5
                rate = rates.projections if name.endswith(_PROJECTIONS) else rates.matrices
            else:
                second = self.second.setdefault(name, torch.zeros_like(gradient))
                first.lerp_(gradient, 1 - _BETAS[0])
                second.lerp_(gradient.square(), 1 - _BETAS[1])
                scale = (second / (1 - _BETAS[1] ** self.steps)).sqrt_().add_(_EPS)
                update = first / (1 - _BETAS[0] ** self.steps) / scale
                rate = rates.others
            if masters[name].dim() > 1:
                masters[name].mul_(1 - rate * rates.decay)
            masters[name].sub_(update, alpha=rate)


def orthogonal(matrix: Tensor) -> Tensor:
    """[..., M, N] -> near the closest matrix with all singular values 1, by Newton-Schulz in bf16.

    The coefficients do not converge: singular values end between 0.7 and 1.2, which is enough.
    """
    a, b, c = _NEWTON_SCHULZ
    x = matrix / (matrix.norm(dim=(-2, -1), keepdim=True) + 1e-12)
    x = x.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    result: Tensor = x.mT if tall else x
    return result.float()
