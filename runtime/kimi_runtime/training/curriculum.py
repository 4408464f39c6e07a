"""Which examples a step trains on: from short copies to whole dialogues.

A step's examples follow from its number and the seed alone.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kimi_runtime.bench.quality.dialogues import Dialogues
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

    It lasts up to `until`, where 1 is the end of the run.

    `longest` bounds an example's ids; `exchanges` and `tools` are the most a dialogue has. In the
    share `thinking` of the dialogues the assistant thinks before it answers; in the share `kept`
    earlier thoughts stay in the prompt. `alike` is how often tools' topics end alike.
    """

    until: float
    shares: Mapping[str, int]
    length: int
    longest: int
    tools: int = 1
    exchanges: int = 1
    text_tokens: int = 40
    thinking: float = 0.7
    kept: float = 0.0
    alike: float = 0.0


_COPIES = {"repeated": 2, "pieces": 1, "pairs": 1, "rewritten": 1, "sections": 1}
_DIALOGUES = Stage(
    until=0.5,
    shares={"dialogue": 12, "sections": 3, "pairs": 1, "rewritten": 1},
    length=256,
    longest=640,
    tools=3,
    exchanges=2,
    text_tokens=160,
    thinking=0.9,
    alike=0.4,
)
_ALL_TOOLS = replace(_DIALOGUES, tools=4, exchanges=3)

STAGES = (
    Stage(0.03, _COPIES, 112, 160),
    Stage(0.10, {"repeated": 1, "pieces": 1, "pairs": 3, "rewritten": 3, "sections": 6}, 160, 256),
    replace(
        _DIALOGUES,
        until=0.28,
        shares={"dialogue": 10, "sections": 5, "pairs": 1, "pieces": 1, "rewritten": 1},
        length=224,
        longest=384,
        tools=2,
        exchanges=1,
        text_tokens=80,
    ),
    _DIALOGUES,
    replace(
        _ALL_TOOLS,
        until=0.72,
        shares={"dialogue": 14, "sections": 2, "pieces": 1, "lookup": 1},
        length=320,
        longest=1024,
        text_tokens=240,
        kept=0.3,
    ),
    replace(
        _ALL_TOOLS,
        until=0.85,
        shares={"dialogue": 10, "pieces": 1, "lookup": 2},
        length=1024,
        longest=2048,
        text_tokens=1200,
        alike=0.3,
    ),
    replace(
        _ALL_TOOLS,
        until=1.0,
        shares={"dialogue": 16, "sections": 1, "lookup": 1},
        length=320,
        longest=1280,
        text_tokens=400,
        kept=0.3,
        alike=0.3,
    ),
)


class Curriculum:
    """Batches of `batch_tokens` ids, in micro-batches; a run has `steps` of them."""

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
            stage.alike: Dialogues(words, haystack, alike=stage.alike) for stage in stages
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
        left = self._batch_tokens
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
        dialogues = self._dialogues[stage.alike]
        if kind == "dialogue":
            dialogue = dialogues.draw(
                draw,
                tools=draw.randint(1, stage.tools),
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
