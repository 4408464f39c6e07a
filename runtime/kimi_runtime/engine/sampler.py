"""Drawing the next id of one request from its logits.

The draw is a function of (logits, request, position) alone: the random number comes from a counter,
not from a generator with a state, so batch mates, preemption and a move to another worker change
nothing. numpy, not torch: one row of a vocabulary is too small to pay for a tensor library's
dispatch, and whoever only needs the types stays free of torch.

Order of the steps, as other engines have it: grammar and `min_tokens` exclude ids, and so does a
`logit_bias` of -100, which OpenAI calls a ban; other biases are added to the logits; repetition,
frequency and presence penalties; temperature; `min_p`; `top_k`; `top_p` over what is left,
renormalised. Reported log probabilities are of the model's own distribution, before all of these.
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kimi_runtime.errors import KimistackError
from kimi_runtime.spec.request import BANS, Sampling, TokenLogprob

Logits = NDArray[np.float32]

_LIKELY_NUCLEI = (1024, 16_384, 0)  # ids sorted until they are enough; 0: all


class NothingAllowed(KimistackError):
    """Every id is excluded at this position, so that none can be drawn."""


class GrammarMask(Protocol):
    """A constraint on the next id, advanced by what was accepted."""

    def allowed(self) -> bytes | None:
        """Bit i of the little-endian 32-bit words: id i is allowed. None: all are."""

    def accept(self, id_: int) -> None:
        """The id was emitted."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same everywhere for the same arguments."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8, person=b"kimi-draw")
    return (int.from_bytes(digest.digest(), "little") >> 11) * 2.0**-53


class RequestSampler:
    """The sampling state of one request. `draw` changes nothing; `accept` advances it.

    `random_seed` is used where the request has no seed of its own: pick one per request.
    `eos_ids` are held back until `min_tokens` ids were accepted, as are the request's `stop_ids`.
    Ids from `vocab_size` on are never drawn, however wide the logits are.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt_ids: Sequence[int],
        vocab_size: int,
        grammar: GrammarMask | None = None,
        *,
        random_seed: int,
        eos_ids: Sequence[int] = (),
    ) -> None:
        self.sampling = sampling
        self.vocab_size = vocab_size
        self.position = len(prompt_ids)
        """Position in the sequence of the id that `draw` would draw: the counter of the draws."""
        self.accepted = 0
        self._grammar = grammar
        self._seed = random_seed if sampling.seed is None else sampling.seed
        self._held_back = _ids_below(vocab_size, (*eos_ids, *sampling.stop_ids))
        self._bias_ids = _ids_below(vocab_size, tuple(sampling.logit_bias))
        self._bias = np.array(
            [
                -np.inf if value <= BANS else value
                for id_, value in sampling.logit_bias.items()
                if id_ < vocab_size
            ],
            np.float32,
        )
        self._penalises = (
            sampling.repetition_penalty != 1.0
            or sampling.frequency_penalty != 0.0
            or sampling.presence_penalty != 0.0
        )
        self._counts = np.zeros(vocab_size if self._penalises else 0, np.int32)
        self._in_prompt = np.zeros(self._counts.size, np.bool_)
        if self._penalises:
            self._in_prompt[_ids_below(vocab_size, prompt_ids)] = True

    @property
    def takes_argmax(self) -> bool:
        """The next draw is the lowest id with the greatest raw logit, and nothing is reported.

        A runner may then take the argmax of many rows in one operation instead of calling `draw`.
        """
        return (
            self.sampling.temperature == 0.0
            and self.sampling.logprobs is None
            and self._grammar is None
            and not self._penalises
            and not self._bias.size
            and not self._holds_back
        )

    @property
    def _holds_back(self) -> bool:
        return self.accepted < self.sampling.min_tokens and self._held_back.size > 0

    def draw(self, logits: Logits) -> tuple[int, TokenLogprob | None]:
        """The id for `position`, and its log probability where the request asks for it.

        `logits` [at least vocab_size] are finite. Raises NothingAllowed when grammar, `min_tokens`
        and bias leave no id.
        """
        raw = logits[: self.vocab_size]
        chosen = self._choose(self._adjusted(raw))
        wanted = self.sampling.logprobs
        return chosen, None if wanted is None else token_logprob(raw, chosen, wanted)

    def accept(self, id_: int) -> None:
        """The id was emitted: it counts for penalties, `min_tokens`, grammar and the position."""
        self.position += 1
        self.accepted += 1
        if self._penalises and id_ < self.vocab_size:
            self._counts[id_] += 1
        if self._grammar is not None:
            self._grammar.accept(id_)

    def _adjusted(self, raw: Logits) -> Logits:
        """Logits after exclusion, bias and penalties; excluded ids have -inf."""
        logits = raw.copy()
        if self._bias.size:
            logits[self._bias_ids] += self._bias
        if self._penalises:
            self._penalise(logits)
        if self._holds_back:
            logits[self._held_back] = -np.inf
        allowed = self._grammar.allowed() if self._grammar is not None else None
        if allowed is not None:
            bits = np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little")
            logits[: bits.size][bits[: logits.size] == 0] = -np.inf
            logits[bits.size :] = -np.inf
        return logits

    def _penalise(self, logits: Logits) -> None:
        sampling = self.sampling
        emitted = self._counts > 0
        seen = emitted | self._in_prompt
        factor = np.float32(sampling.repetition_penalty)
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / factor, values * factor)
        logits -= np.float32(sampling.frequency_penalty) * self._counts.astype(np.float32)
        logits[emitted] -= np.float32(sampling.presence_penalty)

    def _choose(self, logits: Logits) -> int:
        best = int(logits.argmax())  # the first of equals: the lowest id
        top = float(logits[best])
        if top == -np.inf:
            raise NothingAllowed(
                f"no id is allowed at position {self.position}: the grammar, min_tokens and "
                "logit_bias exclude all of them; loosen one of them"
            )
        if self.sampling.temperature == 0.0:
            return best
        scaled = (logits.astype(np.float64) - top) / self.sampling.temperature
        weights = np.exp(scaled, out=scaled)
        self._filter(weights)
        mass = np.cumsum(weights)
        at = int(np.searchsorted(mass, uniform(self._seed, self.position) * mass[-1], "right"))
        # the product can round up to the whole mass: the last id with any of it is meant then
        return min(at, int(np.searchsorted(mass, mass[-1], "left")))

    def _filter(self, weights: NDArray[np.float64]) -> None:
        """Zero what min_p, top_k and top_p drop. The greatest weight is 1 and always stays."""
        sampling = self.sampling
        if sampling.min_p > 0.0:
            weights[weights < sampling.min_p] = 0.0
        if 0 < sampling.top_k < weights.size:
            _keep(weights, _descending(weights, sampling.top_k))
        if sampling.top_p < 1.0:
            _keep(weights, _nucleus(weights, sampling.top_p))


def token_logprob(logits: Logits, chosen: int, top: int) -> TokenLogprob:
    """Natural-log probabilities of `chosen` and of the `top` most likely ids (lowest id first).

    log softmax of the logits as they are, summed in fp64.
    """
    values = logits.astype(np.float64)
    peak = values.max()
    shift = peak + np.log(np.exp(values - peak).sum())
    likely = _descending(values, top) if top else np.empty(0, np.int64)
    return TokenLogprob(
        id=chosen,
        logprob=float(values[chosen] - shift),
        top=tuple((int(id_), float(values[id_] - shift)) for id_ in likely),
    )


def _keep(weights: NDArray[np.float64], ids: NDArray[np.int64]) -> None:
    kept = weights[ids]
    weights[:] = 0.0
    weights[ids] = kept


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """The fewest ids, greatest weight first, that hold at least `top_p` of the mass."""
    held = np.flatnonzero(weights)
    values = weights[held]
    wanted = top_p * values.sum()
    for limit in _LIKELY_NUCLEI:
        order = _descending(values, limit)
        mass = np.cumsum(values[order])
        if mass[-1] >= wanted:
            break
    return held[order[: int(np.searchsorted(mass, wanted, "left")) + 1]]


def _descending(values: NDArray[np.float64], limit: int) -> NDArray[np.int64]:
    """Indices by falling value, equal ones by rising index; the first `limit`, 0: all.

    Partitioned first: sorting 160 thousand values to keep 20 costs fifty times as much.
    """
    if not limit or limit >= values.size:
        return np.argsort(-values, kind="stable")
    bound = np.partition(values, values.size - limit)[values.size - limit]
    candidates = np.flatnonzero(values >= bound)
    return candidates[np.argsort(-values[candidates], kind="stable")][:limit]


def _ids_below(size: int, ids: Sequence[int]) -> NDArray[np.int64]:
    return np.array([id_ for id_ in ids if id_ < size], np.int64)
