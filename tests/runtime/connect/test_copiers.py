"""How a batch is shared out among threads."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_connect.copiers import LEAST_BYTES, Copiers, leading


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 4 << 20), max_size=40), st.integers(1, 5))
def test_runs_cover_every_block_once_and_in_order(sizes, threads):
    copiers = Copiers(threads)
    runs = copiers.run(sizes, lambda run: list(range(run.start, run.stop)))
    copiers.close()
    assert [place for _, places in runs for place in places] == list(range(len(sizes)))
    assert len(runs) <= threads
    assert all(sum(sizes[run]) >= LEAST_BYTES for run, _ in runs[:-1])


def test_runs_are_copied_at_once():
    together = threading.Barrier(2, timeout=20)
    copiers = Copiers(2)
    assert len(copiers.run([LEAST_BYTES] * 2, lambda run: together.wait())) == 2
    copiers.close()


def test_a_failure_is_raised_once_every_thread_has_ended():
    ended = []

    def work(run):
        if run.start == 0:
            raise ZeroDivisionError
        ended.append(run.start)

    copiers = Copiers(3)
    with pytest.raises(ZeroDivisionError):
        copiers.run([LEAST_BYTES] * 3, work)
    assert sorted(ended) == [1, 2]
    copiers.close()


def test_what_follows_an_unfinished_run_does_not_count():
    runs = [(slice(0, 3), 3), (slice(3, 6), 1), (slice(6, 9), 3)]
    assert leading(runs) == 4
    assert leading([]) == 0
