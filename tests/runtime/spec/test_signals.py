"""What several routers say together: samples add up, workers count once, parked requests add up."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.spec.signals import (
    FORMER_S,
    RouterSignals,
    Spread,
    WorkerSignal,
    bucket_of,
    fleet_signals,
    quantile,
    value_of,
    workers_of,
)
from kimi_runtime.spec.worker import Role


def worker(name="p", role=Role.PREFILL, **changes) -> WorkerSignal:
    fields = {
        "ready": True,
        "draining": False,
        "silent_s": 0.1,
        "in_flight": 0,
        "waiting": 0,
        "queued_tokens": 0,
        "free_blocks": 100,
        "total_blocks": 100,
    }
    return WorkerSignal(name=name, role=role, **(fields | changes))


def router(name="r", **changes) -> RouterSignals:
    empty = Spread()
    fields = {
        "uptime_s": 1000.0,
        "known_for_s": 1000.0,
        "window_s": 60.0,
        "in_flight": 0,
        "ttft": empty,
        "itl": empty,
        "hand_off": empty,
    }
    return RouterSignals(router=name, **(fields | changes))


@given(st.floats(1e-4, 1000.0))
def test_a_bucket_tells_its_values_to_within_five_percent(value):
    assert value_of(bucket_of(value)) == pytest.approx(value, rel=0.051)


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(1e-3, 100.0), max_size=20), min_size=1, max_size=4))
def test_the_quantiles_of_several_routers_are_those_of_all_their_samples(samples):
    routers = []
    for number, values in enumerate(samples):
        counts: dict[int, int] = {}
        for value in values:
            counts[bucket_of(value)] = counts.get(bucket_of(value), 0) + 1
        routers.append(router(f"r{number}", ttft=Spread.of(counts)))
    every = sorted(value for values in samples for value in values)
    found = fleet_signals(routers).ttft_p95_s
    if not every:
        assert found is None
        return
    exact = every[max(math.ceil(0.95 * len(every)) - 1, 0)]
    assert found == pytest.approx(exact, rel=0.051)


def test_no_sample_has_no_quantile():
    assert quantile({}, 0.9) is None


def test_a_workers_load_counts_once_however_many_routers_tell_of_it():
    told = worker(waiting=3, in_flight=5, queued_tokens=900)
    routers = [router(n, workers=(told,), prefill_tokens_per_s=100.0) for n in ("a", "b", "c")]
    both = fleet_signals(routers)
    assert (both.waiting_requests, both.waiting_tokens) == (3, 900)
    assert both.queue_s == pytest.approx(9.0)


def test_the_most_in_flight_is_believed_and_the_newest_report_otherwise():
    old = worker(silent_s=3.0, in_flight=7, waiting=6, cached_tokens=10)
    new = worker(silent_s=0.1, in_flight=2, waiting=1, draining=True)
    found = workers_of([router("a", workers=(old,)), router("b", workers=(new,))])["p"]
    assert (found.in_flight, found.waiting, found.cached_tokens, found.draining) == (7, 1, 10, True)


def test_a_router_without_a_report_hides_nothing():
    blind = worker(in_flight=None, waiting=None, queued_tokens=None, silent_s=None)
    found = workers_of([router("a", workers=(blind,)), router("b", workers=(worker(in_flight=4),))])
    assert found["p"].in_flight == 4


def test_parked_requests_add_up_and_the_oldest_is_the_queue_while_nothing_runs():
    routers = [
        router("a", parked_requests=2, parked_tokens=50, oldest_parked_s=4.0),
        router("b", parked_requests=1, parked_tokens=10, oldest_parked_s=9.0),
    ]
    found = fleet_signals(routers)
    assert (found.waiting_requests, found.waiting_tokens, found.queue_s) == (3, 60, 9.0)


def test_an_idle_fleet_has_a_queue_of_nothing_and_one_without_a_rate_has_none():
    assert fleet_signals([router(workers=(worker(),))]).queue_s == 0.0
    busy = router(workers=(worker(queued_tokens=10),))
    assert fleet_signals([busy]).queue_s is None


def test_kv_use_is_of_those_that_decode_and_ready():
    workers = (
        worker("p", free_blocks=0),
        worker("d", Role.DECODE, free_blocks=25),
        worker("e", Role.DECODE, free_blocks=0, ready=False),
    )
    assert fleet_signals([router(workers=workers)]).kv_use == pytest.approx(0.75)


def test_sessions_held_for_want_of_memory_wait_and_need_more_than_there_is():
    workers = (worker("d", Role.DECODE, free_blocks=90),)  # the rest is cached for paused sessions
    held = router(
        "a",
        workers=workers,
        held_requests=3,
        held_tokens=700,
        session_tokens=900,
        session_capacity_tokens=1000,
    )
    other = router("b", workers=workers, session_tokens=400, session_capacity_tokens=1000)
    found = fleet_signals([held, other, router("old", workers=workers)])
    assert (found.waiting_requests, found.waiting_tokens) == (3, 700)
    assert found.kv_use == pytest.approx((900 + 700 + 400) / 2000)
    assert fleet_signals([other]).kv_use == pytest.approx(0.1)


def test_the_hand_off_backlog_is_the_oldest_that_waits_or_what_nine_in_ten_waited():
    hand_off = Spread.of({bucket_of(0.2): 10})
    alone = router(workers=(worker(role=Role.BOTH),), hand_off=hand_off)
    assert fleet_signals([alone]).transfer_backlog_s is None
    pair = router(workers=(worker(),), hand_off=hand_off)
    assert fleet_signals([pair]).transfer_backlog_s == pytest.approx(0.2, rel=0.06)
    stuck = pair.model_copy(update={"hand_off_pending_s": 5.0})
    assert fleet_signals([stuck]).transfer_backlog_s == 5.0


def test_silence_is_never_said_to_be_longer_than_is_known():
    young = router(known_for_s=12.0, workers=(worker(silent_s=None),), former={"x": 3.0})
    assert (young.silent_s("p"), young.silent_s("x"), young.silent_s("never")) == (12.0, 3.0, 12.0)
    assert router(known_for_s=1e6).silent_s("never") == FORMER_S


def test_what_a_newer_router_adds_is_ignored():
    text = router().model_dump_json().replace("{", '{"news": [1], ', 1)
    assert RouterSignals.model_validate_json(text) == router()
