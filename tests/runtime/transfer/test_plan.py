"""The span planner."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.transfer.base import Span
from kimi_runtime.transfer.plan import MIN_CHUNK_BYTES, merge, spread, total_bytes

CHUNK = 16
disjoint = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 3), st.integers(0, 3)), max_size=20
)


def laid_out(pieces):
    """Spans whose gaps on either side may be 0, so that some are contiguous."""
    spans, remote, local = [], 0, 0
    for size, remote_gap, local_gap in pieces:
        remote, local = remote + remote_gap, local + local_gap
        spans.append(Span(remote, local, size))
        remote, local = remote + size, local + size
    return spans


def byte_map(spans):
    return {span.local + n: span.remote + n for span in spans for n in range(span.size)}


@settings(max_examples=50, deadline=None)
@given(disjoint, st.randoms(use_true_random=False))
def test_merging_moves_the_same_bytes_and_leaves_nothing_contiguous(pieces, shuffler):
    spans = laid_out(pieces)
    shuffled = shuffler.sample(spans, len(spans))
    merged = merge(shuffled)
    assert byte_map(merged) == byte_map(spans)
    for one, two in itertools.pairwise(merged):
        assert (one.remote + one.size, one.local + one.size) != (two.remote, two.local)


@settings(max_examples=50, deadline=None)
@given(disjoint, st.integers(1, 6))
def test_spreading_moves_every_byte_once_and_cuts_nothing_small(pieces, streams):
    spans = laid_out(pieces)
    plans = spread(spans, streams, chunk_bytes=CHUNK)
    flat = [span for plan in plans for span in plan]
    assert byte_map(flat) == byte_map(spans)
    assert total_bytes(flat) == total_bytes(spans)
    assert len(plans) <= streams
    assert all(plans)
    whole = set(merge(spans))
    assert all(span.size >= CHUNK for span in flat if span not in whole)


def test_one_large_span_is_shared_equally():
    plans = spread([Span(0, 0, 4 << 20)], 4)
    assert [total_bytes(plan) for plan in plans] == [1 << 20] * 4


def test_a_span_too_small_to_cut_stays_whole():
    assert spread([Span(0, 0, 2 * MIN_CHUNK_BYTES - 2)], 4) == (
        (Span(0, 0, 2 * MIN_CHUNK_BYTES - 2),),
    )


def test_blocks_side_by_side_become_one_request():
    block = 64 << 10
    spans = [Span(n * block, 7 + n * block, block) for n in range(64)]
    assert merge(reversed(spans)) == [Span(0, 7, 64 * block)]


def test_no_streams_is_refused():
    with pytest.raises(ValueError, match="0 streams"):
        spread([], 0)
