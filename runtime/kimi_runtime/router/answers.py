"""Answers on their way at each worker: when the blocks they hold should become free. Pure."""

from dataclasses import dataclass

from kimi_runtime.router.estimate.outputs import Length

MAX_RELEASES = 64


@dataclass(slots=True)
class _Answer:
    prompt_tokens: int
    length: Length
    made: int = 0


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
        answer = self._workers.get(worker, {}).get(name)
        if answer is not None:
            answer.made += tokens

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
        ends = sorted(
            (one.length.remaining(one.made) * step_s, one.prompt_tokens + one.made)
            for one in answers.values()
        )
        return tuple((at_s, -(-held // block_tokens)) for at_s, held in ends[:MAX_RELEASES])
