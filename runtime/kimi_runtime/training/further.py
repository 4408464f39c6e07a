"""Let a trained model see one token more of what stands before a place.

The circuit that `initial` begins with looks 1, 2 and 3 tokens back. Of a declaration's topic only
the last token is in reach of its tool's verb (`… topic` `.⏎` `type` ` verb`), so topics with the
same last token are mistaken for each other.
"""

import torch

from kimi_runtime.models.rotary import frequencies
from kimi_runtime.spec.model import ModelSpec
from kimi_runtime.training.weights import Masters

_FURTHEST, _NEXT = 2, 3  # heads


def look_further(spec: ModelSpec, masters: Masters) -> None:
    """Change `masters` in place: layer 0's last head becomes the one before it, which looks 3
    tokens back, with queries turned one position further and room of its own for what it brings.
    """
    if spec.rope is None:
        raise ValueError(f"{spec.name} does not rotate")
    queries = masters["0.q_up"].view(spec.heads, spec.qk_dim, -1)
    queries[_NEXT] = queries[_FURTHEST]
    speeds = frequencies(spec.rope, spec.qk_rope_dim)[:, None].float()
    rope = queries[_NEXT, spec.qk_nope_dim :].view(spec.qk_rope_dim // 2, 2, -1)
    even, odd = rope[:, 0].clone(), rope[:, 1].clone()
    rope[:, 0] = even * speeds.cos() + odd * speeds.sin()
    rope[:, 1] = odd * speeds.cos() - even * speeds.sin()
    up = masters["0.kv_up"].view(spec.heads, spec.qk_nope_dim + spec.v_dim, -1)
    up[_NEXT] = up[_FURTHEST]
    out = masters["0.o"].view(spec.hidden, spec.heads, spec.v_dim)
    known = out[:, :_NEXT].flatten(1)
    free = torch.linalg.qr(known.double(), mode="complete").Q[:, known.shape[1] :]
    out[:, _NEXT] = free[:, : spec.v_dim].float() * out[:, _FURTHEST].norm(dim=0).mean()
