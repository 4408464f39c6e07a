"""Attention heads with a purpose from the start.

Each method sets some heads of one layer, in the layers' order: a later one reads what an earlier
one brings. What is not `held` is trained like the rest.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kimi_runtime.models.rotary import frequencies
from kimi_runtime.spec.model import ModelSpec
from kimi_runtime.training.weights import Masters

CONSTANT = 4.0
"""The first element of every embedding: what positions alone can be read from."""
_PAIRS = range(5)  # rotary pairs that turn fast enough to tell neighbours apart
_SHARPNESS = 50.0
_FURTHER_SHARPNESS = 1200.0
_OFFSET = 4.5  # of the 5 that a score is where all pairs agree
_FURTHER_GAIN = 3.0
_MATCH_GAIN = 1.4
_FURTHER_MATCH_GAIN = 3.0
_FURTHER_BRING = 1.5


Held = dict[str, Tensor]
"""Masks over masters, by name: True for what is not trained."""


class Circuits:
    """Sets heads in `masters`, in place.

    The model needs three layers and heads, rotary dimensions and low-rank queries.
    """

    def __init__(self, spec: ModelSpec, masters: Masters, generator: torch.Generator) -> None:
        if spec.rope is None or spec.q_lora_rank is None:
            raise ValueError(f"{spec.name} does not rotate, or has queries of full rank")
        if min(spec.layers, spec.heads) < 3:
            raise ValueError(f"{spec.name} has fewer than three layers or heads")
        self._spec, self._masters, self._generator = spec, masters, generator
        self._speeds = frequencies(spec.rope, spec.qk_rope_dim)
        self._rank = spec.q_lora_rank
        width = min(spec.v_dim, spec.hidden // spec.heads)
        self._here = self._frame(width)
        """[width, hidden]: how layer 0 reads the token that it brings."""
        self._brought = self._frame(spec.hidden).split_with_sizes([width] * (spec.hidden // width))[
            : spec.heads
        ]
        """[width, hidden] each: where it puts the tokens 1, 2, … back, by one head each."""
        self.held: Held = {}
        """What must stay as it is: what positions are read from, and the head that looks further
        back."""
        self._part = width // spec.heads
        self._far = self._frame(spec.heads * self._part)
        """[heads * part, hidden]: where layer 1 puts the tokens behind those."""

    def look_back(self) -> None:
        """Layer 0: look 1, 2, … tokens back and bring a projection of what is there.

        With a query of phase -w d and a key of phase 0 in a pair that turns w a position, the score
        is cos(w (t - s - d)): greatest at s = t - d.
        """
        self._read_constant(0, row=0)
        self._constant_keys(0, _SHARPNESS)
        self._masters["0.kv_down"][: len(self._here)] = self._here
        for head, to in enumerate(self._brought):
            self._turn_queries(0, head, _SHARPNESS, back=head + 1, constant=0)
            self._up(0)[head, : self._spec.qk_nope_dim] = 0.0
            self._carry(0, head, first=0, to=to)

    def look_further_back(self) -> None:
        """Layer 1, head 2: look as far back as layer 0 does, and bring what that brought there.

        A score's difference to a neighbour's is a fifth of it, less than the constant varies after
        a layer; with an offset only the place itself scores above 0.
        """
        constant, first = self._rank - 1, self._spec.kv_lora_rank - len(self._far)
        self._read_constant(1, row=constant)
        self._constant_keys(1, _FURTHER_SHARPNESS)
        back = len(self._brought)
        self._turn_queries(1, 2, _FURTHER_SHARPNESS, back=back, constant=constant)
        kv_down = self._masters["1.kv_down"]
        kv_down[first - 1] = 0.0
        kv_down[first - 1, 0] = 1.0
        self._up(1)[2, : self._spec.qk_nope_dim] = 0.0
        offset = (_OFFSET * _FURTHER_SHARPNESS) ** 0.5 / CONSTANT
        self._queries(1)[2, 0] = 0.0
        self._queries(1)[2, 0, constant] = -offset
        self._up(1)[2, 0, first - 1] = offset
        for row, brought in enumerate(self._brought):
            start = first + row * self._part
            kv_down[start : start + self._part] = brought[: self._part]
        self._carry(1, 2, first=first, to=_FURTHER_GAIN * self._far)
        self._hold("1.q_down", constant)
        self._hold("1.q_norm", constant)
        self._hold("1.kv_norm", first - 1)
        self._hold("1.kv_down", slice(first - 1, None))
        for name in ("1.q_up", "1.kv_up"):
            self._hold(name, slice(2 * self._rows(name), 3 * self._rows(name)))
        width = self._spec.v_dim
        self._hold("1.o", (slice(None), slice(2 * width, 3 * width)))

    def keep_constant(self) -> None:
        """Have the first two layers leave alone what positions are read from."""
        for name in ("0.o", "0.down", "1.o", "1.down", "1.shared_down"):
            self._masters[name][..., 0, :] = 0.0
            self._hold(name, (..., 0, slice(None)))
        self._hold("embedding", (slice(None), 0))
        self._hold("1.norm", 0)

    def compare(self) -> None:
        """Layer 1, heads 0 and 1: find places preceded by what is here, and bring what came there.

        Head 0 compares the token here with the one before the place, and the one before here with
        the one before that; head 1 does so as far as layer 0 looks.
        """
        share = self._give_rows(1, self._brought)
        whole = range(len(self._brought))
        for head, compared in ((0, whole[:2]), (1, whole)):
            self._match(1, head, compared, share, _MATCH_GAIN)
            self._bring(1, head, first=len(whole) * share + head * self._spec.v_dim)

    def compare_further(self) -> None:
        """Layer 2, heads 0 and 1: the same with twice as many tokens back; head 1 leaves out what
        layer 1 compares, but for the token here.
        """
        behind = (*self._brought, *self._far.split_with_sizes([self._part] * self._spec.heads))
        share = self._give_rows(2, behind)
        whole = range(len(behind))
        further = (0, *whole[len(self._brought) :])
        for head, compared in ((0, whole), (1, further)):
            self._match(2, head, compared, share, _FURTHER_MATCH_GAIN)
            first = len(whole) * share + head * self._spec.v_dim
            self._bring(2, head, first=first, gain=_FURTHER_BRING)

    def _give_rows(self, layer: int, behind: Sequence[Tensor]) -> int:
        """Latent rows of queries for the token here and those behind it, and rows of keys for the
        same ones as seen from the token after them; how many there are of each token.
        """
        share = min((self._rank - 1) // len(behind), len(behind[-1]))
        here = (self._here, *behind[:-1])
        for place in range(len(behind)):
            rows = slice(place * share, (place + 1) * share)
            self._masters[f"{layer}.q_down"][rows] = here[place][:share]
            self._masters[f"{layer}.kv_down"][rows] = behind[place][:share]
        return share

    def _match(
        self, layer: int, head: int, compared: Sequence[int], share: int, gain: float
    ) -> None:
        """Score by the products of query and key rows of the tokens `compared`."""
        queries, up = self._queries(layer)[head], self._up(layer)[head]
        nope = self._spec.qk_nope_dim
        queries[:nope] = 0.0
        up[:nope] = 0.0
        each = min(nope // len(compared), share)
        rows = [token * share + row for token in compared for row in range(each)]
        queries[range(len(rows)), rows] = gain
        up[range(len(rows)), rows] = gain

    def _bring(self, layer: int, head: int, *, first: int, gain: float = 1.0) -> None:
        """Bring the token at the place, by latent rows from `first` on."""
        carried = self._frame(self._spec.v_dim)
        self._masters[f"{layer}.kv_down"][first : first + len(carried)] = carried
        self._carry(layer, head, first=first, to=gain * carried)

    def _carry(self, layer: int, head: int, *, first: int, to: Tensor) -> None:
        """Add latent rows from `first` on to the residual stream, along the rows of `to`."""
        values = self._up(layer)[head, self._spec.qk_nope_dim :][: len(to)]
        values[:] = 0.0
        values[:, first : first + len(to)] = torch.eye(len(to))
        out = self._masters[f"{layer}.o"].view(self._spec.hidden, self._spec.heads, -1)
        out[:, head, : len(to)] = to.T

    def _hold(self, name: str, where: Any) -> None:
        master = self._masters[name]
        self.held.setdefault(name, torch.zeros_like(master, dtype=torch.bool))[where] = True

    def _rows(self, name: str) -> int:
        """Of each head."""
        return self._masters[name].shape[0] // self._spec.heads

    def _read_constant(self, layer: int, row: int) -> None:
        self._masters[f"{layer}.q_down"][row] = 0.0
        self._masters[f"{layer}.q_down"][row, 0] = 1.0

    def _constant_keys(self, layer: int, sharpness: float) -> None:
        keys = self._masters[f"{layer}.kv_down"][self._spec.kv_lora_rank :]
        for pair in _PAIRS:
            keys[2 * pair : 2 * pair + 2] = 0.0
            keys[2 * pair, 0] = math.sqrt(sharpness) / CONSTANT

    def _turn_queries(
        self, layer: int, head: int, sharpness: float, *, back: int, constant: int
    ) -> None:
        queries = rope_rows(self._masters[f"{layer}.q_up"], self._spec)[head]
        for pair in _PAIRS:
            turn = float(self._speeds[pair]) * back
            turned = torch.tensor((math.cos(turn), -math.sin(turn)))
            queries[2 * pair : 2 * pair + 2] = 0.0
            queries[2 * pair : 2 * pair + 2, constant] = math.sqrt(sharpness) / CONSTANT * turned

    def _queries(self, layer: int) -> Tensor:
        """[heads, nope + rope, rank], a view."""
        return self._masters[f"{layer}.q_up"].view(self._spec.heads, self._spec.qk_dim, -1)

    def _up(self, layer: int) -> Tensor:
        """[heads, nope + v, latent], a view."""
        rows = self._spec.qk_nope_dim + self._spec.v_dim
        return self._masters[f"{layer}.kv_up"].view(self._spec.heads, rows, -1)

    def _frame(self, rows: int) -> Tensor:
        """[rows, hidden], rows of length 1 at right angles."""
        size = self._spec.hidden
        square = torch.randn(size, size, generator=self._generator, dtype=torch.float64)
        frame: Tensor = torch.linalg.qr(square).Q
        return frame[:rows].float()


def rope_rows(q_up: Tensor, spec: ModelSpec) -> Tensor:
    """[heads, rope, rank], a view of the query projection."""
    return q_up.view(spec.heads, spec.qk_dim, -1)[:, spec.qk_nope_dim :]
