import random
import re
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.protocol.cuts import BLOCK_CHARS, RUN_CHARS, START, Position, cut


def stock(text: str) -> list[str]:
    """The stock wrapper's cuts, one character at a time."""
    pieces = []
    for begin in range(0, len(text), BLOCK_CHARS):
        start, length, is_space = begin, 0, text[begin].isspace()
        stop = min(begin + BLOCK_CHARS, len(text))
        for i in range(begin, stop):
            if text[i].isspace() != is_space:
                length, is_space = 0, not is_space
            length += 1
            if length > RUN_CHARS:
                pieces.append(text[start:i])
                start, length = i, 1
        pieces.append(text[start:stop])
    return pieces


def text_of(runs: list[tuple[str, int]]) -> str:
    return "".join(char * count for char, count in runs)


RUNS = st.lists(
    st.tuples(
        st.sampled_from("a \n\u3000中"),
        st.one_of(
            st.integers(1, 30),
            st.integers(RUN_CHARS - 2, RUN_CHARS + 2),
            st.integers(1, 3 * RUN_CHARS),
        ),
    ),
    max_size=12,
)


def boundaries(pieces: list[str]) -> set[int]:
    ends, place = set(), 0
    for piece in pieces:
        place += len(piece)
        ends.add(place)
    return ends


@settings(max_examples=60, deadline=None)
@given(RUNS)
def test_cuts_are_those_of_the_stock_wrapper(runs):
    text = text_of(runs)
    assert cut(text)[0] == stock(text)


@settings(max_examples=30, deadline=None)
@given(RUNS, st.integers(0, 2**32))
def test_a_text_in_segments_is_cut_where_the_whole_is(runs, seed):
    text = text_of([("x y", 120_000), *runs])
    draw = random.Random(seed)
    splits = sorted(draw.randrange(len(text) + 1) for _ in range(6))
    at, pieces = START, []
    for begin, end in zip([0, *splits], [*splits, len(text)], strict=True):
        got, at = cut(text[begin:end], at)
        assert "".join(got) == text[begin:end]
        pieces += got
    assert boundaries(pieces) == boundaries(stock(text)) | {s for s in splits if s}
    assert at == cut(text)[1]


def test_the_position_restarts_its_run_at_every_block():
    assert cut("a" * BLOCK_CHARS)[1] == Position(BLOCK_CHARS)


def test_a_pattern_calls_whitespace_what_isspace_does():
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    assert re.findall(r"\s", everything) == [char for char in everything if char.isspace()]


def test_cutting_is_linear_for_hostile_text():
    # 24,999 spaces and one letter, over and over: no run is long enough to be cut.
    text = (" " * (RUN_CHARS - 1) + "a") * 40
    pieces, _ = cut(text)
    assert pieces == stock(text)
