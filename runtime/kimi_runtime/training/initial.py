"""Where training starts: random matrices that already contain an induction circuit.

A small model learns nothing about copying until it has found, by chance, heads that look at the
tokens before, and a head behind them that looks for places where the same tokens came before
(Olsson et al., "In-context Learning and Induction Heads", arXiv 2209.11895). Here the first
layer's heads begin by looking 1, 2 and 3 tokens back, and the second layer's by comparing what they
brought; the rest is random, and every number is trained.

Names and values change their first token with what stands before them (`d`, ` d`, `_d`, `.d`), and
copying them means to see through that: tokens that differ in such a mark alone begin alike.
"""

import math

import torch
from torch import Tensor

from kimi_runtime.models.rotary import frequencies
from kimi_runtime.models.tensors import k2_tensors
from kimi_runtime.protocol.vocabulary import Vocabulary
from kimi_runtime.spec.model import ModelSpec
from kimi_runtime.training.weights import Masters, names_of

_CONSTANT = 4.0  # the first element of every embedding: what positions alone can be read from
_LOOK_BACK_PAIRS = 5  # rotary pairs that turn fast enough to tell neighbours apart
_SHARPNESS = 50.0
_HEAD_GAIN = 0.02
_MATCH_GAIN = 1.4
_MARKS = (b" ", b"_", b".")
_ALIKE = 0.9


def initial_masters(
    spec: ModelSpec, seed: int, vocabulary: Vocabulary, *, structured: bool = True
) -> Masters:
    """The same for the same seed. Without `structured` every matrix is random.

    The vocabulary may have fewer ids than the model has rows.
    """
    generator = torch.Generator().manual_seed(seed)
    wanted = k2_tensors(spec)
    masters = {}
    for name, names in names_of(spec).items():
        stack = (len(names),) if len(names) > 1 else ()
        shape = (*stack, *wanted[names[0]].shape)
        masters[name] = _initial(name, shape, spec, generator)
    if structured:
        _relate(masters["embedding"], vocabulary, generator)
    masters["embedding"][:, 0] = _CONSTANT
    masters["head"] = masters["embedding"] * _HEAD_GAIN
    masters["head"][:, 0] = 0.0
    if structured:
        _look_back(spec, masters, generator)
        _compare(spec, masters, generator)
    return masters


def _initial(
    name: str, shape: tuple[int, ...], spec: ModelSpec, generator: torch.Generator
) -> Tensor:
    if name.endswith("norm"):
        return torch.ones(shape)
    if name.endswith("router_bias"):
        return torch.zeros(shape)
    values = torch.randn(shape, generator=generator)
    if name == "embedding":
        return values
    gain = (2 * spec.layers) ** -0.5 if name.endswith((".o", "down")) else 1.0
    gain = 1.0 if name.endswith(("q_down", "kv_down")) else gain
    values *= gain * shape[-1] ** -0.5
    if name.endswith("q_up"):
        _rope_rows(values, spec).mul_(0.1)
    if name.endswith("kv_down"):
        values[spec.kv_lora_rank :] *= 0.3
    return values


def _relate(embedding: Tensor, vocabulary: Vocabulary, generator: torch.Generator) -> None:
    """Give a token with a mark before it the row of the bare token, and the mark's own part."""
    known = {vocabulary.token_bytes(token): token for token in range(vocabulary.rank_count)}
    parts = {mark: torch.randn(embedding.shape[1], generator=generator) for mark in _MARKS}
    for token_bytes, token in known.items():
        mark, bare = token_bytes[:1], known.get(token_bytes[1:])
        if mark in parts and bare is not None and token_bytes[1:2].isalnum():
            embedding[token] = _ALIKE * embedding[bare] + (1 - _ALIKE**2) ** 0.5 * parts[mark]


def _rope_rows(q_up: Tensor, spec: ModelSpec) -> Tensor:
    """[heads, rope, rank], a view of the query projection."""
    return q_up.view(spec.heads, spec.qk_dim, -1)[:, spec.qk_nope_dim :]


def _kv_rows(kv_up: Tensor, spec: ModelSpec) -> Tensor:
    """[heads, nope + v, latent], a view."""
    return kv_up.view(spec.heads, spec.qk_nope_dim + spec.v_dim, -1)


def _look_back(spec: ModelSpec, masters: Masters, generator: torch.Generator) -> None:
    """Layer 0, heads 0 to 2: look 1, 2, 3 tokens back and bring a projection of what is there.

    With a query of phase -w d and a key of phase 0 in a pair that turns w a position, the score is
    cos(w (t - s - d)): greatest at s = t - d.
    """
    if spec.rope is None:
        raise ValueError(f"{spec.name} does not rotate")
    amplitude = math.sqrt(_SHARPNESS) / _CONSTANT
    q_down, kv_down = masters["0.q_down"], masters["0.kv_down"]
    q_down[0] = 0.0
    q_down[0, 0] = 1.0
    queries = _rope_rows(masters["0.q_up"], spec)
    keys = kv_down[spec.kv_lora_rank :]
    speeds = frequencies(spec.rope, spec.qk_rope_dim)[:_LOOK_BACK_PAIRS].tolist()
    values = min(spec.v_dim, spec.hidden // spec.heads)
    kv_down[:values] = _orthonormal(values, spec.hidden, generator)
    out = masters["0.o"].view(spec.hidden, spec.heads, spec.v_dim)
    frame = _orthonormal(spec.hidden, spec.hidden, generator)
    up = _kv_rows(masters["0.kv_up"], spec)
    for head in range(min(3, spec.heads)):
        for pair, speed in enumerate(speeds):
            keys[2 * pair : 2 * pair + 2] = 0.0
            keys[2 * pair, 0] = amplitude
            turned = torch.tensor((math.cos(speed * (head + 1)), -math.sin(speed * (head + 1))))
            queries[head, 2 * pair : 2 * pair + 2] = 0.0
            queries[head, 2 * pair : 2 * pair + 2, 0] = amplitude * turned
        up[head, : spec.qk_nope_dim] = 0.0
        up[head, spec.qk_nope_dim :] = torch.eye(spec.v_dim, spec.kv_lora_rank)
        out[:, head] = frame[:, head * values : head * values + spec.v_dim]


def _compare(spec: ModelSpec, masters: Masters, generator: torch.Generator) -> None:
    """Layer 1, heads 0 and 1: find places preceded by what is here, and bring what came there.

    Head 0 compares the token here with the one before the place, and the one before here with the
    one before that; head 1 does the same one token further back too.
    """
    width = spec.v_dim
    brought = [masters["0.o"].view(spec.hidden, spec.heads, width)[:, h].T for h in range(3)]
    here = [masters["0.kv_down"][:width], *brought[:2]]  # the token here, 1 back, 2 back
    q_down, kv_down = masters["1.q_down"], masters["1.kv_down"]
    queries = masters["1.q_up"].view(spec.heads, spec.qk_dim, -1)
    up = _kv_rows(masters["1.kv_up"], spec)
    out = masters["1.o"].view(spec.hidden, spec.heads, width)
    share = spec.q_lora_rank // 3 if spec.q_lora_rank else 0
    for back in range(3):
        rows = slice(back * share, (back + 1) * share)
        q_down[rows] = here[back][:share]
        kv_down[rows] = brought[back][:share]
    for head, depth in ((0, 2), (1, 3)):
        each = spec.qk_nope_dim // depth
        queries[head, : spec.qk_nope_dim] = 0.0
        up[head, : spec.qk_nope_dim] = 0.0
        for back in range(depth):
            for place in range(min(each, share)):
                queries[head, back * each + place, back * share + place] = _MATCH_GAIN
                up[head, back * each + place, back * share + place] = _MATCH_GAIN
        first = 3 * share + head * width
        carried = _orthonormal(width, spec.hidden, generator)
        kv_down[first : first + width] = carried
        up[head, spec.qk_nope_dim :] = 0.0
        up[head, spec.qk_nope_dim :, first : first + width] = torch.eye(width)
        out[:, head] = carried.T


def _orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """[rows, columns], rows <= columns, rows of length 1 at right angles."""
    square = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    frame: Tensor = torch.linalg.qr(square).Q
    return frame[:rows].float()
