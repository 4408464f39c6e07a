"""Where text is cut before byte-pair encoding, exactly as Kimi's own tokenizer wrapper cuts it.

The wrapper splits its whole input every 400,000 characters, and inside each such block a run of
more than 25,000 whitespace or non-whitespace characters every 25,000 (facts: the K2 tokenizer
files). Both are token boundaries at absolute offsets, so ids depend on where in the rendered
conversation a text lies: a `Position` carries that from one segment to the next.
"""

import re
from dataclasses import dataclass

BLOCK_CHARS = 400_000
RUN_CHARS = 25_000

# A run longer than RUN_CHARS fills at least one whole window of half that size.
_WINDOW_CHARS = RUN_CHARS // 2
# `\s` of a str pattern is str.isspace, which is what the wrapper asks.
_RUN = re.compile(r"\s+|\S+")
_SPACES = re.compile(r"\s+")
_OTHERS = re.compile(r"\S+")


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the rendered conversation, counted in characters (code points).

    `run_chars` characters before it are of one kind (whitespace or not, as `run_is_space` says)
    and not yet cut; 0 at the start of a block.
    """

    chars: int = 0
    run_chars: int = 0
    run_is_space: bool = False

    def after(self, text: str) -> "Position":
        """The position behind `text`."""
        return cut(text, self)[1]


START = Position()


def cut(text: str, at: Position = START) -> tuple[list[str], Position]:
    """The pieces of `text` that are encoded separately, and the position behind it.

    The pieces join to `text` and none is empty. Linear in `len(text)`.
    """
    pieces: list[str] = []
    begin = 0
    while begin < len(text):
        room = BLOCK_CHARS - at.chars % BLOCK_CHARS
        block = text[begin : begin + room]
        begin += len(block)
        at = _cut_block(block, at, pieces)
    return pieces, at


def _cut_block(block: str, at: Position, pieces: list[str]) -> Position:
    """Append the pieces of a non-empty text that crosses no block boundary."""
    run_chars = at.run_chars if at.run_is_space == block[0].isspace() else 0
    if _may_exceed(block, run_chars):
        run_chars = _cut_runs(block, run_chars, pieces)
    else:
        pieces.append(block)
        tail = _tail_run(block)
        run_chars = tail + (run_chars if tail == len(block) else 0)
    chars = at.chars + len(block)
    if chars % BLOCK_CHARS == 0:
        return Position(chars)
    return Position(chars, run_chars, block[-1].isspace())


def _may_exceed(block: str, run_chars: int) -> bool:
    """Whether some run, the carried one included, can be longer than RUN_CHARS."""
    if run_chars + len(block) <= RUN_CHARS:
        return False
    kind = _SPACES if block[0].isspace() else _OTHERS
    head = kind.match(block, 0, min(len(block), RUN_CHARS + 1))
    if head is not None and run_chars + head.end() > RUN_CHARS:
        return True
    for start in range(0, len(block) - _WINDOW_CHARS + 1, _WINDOW_CHARS):
        stop = start + _WINDOW_CHARS
        kind = _SPACES if block[start].isspace() else _OTHERS
        if kind.fullmatch(block, start, stop):
            return True
    return False


def _cut_runs(block: str, run_chars: int, pieces: list[str]) -> int:
    """Append the pieces, cut every RUN_CHARS inside a run; return the last run's uncut length."""
    piece_start = 0
    for run in _RUN.finditer(block):
        start, stop = run.span()
        carried = run_chars if start == 0 else 0
        for offset in range(start + RUN_CHARS - carried, stop, RUN_CHARS):
            if offset > piece_start:
                pieces.append(block[piece_start:offset])
            piece_start = offset
        run_chars = (carried + stop - start - 1) % RUN_CHARS + 1
    pieces.append(block[piece_start:])
    return run_chars


def _tail_run(block: str) -> int:
    """Length of the run of one kind that ends the block."""
    spaces = len(block) - len(block.rstrip())
    return spaces or len(block.rsplit(maxsplit=1)[-1])
