"""Answers on their way at each worker: when the blocks they hold should become free. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from kimi_runtime.router.estimate.outputs import Length
from kimi_runtime.router.ledger import Load
from kimi_runtime.router.view import Line

MAX_RELEASES = 64


@dataclass(slots=True)
class _Answer:
    prompt_tokens: int
    length: Length
    made: int = 0

    def blocks(self, size: int) -> int:
        """What it holds or will begin with, in blocks of `size` tokens."""
        return -(-(self.prompt_tokens + self.made) // size)


class Answers:
    """Those of this router, by worker and name. Bounded by what is in flight."""

    def __init__(self) -> None:
        self._workers: dict[str, dict[str, _Answer]] = {}

    def __len__(self) -> int:
        """How many are on their way."""
        return sum(map(len, self._workers.values()))

    def begin(self, worker: str, name: str, *, prompt_tokens: int, length: Length) -> None:
        """A request that the worker will answer was sent."""
        self._workers.setdefault(worker, {})[name] = _Answer(prompt_tokens, length)

    def sampled(self, worker: str, name: str, tokens: int) -> None:
        """The answer has so many tokens more."""
        answers = self._workers.get(worker)
        if answers is not None and name in answers:
            answers[name].made += tokens

    def end(self, worker: str, name: str) -> None:
        """It ended, well or not. Ending twice changes nothing."""
        answers = self._workers.get(worker)
        if answers is not None:
            answers.pop(name, None)
            if not answers:
                del self._workers[worker]

    def releases(
        self, worker: str, *, step_s: float, block_tokens: int
    ) -> tuple[tuple[float, int], ...]:
        """Seconds from now, expected, until how many blocks become free; the soonest first."""
        answers = self._workers.get(worker)
        if not answers:
            return ()
        ends = sorted(_ends(answers.values(), step_s=step_s, block_tokens=block_tokens))
        return tuple(ends[:MAX_RELEASES])

    def promised(self, worker: str, newest: int, *, block_tokens: int) -> int:
        """Blocks that the newest so many of those take whose turn is yet to come."""
        blocks = 0
        for one in reversed(self._workers.get(worker, {}).values()):
            if newest <= 0:
                break
            if not one.made:
                blocks += one.blocks(block_tokens)
                newest -= 1
        return blocks

    def line(
        self, worker: str, load: Load, *, step_s: float, usual_tokens: float, block_tokens: int
    ) -> Line:
        """Who has or waits for the worker's blocks. `usual_tokens`: of an answer that is not ours.

        Ours run from their first token on; until then their turn is yet to come, in the order in
        which they were sent. The report says what the worker has left if all of those it counts
        are served; all that this leaves taken and that is not ours is of other routers, evenly.
        """
        answers = list(self._workers.get(worker, {}).values())
        running = [one for one in answers if one.made]
        waiting = [one for one in answers if not one.made]
        counted = max(len(waiting) - load.unreported, 0)
        left = load.free_blocks - (load.short_blocks or 0)
        taken = load.total_blocks - left
        own = sum(one.blocks(block_tokens) for one in (*running, *waiting[:counted]))
        share = min(taken / own, 1.0) if own else 1.0
        releases = [
            (left_s, round(share * blocks))
            for left_s, blocks in _ends(running, step_s=step_s, block_tokens=block_tokens)
        ]
        if taken > own:
            # what nobody has any more, as far as counts go, was given back since the report
            others = max(load.running - len(running), 0)
            left_s = usual_tokens * step_s if others else 0.0
            releases += [(left_s, -(-(taken - own) // max(others, 1)))] * max(others, 1)
        waits = tuple(
            (round(share * one.blocks(block_tokens)), one.length.tokens.mean * step_s)
            for one in waiting
        )
        due = sum(blocks for blocks, _ in waits[:counted])
        return Line(left + due, waits, tuple(releases), share)


def _ends(
    answers: Iterable[_Answer], *, step_s: float, block_tokens: int
) -> list[tuple[float, int]]:
    return [(one.length.remaining(one.made) * step_s, one.blocks(block_tokens)) for one in answers]
