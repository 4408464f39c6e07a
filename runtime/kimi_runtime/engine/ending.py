"""When a generation is over: ids, strings, and how many. Pure but for the vocabulary's text."""

from collections.abc import Collection

from kimi_runtime.protocol.incremental import Detokenizer, StopStrings
from kimi_runtime.protocol.vocabulary import Vocabulary
from kimi_runtime.spec.request import FinishReason, Sampling


class Ending:
    """Looks at each sampled id. At most `most_ids` are wanted.

    The id that ends a generation is part of it, and so is text behind a stop string that came with
    the same id: whoever shows the text cuts it.
    """

    def __init__(
        self, sampling: Sampling, *, eos_ids: Collection[int], most_ids: int, vocabulary: Vocabulary
    ) -> None:
        ends = set(sampling.stop_ids)
        if not sampling.ignore_eos:
            ends.update(eos_ids)
        self._ends = frozenset(ends)
        self.most_ids = most_ids
        self._least = sampling.min_tokens
        self._count = 0
        self._text = Detokenizer(vocabulary) if sampling.stop_strings else None
        self._strings = StopStrings(sampling.stop_strings)

    def after(self, sampled: int) -> FinishReason | None:
        """Why it ends with this id; None if it goes on."""
        self._count += 1
        text = self._text.feed([sampled]) if self._text is not None else ""
        if self._count > self._least:  # a match needs an id behind the minimum to complete it
            self._strings.feed(text)
            if sampled in self._ends or self._strings.match is not None:
                return FinishReason.STOP
        return FinishReason.LENGTH if self._count >= self.most_ids else None
