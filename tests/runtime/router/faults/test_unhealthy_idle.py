"""A worker that is idle because it is broken attracts nothing, and harms nobody's balance."""

from collections import Counter

import pytest

from kimi_runtime.router.plan import NobodyNow
from router_core import Core, keys_of

ASK = {"prompt_tokens": 20_000}


def test_a_worker_that_is_not_ready_is_not_chosen_however_idle_it_looks():
    core = Core("broken", "busy")
    core["busy"].report(waiting=20, queued_tokens=500_000)
    core["broken"].member.ready = False
    assert core.worker(**ASK) == "busy"


def test_a_worker_that_fell_silent_is_uncertain_and_no_magnet():
    core = Core("silent", "a", "b")
    for name in "ab":
        core[name].report(now_s=10.0, waiting=1, running=4, queued_tokens=5_000)
    chosen = Counter(core.worker(now_s=10.0, session=b"%d" % n, **ASK) for n in range(50))
    assert chosen["silent"] == 0
    _, views = core.look([], now_s=10.0)
    assert {view.name: view.certain for view in views} == {"silent": False, "a": True, "b": True}


def test_the_load_of_the_unhealthy_does_not_switch_the_others_to_another_mode():
    """ROCm/ATOM's mesh counts unhealthy workers in its balance."""
    prompt = keys_of(400)
    core = Core("holder", "other", "broken")
    core["holder"].log.add(prompt)
    core["holder"].connect()
    core["broken"].member.ready = False
    for load in (0, 10_000):
        core["broken"].report(waiting=load, running=load)
        assert core.worker(prompt) == "holder"


def test_who_failed_a_request_is_left_out_and_the_rest_is_tried():
    core = Core("a", "b", "c")
    first = core.worker(**ASK)
    second = core.worker(without=[first], **ASK)
    assert second != first
    for peer in core.peers.values():
        peer.member.ready = False
    with pytest.raises(NobodyNow) as nobody:
        core.decide(**ASK)
    assert "is not ready" in str(nobody.value)


def test_fewer_sessions_than_workers_spread_over_all_of_them():
    """sglang#32983, verl#7613: ties all went to the first worker."""
    core = Core(*(f"w{n}" for n in range(4)))
    chosen = Counter(core.worker(session=b"s%d" % n, **ASK) for n in range(400))
    assert len(chosen) == 4
    assert max(chosen.values()) < 160
