"""An engine that forgot everything is not preferred for what it had."""

from router_core import Core, keys_of

PROMPT = keys_of(400)


def warm(*names):
    core = Core(*names)
    core["a"].log.add(PROMPT)
    core["a"].connect()
    assert core.worker(PROMPT) == "a"
    return core


def test_a_clear_takes_effect_with_the_next_decision():
    """vllm-project/aibrix#2287: the wiped pod was preferred."""
    core = warm("a", "b")
    before = core["a"].log.seq
    core["a"].log.clear()
    assert core["a"].hear(core["a"].batch(before))
    _, views = core.look(PROMPT)
    assert {view.cached_tokens for view in views} == {0}
    core["a"].report(waiting=1, queued_tokens=500)
    assert core.worker(PROMPT) == "b"


def test_a_clear_that_is_lost_is_made_up_for_by_the_next_connection():
    core = warm("a", "b")
    core["a"].log.clear()
    core["a"].log.add(PROMPT[:5])
    core["a"].connect()
    _, views = core.look(PROMPT)
    assert {view.name: view.cached_tokens for view in views} == {"a": 5 * 64, "b": 0}


def test_a_worker_that_restarts_has_nothing_of_before():
    core = warm("a", "b")
    peer = core["a"]
    peer.log = type(peer.log)("a", epoch=2, tier="hbm", block_tokens=64)
    peer.connect()
    core.insight.gone("a")
    _, views = core.look(PROMPT)
    assert {view.cached_tokens for view in views} == {0}


def test_what_came_before_the_clear_does_not_come_back_with_a_late_line():
    core = warm("a", "b")
    late = core["a"].batch(0)
    before = core["a"].log.seq
    core["a"].log.clear()
    core["a"].hear(core["a"].batch(before))
    core["a"].hear(late)
    assert core.look(PROMPT)[1][0].cached_tokens == 0
