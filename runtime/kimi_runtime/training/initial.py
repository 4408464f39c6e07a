"""Where training starts: random matrices that already contain the circuits that copying needs.

A small model learns nothing about copying until it has found, by chance, heads that look at the
tokens before, and a head behind them that looks for places where the same tokens came before
(Olsson et al., "In-context Learning and Induction Heads", arXiv 2209.11895). Here the first
layer's heads begin by looking 1 to 4 tokens back, and two of the second layer's by comparing what
they brought (`training.circuits`); the rest is random.

Four tokens do not always tell places apart: `type read_` begins the names of several tools, and
every parameter stands behind ` = (_: {`. A third head of the second layer looks 4 tokens back and
brings what is 5 to 8 tokens back from here, and two of the third layer compare that too.

Names and values change their first token with what stands before them (`d`, ` d`, `_d`, `.d`), and
copying them means to see through that: tokens that differ in such a mark alone begin alike.
"""

import torch
from torch import Tensor

from kimi_runtime.models.tensors import k2_tensors
from kimi_runtime.protocol.vocabulary import Vocabulary
from kimi_runtime.spec.model import ModelSpec
from kimi_runtime.training.circuits import CONSTANT, Circuits, Held, rope_rows
from kimi_runtime.training.weights import Masters, names_of

_HEAD_GAIN = 0.02
_MARKS = (b" ", b"_", b".")
_ALIKE = 0.9


def initial_masters(
    spec: ModelSpec, seed: int, vocabulary: Vocabulary, *, structured: bool = True
) -> tuple[Masters, Held]:
    """What training starts with, the same for the same seed, and what of it stays so. Without
    `structured` every matrix is random.

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
    masters["embedding"][:, 0] = CONSTANT
    masters["head"] = masters["embedding"] * _HEAD_GAIN
    masters["head"][:, 0] = 0.0
    if not structured:
        return masters, {}
    circuits = Circuits(spec, masters, generator)
    circuits.look_back()
    circuits.compare()
    circuits.look_further_back()
    circuits.compare_further()
    circuits.keep_constant()
    return masters, circuits.held


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
        rope_rows(values, spec).mul_(0.1)
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
