"""Which examples a step trains on: from short copies to whole dialogues.

A step's examples follow from its number and the seed alone.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kimi_runtime.bench.quality.dialogues import Dialogues, Quoting
from kimi_runtime.bench.quality.haystack import Haystack
from kimi_runtime.bench.quality.words import Words
from kimi_runtime.protocol.codec_k2 import K2Codec
from kimi_runtime.protocol.vocabulary import Vocabulary
from kimi_runtime.training.loop import Example, padded_length
from kimi_runtime.training.rendering import example_of
from kimi_runtime.training.tasks import TextTasks, pieces, repeated


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the run: shares of each kind of example, and how long they are.

    It lasts up to `until`, where 1 is the end of the first cycle, and its steps have `batches`
    times the curriculum's ids.

    `longest` bounds an example's ids; `exchanges` and `tools` are the most a dialogue has, `fewest`
    the fewest tools. In the share `thinking` of the dialogues the assistant thinks before it
    answers, and before it calls a tool it quotes as `quoting` says; in the share `kept` earlier
    thoughts stay in the prompt. `alike` is how often tools' topics end alike.
    """

    until: float
    shares: dict[str, float]
    length: int
    longest: int
    tools: int = 1
    exchanges: int = 1
    text_tokens: int = 40
    thinking: float = 0.7
    quoting: Quoting = Quoting.NOTHING
    fewest: int = 1
    kept: float = 0.0
    alike: float = 0.0
    batches: int = 1


# what is hard about a call: several tools whose topics end alike, and questions without a name
_CALLS = Stage(
    until=2.1805,
    shares={"dialogue": 19, "lookup": 1},
    length=256,
    longest=1024,
    tools=4,
    exchanges=4,
    text_tokens=120,
    thinking=0.95,
    quoting=Quoting.NAMES,
    fewest=2,
    kept=0.6,
    alike=0.5,
    batches=2,
)

STAGES = (
    Stage(0.04, {"repeated": 2, "pieces": 1, "pairs": 1, "rewritten": 1}, 96, 128),
    Stage(0.12, {"repeated": 1, "pieces": 1, "pairs": 3, "rewritten": 3, "dialogue": 4}, 128, 256),
    Stage(0.35, {"pieces": 1, "pairs": 1, "rewritten": 1, "dialogue": 10}, 128, 320, 2, 1, 80),
    Stage(0.65, {"pieces": 1, "pairs": 1, "rewritten": 1, "dialogue": 12}, 256, 512, 3, 2, 160),
    Stage(0.85, {"pieces": 1, "pairs": 1, "dialogue": 12, "lookup": 1}, 512, 768, 4, 3, 400),
    Stage(1.00, {"pieces": 1, "dialogue": 10, "lookup": 2}, 1024, 2048, 4, 3, 1200),
    Stage(1.60, {"pairs": 1, "dialogue": 14, "lookup": 1}, 256, 1280, 4, 3, 600),
    Stage(2.05, {"dialogue": 19, "lookup": 1}, 256, 768, 4, 3, 160, 0.85, Quoting.WORDS),
    _CALLS,
    replace(_CALLS, until=2.4305, shares={"sections": 8, "dialogue": 4}, length=384, batches=1),
    replace(
        _CALLS,
        until=2.497,
        shares={"sections": 4, "dialogue": 10, "lookup": 1},
        length=384,
        text_tokens=200,
        batches=1,
    ),
    replace(
        _CALLS,
        until=2.647,
        shares={"sections": 1, "dialogue": 14, "lookup": 1},
        length=320,
        exchanges=3,
        text_tokens=300,
        fewest=1,
        kept=0.3,
        alike=0.3,
        batches=1,
    ),
)


class Curriculum:
    """Batches of `batch_tokens` ids, in micro-batches; the first cycle has `steps` of them."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        seed: int,
        steps: int,
        batch_tokens: int,
        micro_tokens: int,
        stages: Sequence[Stage] = STAGES,
    ) -> None:
        self._seed, self._steps = seed, steps
        self._batch_tokens, self._micro_tokens = batch_tokens, micro_tokens
        self._stages = stages
        self._codec = K2Codec(vocabulary)
        words = Words(vocabulary, held_out=False)
        haystack = Haystack(vocabulary, words)
        self._dialogues = {
            (stage.quoting, stage.alike): Dialogues(
                words, haystack, quoting=stage.quoting, alike=stage.alike
            )
            for stage in stages
        }
        text = TextTasks(vocabulary, words)
        self._tasks: dict[str, Callable[[random.Random, int], Example]] = {
            "repeated": lambda draw, length: repeated(draw, length, vocabulary),
            "pieces": lambda draw, length: pieces(draw, length, vocabulary),
            "pairs": text.pairs,
            "rewritten": text.rewritten,
            "sections": text.sections,
        }

    @property
    def positions(self) -> int:
        """The longest example there can be."""
        return max(stage.longest for stage in self._stages)

    def batch(self, step: int) -> list[list[Example]]:
        """The step's micro-batches: full ones, of examples of similar length.

        Examples are drawn until enough of the lengths are full; what is left over is dropped.
        """
        draw = random.Random(f"{self._seed}/{step}")
        reached = [stage for stage in self._stages if step < stage.until * self._steps]
        stage = (reached or self._stages[-1:])[0]
        open_rows: dict[int, list[Example]] = {}
        full: list[list[Example]] = []
        left = self._batch_tokens * stage.batches
        while left > 0:
            example = self._example(draw, stage)
            if not example.answers or len(example.ids) > stage.longest:
                continue
            length = padded_length(len(example.ids))
            rows = open_rows.setdefault(length, [])
            rows.append(example)
            if len(rows) == max(1, round(self._micro_tokens / length)):
                full.append(open_rows.pop(length))
                left -= len(rows) * length
        return full

    def _example(self, draw: random.Random, stage: Stage) -> Example:
        kind = draw.choices(list(stage.shares), weights=list(stage.shares.values()))[0]
        dialogues = self._dialogues[stage.quoting, stage.alike]
        if kind == "dialogue":
            dialogue = dialogues.draw(
                draw,
                tools=draw.randint(stage.fewest, stage.tools),
                exchanges=draw.randint(1, stage.exchanges),
                text_tokens=stage.text_tokens,
                thinking=draw.random() < stage.thinking,
            )
            kept = stage.kept and draw.random() < stage.kept
            return example_of(dialogue, self._codec, keep_reasoning=bool(kept))
        if kind == "lookup":
            size = draw.randint(stage.text_tokens // 2, stage.text_tokens)
            thinking = draw.random() < stage.thinking
            lookup = dialogues.lookup(draw, text_tokens=size, thinking=thinking)
            return example_of(lookup, self._codec)
        return self._tasks[kind](draw, draw.randint(stage.length // 2, stage.length))
