"""Who holds what, as feeds told."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.umbp.feed import FeedLog, FollowState
from kimi_runtime.umbp.index import Index


def key(n):
    return n.to_bytes(16, "big")


def log_of(*numbers, owner="a", epoch=1):
    log = FeedLog(owner, epoch=epoch, tier="dram")
    log.add(key(n) for n in numbers)
    return log


def follow(index, owner, log):
    """Bring the index up to date as a new connection does."""
    epoch, after = index.resume_point(owner)
    index.apply(owner, log.hello())
    if not log.resumes(epoch, after):
        for page in log.snapshot():
            index.apply(owner, page)
        after = log.seq
    while (batch := log.batch_after(after)) is not None and batch.events:
        index.apply(owner, batch)
        after += len(batch.events)


def test_runs_are_leading_and_owners_without_one_are_left_out():
    index = Index()
    follow(index, "a", log_of(1, 2, 4))
    follow(index, "b", log_of(1))
    follow(index, "c", log_of(2, 3))
    assert index.prefix_runs([key(n) for n in (1, 2, 3, 4)]) == {"a": 2, "b": 1}
    assert index.prefix_runs([]) == {}


def test_an_owner_is_exact_until_its_stream_ends():
    index = Index()
    assert index.state("a") is FollowState.DEGRADED
    follow(index, "a", log_of(1))
    assert index.owners() == {"a": FollowState.EXACT}
    assert index.tier("a") == "dram"
    index.disconnected("a")
    assert index.state("a") is FollowState.DEGRADED
    assert index.prefix_runs([key(1)]) == {"a": 1}


def test_a_restarted_owner_holds_nothing_of_before():
    index = Index()
    follow(index, "a", log_of(1, 2))
    follow(index, "a", log_of(2, epoch=2))
    assert index.prefix_runs([key(1)]) == {}
    assert index.prefix_runs([key(2)]) == {"a": 1}


def test_a_forgotten_owner_holds_nothing():
    index = Index()
    follow(index, "a", log_of(1))
    index.forget("a")
    index.forget("a")
    assert index.prefix_runs([key(1)]) == {}
    assert index.owners() == {}


def test_owners_and_keys_beyond_the_bounds_are_not_held():
    index = Index(max_owners=1, max_keys=2)
    follow(index, "a", log_of(1, 2, 3))
    assert (index.overflows > 0, index.keys("a")) == (True, 0)
    assert index.state("a") is FollowState.DEGRADED
    assert not index.apply("b", log_of(1).hello())
    assert index.refused_owners == 1


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "remove", "clear", "follow", "cut"]), st.integers(0, 8)),
        max_size=60,
    )
)
def test_an_exact_index_never_differs_from_its_owner(steps):
    log, index = FeedLog("a", epoch=1, tier="dram", keep_events=5), Index()
    for step, number in steps:
        match step:
            case "add":
                log.add([key(number)])
            case "remove":
                log.remove([key(number)])
            case "clear":
                log.clear()
            case "cut":
                index.disconnected("a")
            case "follow":
                follow(index, "a", log)
                assert index.state("a") is FollowState.EXACT
                held = {n for n in range(9) if index.prefix_runs([key(n)])}
                assert held == {n for n in range(9) if key(n) in log}
