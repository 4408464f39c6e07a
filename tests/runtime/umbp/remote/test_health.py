"""When an owner is asked, and when it is left alone."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.umbp.remote.health import (
    FAILURES,
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    OwnerHealth,
    Standing,
)

STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "answered", "failed", "undecided"]), st.floats(0, 20)),
    max_size=60,
)


def failed(health, now_s, times=FAILURES):
    for _ in range(times):
        health.began(now_s)
        health.failed(now_s)


def test_one_failure_is_forgiven_and_the_second_in_a_row_is_not():
    health = OwnerHealth()
    failed(health, 0.0, 1)
    health.answered()
    failed(health, 0.0, 1)
    assert health.usable(0.0)
    failed(health, 0.0, 1)
    assert health.standing(0.0) is Standing.QUARANTINED


def test_after_the_pause_one_fetch_decides():
    health = OwnerHealth()
    failed(health, 0.0)
    assert not health.usable(FIRST_PAUSE_S - 0.01)
    assert health.usable(FIRST_PAUSE_S)
    health.began(FIRST_PAUSE_S)
    assert health.standing(FIRST_PAUSE_S) is Standing.PROBED
    assert not health.usable(FIRST_PAUSE_S)
    health.answered()
    assert health.standing(FIRST_PAUSE_S) is Standing.GOOD


def test_a_probe_that_fails_doubles_the_pause_up_to_a_limit():
    health, now_s, pauses = OwnerHealth(), 0.0, []
    failed(health, now_s)
    for _ in range(12):
        start_s = now_s
        while not health.usable(now_s):
            now_s += 0.25
        pauses.append(now_s - start_s)
        failed(health, now_s, 1)
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == MAX_PAUSE_S


def test_a_probe_that_ended_for_our_own_reasons_is_tried_again():
    health = OwnerHealth()
    failed(health, 0.0)
    health.began(FIRST_PAUSE_S)
    health.undecided()
    assert health.standing(FIRST_PAUSE_S) is Standing.DUE


def test_fetches_that_began_before_the_quarantine_do_not_lengthen_it():
    health = OwnerHealth()
    failed(health, 0.0)
    for _ in range(10):
        health.failed(0.1)
    assert health.usable(FIRST_PAUSE_S)
    assert health.quarantines == 1


@settings(max_examples=50, deadline=None)
@given(STEPS)
def test_an_owner_always_comes_back_and_never_has_two_probes(steps):
    health, now_s, probes = OwnerHealth(), 0.0, 0
    for what, wait_s in steps:
        now_s += wait_s
        if what == "ask":
            if health.usable(now_s):
                probes += health.standing(now_s) is Standing.DUE
                health.began(now_s)
                assert probes <= 1
        else:
            getattr(health, what)(*([now_s] if what == "failed" else []))
            if health.standing(now_s) is not Standing.PROBED:
                probes = 0
    if health.standing(now_s) is Standing.PROBED:
        health.undecided()
    assert health.usable(now_s + MAX_PAUSE_S)
