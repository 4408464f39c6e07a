"""Training: batches in, masters changed, everything needed to go on written to one file."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kimi_runtime.models.rows import padded_rows
from kimi_runtime.protocol.vocabulary import Vocabulary
from kimi_runtime.spec.model import ModelSpec
from kimi_runtime.training.initial import initial_masters
from kimi_runtime.training.model import TrainingK2
from kimi_runtime.training.optimiser import Optimiser, Rates
from kimi_runtime.training.weights import Masters, gradients_of, leaves_of

_LENGTHS = (32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024)
_BIAS_STEP = 5e-3  # five times DeepSeek-V3's gamma: there are so few steps


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids, and the places whose ids the model is to predict."""

    ids: tuple[int, ...]
    answers: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """Rates rise over `warm_up` steps, stay, and fall to 0 from `decay_from` on.

    Attention's projections begin with a purpose (`training.circuits`), which is lost if they change
    much before the rest makes use of it: their rates are `projections` of the matrices', and take
    `projections_warm_up` steps to rise.
    Routed experts pass through MXFP4 from `quantise_from` on. Fractions are of `steps`.
    """

    steps: int
    matrices: float = 6e-3
    others: float = 4e-3
    weight_decay: float = 0.1
    warm_up: int = 30
    projections: float = 0.3
    projections_warm_up: int = 200
    decay_from: float = 0.55
    quantise_from: float = 0.85

    def rates(self, step: int) -> Rates:
        """Of the step with this number, from 0."""
        matrices = self.matrices * self._share(step)
        return Rates(
            matrices=matrices,
            projections=self.projections
            * matrices
            * min(1.0, (step + 1) / self.projections_warm_up),
            others=self.others * self._share(step),
            decay=self.weight_decay,
        )

    def _share(self, step: int) -> float:
        """Of the full rates."""
        left = (self.steps - step) / max(1.0, self.steps * (1 - self.decay_from))
        return min(1.0, left) * min(1.0, (step + 1) / self.warm_up)

    def quantises(self, step: int) -> bool:
        """Whether this step's experts are rounded."""
        return step >= self.quantise_from * self.steps


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step saw. `right` is the share of answer tokens predicted by the greatest logit."""

    step: int
    loss: float
    right: float
    tokens: int
    answers: int
    busiest: float


BatchOf = Callable[[int], Sequence[Sequence[Example]]]
"""The micro-batches of a step, by its number alone: that makes a resumed run equal the other."""


class Training:
    """A model being trained. `step` is the number of steps made."""

    def __init__(
        self,
        spec: ModelSpec,
        schedule: Schedule,
        vocabulary: Vocabulary,
        *,
        seed: int,
        positions: int,
        structured: bool = True,
    ) -> None:
        self.spec, self.schedule = spec, schedule
        masters, held = initial_masters(spec, seed, vocabulary, structured=structured)
        self.masters: Masters = masters
        self._held = {name: (mask, masters[name].clone()) for name, mask in held.items()}
        self.optimiser = Optimiser()
        self.tokens = 0
        self._model = TrainingK2(spec, positions=positions, dtype=torch.bfloat16)

    @property
    def step(self) -> int:
        """Steps made so far."""
        return self.optimiser.steps

    def advance(self, batch: Sequence[Sequence[Example]]) -> StepReport:
        """Make one step over the micro-batches."""
        step, schedule = self.step, self.schedule
        leaves = leaves_of(self.masters, torch.bfloat16, quantise=schedule.quantises(step))
        answers = sum(len(example.answers) for part in batch for example in part)
        loss_sum = right = 0.0
        loads = torch.zeros(self.spec.moe_layers, self.spec.moe.experts)
        for part in batch:
            ids, places, wanted = pack(part)
            hidden, load = self._model.hidden(leaves, ids)
            logits = self._model.logits(leaves, hidden[places])
            loss = functional.cross_entropy(logits, wanted, ignore_index=-1, reduction="sum")
            (loss / answers).backward()  # type: ignore[no-untyped-call]
            loss_sum += float(loss.detach())
            right += int((logits.detach().argmax(-1) == wanted).sum())
            loads += load
            self.tokens += ids.numel()
        self.optimiser.step(self.masters, gradients_of(self.masters, leaves), schedule.rates(step))
        for name, (mask, values) in self._held.items():
            self.masters[name].copy_(torch.where(mask, values, self.masters[name]))
        self._balance(loads)
        return StepReport(
            step=step,
            loss=loss_sum / answers,
            right=right / answers,
            tokens=self.tokens,
            answers=answers,
            busiest=float((loads / loads.mean(1, keepdim=True)).max()),
        )

    def _balance(self, loads: Tensor) -> None:
        """Raise the bias of experts with less than their share, lower the others'."""
        dense = self.spec.first_dense_layers
        for row, load in enumerate(loads):
            change = _BIAS_STEP * (load.mean() - load).sign()
            self.masters[f"{dense + row}.router_bias"] += change

    def save(self, path: Path) -> None:
        """Write everything to `path`; a crash at any moment leaves the old or the new file."""
        state: dict[str, Any] = {
            "masters": self.masters,
            "first": self.optimiser.first,
            "second": self.optimiser.second,
            "steps": self.optimiser.steps,
            "tokens": self.tokens,
        }
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a file that `save` wrote."""
        state = torch.load(path, weights_only=True)
        self.masters = state["masters"]
        self.optimiser = Optimiser(state["steps"], state["first"], state["second"])
        self.tokens = state["tokens"]


def padded_length(tokens: int) -> int:
    """What an example is padded to: few lengths, since a matrix library prepares a kernel for each
    shape that it meets. Beyond the last, multiples of it.
    """
    for length in _LENGTHS:
        if tokens <= length:
            return length
    return -(-tokens // _LENGTHS[-1]) * _LENGTHS[-1]


def pack(examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """ids [B, S], flat places [N] whose hidden state predicts an answer, and the answers [N].

    Shorter examples are padded behind: nothing looks ahead, so padding changes nothing. N is a
    row count of the ladder, for the matrix library's sake; answers beyond the real ones are -1.
    """
    length = padded_length(max(len(example.ids) for example in examples))
    ids = torch.zeros(len(examples), length, dtype=torch.int64)
    places: list[int] = []
    wanted: list[int] = []
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        places += [row * length + place - 1 for place in example.answers]
        wanted += [example.ids[place] for place in example.answers]
    missing = padded_rows(len(places)) - len(places)
    return (
        ids,
        torch.tensor(places + [0] * missing),
        torch.tensor(wanted + [-1] * missing),
    )
