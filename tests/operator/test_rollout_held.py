"""What a person asks of a rollout from outside it: an instance to be replaced, or to start none."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_operator.observed import InstanceId, InstanceView
from kimi_operator.rollout import Revisions, RolloutView, all_steps, next_step

A, B = "aaaaaa", "bbbbbb"
VIEW = RolloutView(shape={"prefill": 4, "decode": 8})
TO_B = Revisions(B, (A, B))
NOW_S = 10_000.0
counts = st.integers(1, 4)


def fleet(revision: str, prefill: int, decode: int) -> list[InstanceView]:
    ids = [InstanceId("prefill", revision, n) for n in range(prefill)]
    ids += [InstanceId("decode", revision, n) for n in range(decode)]
    return [InstanceView(i, 1, 1, serving=True, in_flight=0, ready_since_s=0.0) for i in ids]


@given(counts, counts, st.sets(st.integers(0, 7), min_size=1), st.booleans())
@settings(max_examples=50, deadline=None)
def test_what_was_asked_to_go_goes_and_is_replaced(
    prefill: int, decode: int, chosen: set[int], rolling: bool
):
    """Whatever else is under way, and without a GPU more than before."""
    there = fleet(A if rolling else B, prefill, decode)
    marked = [
        replace(one, evicted=True) if index in chosen else one for index, one in enumerate(there)
    ]
    targets = {"prefill": prefill, "decode": decode}
    view = replace(VIEW, max_gpus=4 * prefill + 8 * decode, allow_outage=True)
    step = next_step(view, marked, TO_B, targets, NOW_S)
    asked = {one.id for one in marked if one.evicted}
    assert asked <= step.drain
    assert not step.instances - {one.id for one in there}, "nothing new while it holds its GPUs"
    stages = all_steps(view, marked, TO_B, targets, NOW_S)
    assert stages[-1].done
    assert stages[-1].serving == targets
    assert max(stage.gpus for stage in stages) <= view.max_gpus
    created = {one for stage in stages for one in stage.created}
    assert len(created) == (prefill + decode if rolling else len(asked))


@given(counts, counts, counts, counts)
@settings(max_examples=50, deadline=None)
def test_held_nothing_of_the_new_revision_starts_and_what_serves_goes_on(
    prefill: int, decode: int, more_prefill: int, more_decode: int
):
    view = replace(VIEW, hold="preflight: looking")
    targets = {"prefill": more_prefill, "decode": more_decode}
    there = fleet(A, prefill, decode)
    step = next_step(view, there, TO_B, targets, NOW_S)
    created = step.instances - {one.id for one in there}
    assert all(one.revision == A for one in created), "what is missing comes from what serves"
    kept = [one for one in there if one.id in step.instances - step.drain]
    for role in ("prefill", "decode"):
        left = sum(one.id.role == role for one in kept)
        assert left >= min(targets[role], sum(one.id.role == role for one in there))
    assert not step.done
    assert step.waiting_for == "preflight: looking"


@given(counts, counts)
@settings(max_examples=20, deadline=None)
def test_held_a_new_deployment_starts_nothing(prefill: int, decode: int):
    view = replace(VIEW, hold="preflight: looking")
    targets = {"prefill": prefill, "decode": decode}
    step = next_step(view, [], Revisions(B), targets, NOW_S)
    assert step.instances == frozenset()
    assert step.waiting_for == "preflight: looking"
