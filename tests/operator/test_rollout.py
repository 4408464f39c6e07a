"""Rollouts: named cases, and a cluster that does everything at the worst moment."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kimi_operator.observed import InstanceId, InstanceView
from kimi_operator.rollout import (
    Revisions,
    RolloutView,
    Step,
    all_steps,
    choose_victims,
    next_step,
)

A, B, C = "aaaaaa", "bbbbbb", "cccccc"
GPUS = {"prefill": 4, "decode": 8}
PAIRED = RolloutView(shape=GPUS)
TO_B = Revisions(B, (A, B))
NOW_S = 10_000.0


def instance(role: str, revision: str, index: int = 0, **changes) -> InstanceView:
    ready = InstanceView(
        InstanceId(role, revision, index), 1, 1, serving=True, in_flight=0, ready_since_s=0.0
    )
    return replace(ready, **changes)


def loading(role: str, revision: str, index: int = 0, **changes) -> InstanceView:
    new = {"pods_ready": 0, "serving": False, "ready_since_s": None, "created_s": NOW_S}
    return instance(role, revision, index, **{**new, **changes})


def fleet(revision: str, prefill: int, decode: int) -> list[InstanceView]:
    counts = {"prefill": prefill, "decode": decode}
    return [instance(role, revision, n) for role, count in counts.items() for n in range(count)]


def step_of(view, instances, targets, revisions=TO_B, now_s=NOW_S) -> Step:
    return next_step(view, instances, revisions, targets, now_s)


def pd(prefill: int, decode: int) -> dict[str, int]:
    return {"prefill": prefill, "decode": decode}


def drained_of(step: Step) -> Counter:
    return Counter((i.role, i.revision) for i in step.drain)


def created_by(step: Step, instances: Iterable[InstanceView]) -> Counter:
    here = {i.id for i in instances}
    return Counter((i.role, i.revision) for i in step.instances if i not in here)


def test_a_new_deployment_gets_all_instances_at_once():
    step = step_of(PAIRED, [], pd(2, 3), Revisions(A))
    assert created_by(step, []) == {("prefill", A): 2, ("decode", A): 3}


def test_a_finished_rollout_asks_for_nothing():
    step = step_of(PAIRED, fleet(B, 2, 2), pd(2, 2))
    assert (step.done, step.waiting_for, step.drain, step.outage) == (True, None, frozenset(), None)
    assert step.instances == {i.id for i in fleet(B, 2, 2)}


def test_without_surge_a_pair_is_drained_before_its_successors_are_created():
    step = step_of(PAIRED, fleet(A, 2, 2), pd(2, 2))
    assert drained_of(step) == {("prefill", A): 1, ("decode", A): 1}
    assert created_by(step, fleet(A, 2, 2)) == {}


def test_no_instance_of_the_new_revision_is_scaled_beyond_its_step():
    after = [instance("prefill", A), instance("decode", A)]
    step = step_of(PAIRED, after, pd(2, 2))
    assert created_by(step, after) == {("prefill", B): 1, ("decode", B): 1}


def test_the_last_prefill_and_decode_of_a_revision_leave_together():
    now = [*fleet(A, 1, 1), *fleet(B, 1, 7)]
    assert drained_of(step_of(PAIRED, now, pd(2, 8))) == {("prefill", A): 1, ("decode", A): 1}


def test_the_last_old_prefill_stays_while_old_decodes_need_it():
    now = [*fleet(A, 1, 5), *fleet(B, 1, 3)]
    assert drained_of(step_of(PAIRED, now, pd(2, 8))) == {("decode", A): 1}


def test_single_instances_wait_for_the_outage_to_be_allowed():
    step = step_of(PAIRED, fleet(A, 1, 1), pd(1, 1))
    assert step.outage is not None
    assert "single instance" in step.outage
    assert "allowOutage" in step.waiting_for
    assert step.instances == {i.id for i in fleet(A, 1, 1)}
    assert not step.drain


def test_an_allowed_outage_takes_all_down_and_is_still_named():
    step = step_of(replace(PAIRED, allow_outage=True), fleet(A, 1, 1), pd(1, 1))
    assert drained_of(step) == {("prefill", A): 1, ("decode", A): 1}
    assert step.outage is not None


def test_workers_of_both_roles_make_the_outage_unnecessary():
    view = replace(PAIRED, either_role=True)
    stages = all_steps(view, fleet(A, 1, 1), TO_B, pd(1, 1), NOW_S)
    assert stages[-1].done
    assert all(stage.outage is None for stage in stages)
    assert min(sum(stage.serving.values()) for stage in stages) == 1


def test_surge_makes_the_outage_unnecessary():
    stages = all_steps(replace(PAIRED, max_surge=1), fleet(A, 1, 1), TO_B, pd(1, 1), NOW_S)
    assert stages[-1].done
    assert all(stage.serving["prefill"] and stage.serving["decode"] for stage in stages)


def test_surge_that_the_budget_has_no_room_for_creates_nothing_useless():
    view = replace(PAIRED, max_surge=1, max_gpus=16)
    step = step_of(view, fleet(A, 1, 1), pd(1, 1))
    assert step.instances == {i.id for i in fleet(A, 1, 1)}
    assert "budget.maxGPUs" in step.outage


def test_not_ready_old_instances_consume_the_budget_of_unavailability():
    now = [instance("decode", A, 0), instance("decode", A, 1), loading("decode", A, 2)]
    step = step_of(RolloutView(shape={"decode": 8}), now, {"decode": 3})
    assert step.instances == {now[0].id, now[1].id}  # the broken one goes, no other


def test_a_fleet_that_never_got_ready_is_replaced_without_waiting_for_it():
    now = [loading("prefill", A), loading("decode", A)]
    assert step_of(PAIRED, now, pd(1, 1)).instances == frozenset()


def test_an_overtaken_revision_goes_first():
    now = [*fleet(A, 3, 3), loading("prefill", B), loading("decode", B)]
    step = step_of(PAIRED, now, pd(4, 4), Revisions(C, (A, B, C)))
    assert step.instances == {i.id for i in fleet(A, 3, 3)}


def test_scaling_up_during_a_rollout_adds_instances_of_the_new_revision():
    now = [*fleet(A, 1, 1), *fleet(B, 1, 1)]
    step = step_of(PAIRED, now, pd(4, 4))
    assert created_by(step, now) == {("prefill", B): 2, ("decode", B): 2}


def test_scaling_alone_restarts_nothing():
    step = step_of(PAIRED, fleet(B, 2, 2), pd(3, 4))
    assert {i.id for i in fleet(B, 2, 2)} <= step.instances
    assert not step.drain


def test_a_paused_rollout_finishes_its_step_and_starts_none():
    view = replace(PAIRED, paused=True)
    before = step_of(view, fleet(A, 2, 2), pd(2, 2))
    assert before.instances == {i.id for i in fleet(A, 2, 2)}
    assert "paused" in before.waiting_for
    halfway = [*fleet(A, 1, 1), loading("prefill", B)]
    assert created_by(step_of(view, halfway, pd(2, 2)), halfway) == {("decode", B): 1}
    between = [*fleet(A, 1, 1), *fleet(B, 1, 1)]
    assert step_of(view, between, pd(2, 2)).instances == {i.id for i in between}


def test_what_is_lost_while_paused_comes_back_in_the_revision_that_serves():
    now = fleet(A, 1, 2)
    step = step_of(replace(PAIRED, paused=True), now, pd(2, 2))
    assert created_by(step, now) == {("prefill", A): 1}


def test_a_pause_takes_back_a_drain_that_has_begun():
    leaving = instance("decode", A, 1, draining=True, serving=False, draining_since_s=NOW_S)
    now = [*fleet(A, 2, 1), leaving]
    step = step_of(replace(PAIRED, paused=True), now, pd(2, 2))
    assert (leaving.id in step.instances, step.drain) == (True, frozenset())


def test_a_canary_is_reached_and_passed_only_when_it_is_removed():
    view = replace(PAIRED, canary=1)
    stages = all_steps(view, fleet(A, 3, 6), TO_B, pd(3, 6), NOW_S)
    assert "canary" in stages[-1].waiting_for
    now = [*fleet(A, 2, 5), *fleet(B, 1, 1)]
    assert step_of(view, now, pd(3, 6)).instances == {i.id for i in now}
    assert step_of(PAIRED, now, pd(3, 6)).drain


def test_scaling_up_beside_a_canary_keeps_it_a_canary():
    now = [*fleet(A, 2, 2), *fleet(B, 1, 1)]
    step = step_of(replace(PAIRED, canary=1), now, pd(4, 4))
    assert created_by(step, now) == {("prefill", A): 1, ("decode", A): 1}


def test_going_back_keeps_what_still_drains():
    leaving = [
        instance(role, A, 1, draining=True, serving=False, draining_since_s=NOW_S) for role in GPUS
    ]
    now = [*fleet(A, 1, 1), *leaving, loading("prefill", B), loading("decode", B)]
    step = step_of(replace(PAIRED, to_revision=A), now, pd(2, 2))
    assert (step.target_revision, step.drain) == (A, frozenset())
    assert step.instances == {i.id for i in (*fleet(A, 1, 1), *leaving)}


def test_an_unknown_revision_to_go_back_to_changes_nothing():
    step = step_of(replace(PAIRED, to_revision="ffffff"), fleet(A, 2, 2), pd(2, 2))
    assert step.instances == {i.id for i in fleet(A, 2, 2)}
    assert "ffffff" in step.waiting_for


def failing(**changes) -> list[InstanceView]:
    since = NOW_S - PAIRED.progress_deadline_s - 1
    new = [
        loading(role, B, 0, created_s=since, failures=("ImagePullBackOff: no such image",))
        for role in GPUS
    ]
    return [*fleet(A, 1, 1), *(replace(i, **changes) for i in new)]


def test_a_failed_step_pauses_and_says_why():
    step = step_of(PAIRED, failing(), pd(2, 2))
    assert step.instances == {i.id for i in failing()}
    assert "ImagePullBackOff" in step.waiting_for
    assert "progressDeadline" in step.waiting_for
    assert step.failed is None


def test_a_failed_step_goes_on_once_it_is_ready():
    now = [*fleet(A, 1, 1), *fleet(B, 1, 1)]
    assert step_of(PAIRED, now, pd(2, 2)).drain


def test_a_rollback_marks_the_revision_before_it_undoes_anything():
    view = replace(PAIRED, on_failure="Rollback")
    step = step_of(view, failing(), pd(2, 2))
    assert (step.failed, step.instances) == (B, {i.id for i in failing()})
    marked = replace(TO_B, failed=frozenset({B}))
    back = step_of(view, failing(), pd(2, 2), marked)
    assert back.target_revision == A
    assert back.instances == {i.id for i in fleet(A, 1, 1)}
    assert back.failed is None


def test_a_rollback_does_not_go_forward_again_once_the_failed_instances_are_gone():
    view = replace(PAIRED, on_failure="Rollback")
    marked = replace(TO_B, failed=frozenset({B}))
    step = step_of(view, fleet(A, 1, 1), pd(2, 2), marked)
    assert created_by(step, fleet(A, 1, 1)) == {("prefill", A): 1, ("decode", A): 1}


def test_a_revision_that_fails_after_an_outage_is_rolled_back_too():
    view = replace(PAIRED, on_failure="Rollback", allow_outage=True)
    now = [i for i in failing() if i.id.revision == B]
    assert step_of(view, now, pd(1, 1)).failed == B


def test_an_instance_that_breaks_long_after_the_rollout_undoes_nothing():
    view = replace(PAIRED, on_failure="Rollback")
    broken = loading("decode", B, 1, created_s=0.0, unready_since_s=1.0)
    assert step_of(view, [*fleet(B, 2, 1), broken], pd(2, 2)).failed is None


def test_blue_and_green_switch_at_once():
    view = replace(PAIRED, strategy="BlueGreen")
    part = [*fleet(A, 2, 2), *fleet(B, 2, 1), loading("decode", B, 1)]
    step = step_of(view, part, pd(2, 2))
    assert (step.routed, step.drain) == (frozenset({A}), frozenset())
    step = step_of(view, [*fleet(A, 2, 2), *fleet(B, 2, 2)], pd(2, 2))
    assert (step.routed, len(step.drain)) == (frozenset({B}), 4)


def test_a_pause_holds_blue_and_green_before_the_switch():
    view = replace(PAIRED, strategy="BlueGreen", paused=True)
    now = [*fleet(A, 2, 2), *fleet(B, 2, 2)]
    step = step_of(view, now, pd(2, 2))
    assert (step.routed, step.instances) == (frozenset({A}), {i.id for i in now})
    assert not step.drain


def test_a_canary_of_a_single_prefill_stands_beside_it():
    view = replace(PAIRED, max_surge=1, canary=1)
    stages = all_steps(view, fleet(A, 1, 3), TO_B, pd(1, 3), NOW_S)
    assert "canary" in stages[-1].waiting_for
    assert stages[-1].serving == {"prefill": 2, "decode": 3}


def test_an_allowed_outage_is_not_taken_for_a_canary():
    view = replace(PAIRED, canary=1, allow_outage=True)
    step = step_of(view, fleet(A, 1, 3), pd(1, 3))
    assert step.instances == {i.id for i in fleet(A, 1, 3)}
    assert "remove rollout.canary" in step.waiting_for


def test_as_many_canaries_as_prefills_leave_the_old_revision_one():
    view = replace(PAIRED, max_unavailable=0, max_surge=1, canary=2)
    stages = all_steps(view, fleet(A, 2, 3), TO_B, pd(2, 3), NOW_S)
    assert "canary" in stages[-1].waiting_for


def test_blue_and_green_wait_for_gpus_for_both():
    view = replace(PAIRED, strategy="BlueGreen", max_gpus=40)
    step = step_of(view, fleet(A, 2, 2), pd(2, 2))
    assert "48 GPUs" in step.waiting_for
    assert not step.drain


def test_recreation_takes_all_down_before_it_starts_any():
    view = replace(PAIRED, strategy="RecreatePair")
    stages = all_steps(view, fleet(A, 2, 3), TO_B, pd(2, 3), NOW_S)
    assert [(len(s.created), len(s.drained)) for s in stages] == [(0, 5), (5, 0), (0, 0)]
    assert max(stage.gpus for stage in stages) == 2 * 4 + 3 * 8


def test_rebalancing_at_the_budget_shrinks_before_it_grows():
    view = replace(PAIRED, max_gpus=24)
    now = fleet(B, 4, 1)
    step = step_of(view, now, pd(2, 2))
    assert created_by(step, now) == {}
    assert drained_of(step) == {("prefill", B): 2}
    stages = all_steps(view, now, TO_B, pd(2, 2), NOW_S)
    assert stages[-1].done
    assert max(stage.gpus for stage in stages) == 24


def test_terminating_pods_still_count_as_gpus():
    view = replace(PAIRED, max_gpus=24)
    ending = [instance("prefill", B, n, terminating=True, serving=False) for n in (2, 3)]
    now = [*fleet(B, 2, 1), *ending]
    step = step_of(view, now, pd(2, 2))
    assert created_by(step, now) == {}
    assert "pods of prefill" in step.waiting_for


@pytest.mark.parametrize(
    ("since_s", "in_flight", "stays"),
    [(5, 0, True), (20, 0, False), (20, 3, True), (50, 3, False), (20, None, False)],
)
def test_a_drain_ends_when_routers_left_and_requests_ended_or_their_time_is_over(
    since_s, in_flight, stays
):
    view = replace(PAIRED, settle_s=dict.fromkeys(GPUS, 15.0), drain_s=dict.fromkeys(GPUS, 30.0))
    leaving = instance(
        "decode",
        B,
        5,
        draining=True,
        serving=False,
        in_flight=in_flight,
        draining_since_s=NOW_S - since_s,
    )
    step = step_of(view, [*fleet(B, 2, 2), leaving], pd(2, 2))
    assert ((leaving.id in step.instances), (leaving.id in step.drain)) == (stays, stays)
    assert (step.wait_s is not None) == (since_s < 45)


def test_scaling_to_zero_drains_everything():
    step = step_of(PAIRED, fleet(B, 2, 2), pd(0, 0))
    assert len(step.drain) == 4


def test_dropping_prefill_keeps_the_old_pairs_until_decode_serves_alone():
    shapes = {A: GPUS, B: {"decode": 8}}
    view = RolloutView(shape={"decode": 8}, shapes=shapes)
    stages = all_steps(view, fleet(A, 2, 3), TO_B, {"decode": 3}, NOW_S)
    assert stages[-1].done
    assert min(stage.serving["decode"] for stage in stages) == 2


def test_a_young_instance_does_not_count_before_min_ready_seconds():
    view = replace(PAIRED, min_ready_s=60)
    young = [instance(role, B, 0, ready_since_s=NOW_S - 10) for role in GPUS]
    step = step_of(view, [*fleet(A, 1, 1), *young], pd(2, 2))
    assert not step.drain
    assert step.wait_s == 50
    assert step_of(view, [*fleet(A, 1, 1), *young], pd(2, 2), now_s=NOW_S + 50).drain


def test_the_cheapest_instance_goes_first():
    idle = instance("decode", B, 0, cached_tokens=900)
    cold = instance("decode", B, 1, cached_tokens=10, created_s=5.0)
    young = instance("decode", B, 2, cached_tokens=10, created_s=9.0)
    busy = instance("decode", B, 3, in_flight=4, cached_tokens=0)
    silent = instance("decode", B, 4, in_flight=None)
    broken = loading("decode", B, 5)
    order = choose_victims([busy, silent, idle, cold, young, broken], 9)
    assert [i.id.index for i in order] == [5, 2, 1, 0, 3, 4]
    assert choose_victims([idle], -1) == []


def test_the_plan_is_the_same_for_any_order_of_the_observation():
    now = [*fleet(A, 2, 3), *fleet(B, 1, 1)]
    assert step_of(PAIRED, now, pd(3, 4)) == step_of(PAIRED, now[::-1], pd(3, 4))


COUNTS = st.tuples(st.integers(1, 6), st.integers(1, 9))


@settings(max_examples=80, deadline=None)
@given(COUNTS, st.integers(0, 3), st.integers(0, 3), st.sampled_from([10, 25, 50, 100]))
def test_a_smooth_rollout_keeps_its_floors_its_budget_and_the_ratio(counts, down, surge, skew):
    if down == surge == 0:
        surge = 1
    targets = pd(*counts)
    room = surge * sum(GPUS.values())
    budget = sum(GPUS[r] * n for r, n in targets.items()) + room
    view = RolloutView(
        shape=GPUS, max_unavailable=down, max_surge=surge, max_skew_percent=skew, max_gpus=budget
    )
    stages = all_steps(view, fleet(A, *counts), TO_B, targets, NOW_S)
    assert stages[-1].done or stages[-1].outage
    new = Counter()
    for stage in stages:
        assert stage.gpus <= budget
        for role, count in targets.items():
            assert stage.serving[role] >= max(count - down, 1)
        new.update(created.role for created in stage.created)
        shares = [new[role] / count for role, count in targets.items()]
        granule = 1 / min(counts)
        batch = max(min(down + surge, n) / n for n in counts)
        assert abs(shares[0] - shares[1]) <= max(skew / 100, granule, batch) + granule


def floor_of(count: int, view: RolloutView, total: int) -> int:
    """Written again, on its own, from the words of the spec."""
    if count == 0:
        return 0
    if view.either_role and count == 1 and total > 1:
        return 1 - min(view.max_unavailable, 1)
    return max(1, count - view.max_unavailable)


def able(instances: Iterable[InstanceView], view: RolloutView) -> Mapping[str, int]:
    """Serving instances, by role, of revisions that have both."""
    serving = Counter((i.id.revision, i.id.role) for i in instances if i.serving)
    total: Counter = Counter()
    for revision in {revision for revision, _ in serving}:
        have = {role: serving[revision, role] for role in GPUS}
        if view.either_role or all(have.values()):
            total.update(have)
    return total


class Cluster(RuleBasedStateMachine):
    """Instances that become ready, fail and end whenever they like, under an operator that dies."""

    instances: list[InstanceView]

    @initialize(
        counts=COUNTS,
        down=st.integers(0, 2),
        surge=st.integers(0, 2),
        strategy=st.sampled_from(["Paired", "Paired", "RecreatePair", "BlueGreen"]),
        room=st.one_of(st.none(), st.integers(0, 40)),
        either_role=st.booleans(),
        on_failure=st.sampled_from(["Pause", "Rollback"]),
    )
    def begin(self, counts, down, surge, strategy, room, either_role, on_failure):
        self.now_s = NOW_S
        self.targets = pd(*counts)
        self.revisions = Revisions(A, (A,))
        self.instances = fleet(A, *counts)
        self.most = sum(GPUS[r] * n for r, n in self.targets.items()) + (room or 0)
        self.view = RolloutView(
            shape=GPUS,
            strategy=strategy,
            max_unavailable=down,
            max_surge=surge or (0 if down else 1),
            max_gpus=None if room is None else self.most,
            either_role=either_role,
            on_failure=on_failure,
            settle_s=dict.fromkeys(GPUS, 15.0),
            drain_s=dict.fromkeys(GPUS, 30.0),
        )

    def _change(self, chosen: InstanceView, **changes) -> None:
        self.instances = [replace(i, **changes) if i is chosen else i for i in self.instances]

    def _pick(self, data, wanted) -> InstanceView | None:
        some = [i for i in self.instances if wanted(i)]
        return data.draw(st.sampled_from(some)) if some else None

    def _loads(self, i: InstanceView) -> bool:
        return not (i.serving or i.draining or i.terminating)

    def _get_ready(self, i: InstanceView) -> None:
        self._change(i, serving=True, pods_ready=1, ready_since_s=self.now_s, unready_since_s=None)

    @rule(data=st.data())
    def an_instance_gets_ready(self, data):
        if chosen := self._pick(data, self._loads):
            self._get_ready(chosen)

    @rule()
    def all_get_ready(self):
        for instance_ in list(self.instances):
            if self._loads(instance_):
                self._get_ready(instance_)

    @rule(data=st.data())
    def an_instance_fails(self, data):
        if chosen := self._pick(data, lambda i: i.serving):
            self._change(
                chosen,
                serving=False,
                pods_ready=0,
                ready_since_s=None,
                unready_since_s=self.now_s,
            )

    @rule(data=st.data())
    def an_instance_is_deleted_by_somebody(self, data):
        if chosen := self._pick(data, lambda i: not i.terminating):
            self._change(chosen, terminating=True, serving=False)

    @rule(data=st.data(), requests=st.one_of(st.none(), st.integers(0, 3)))
    def load_changes(self, data, requests):
        if chosen := self._pick(data, lambda i: i.pods_ready > 0):
            self._change(chosen, in_flight=requests)

    @rule(seconds=st.sampled_from([1, 20, 60, 3600, 8000]))
    def time_passes(self, seconds):
        self.now_s += seconds

    @rule()
    def pods_end(self):
        self.instances = [i for i in self.instances if not i.terminating]

    @rule(revision=st.sampled_from([A, B, C]))
    def the_spec_changes(self, revision):
        history = tuple(r for r in self.revisions.history if r != revision)
        self.revisions = Revisions(revision, (*history, revision), self.revisions.failed)

    @rule(counts=st.tuples(st.integers(0, 6), st.integers(0, 9)))
    def somebody_scales(self, counts):
        targets = pd(*counts)
        if (0 in counts) == (sum(counts) == 0) and (
            self.view.max_gpus is None
            or sum(GPUS[r] * n for r, n in targets.items()) <= self.view.max_gpus
        ):
            self.targets = targets

    @rule(paused=st.booleans(), canary=st.sampled_from([None, None, 1, 2]))
    def somebody_holds_or_releases(self, paused, canary):
        self.view = replace(self.view, paused=paused, canary=canary)

    @rule(revision=st.sampled_from([None, A, B, "ffffff"]), allowed=st.booleans())
    def somebody_decides(self, revision, allowed):
        self.view = replace(self.view, to_revision=revision, allow_outage=allowed)

    @precondition(lambda self: bool(self.instances))
    @rule()
    def somebody_reads_the_plan(self):
        all_steps(self.view, self.instances, self.revisions, self.targets, self.now_s)

    @rule()
    def the_operator_passes(self):
        self._pass(lambda writes: writes)

    @rule(data=st.data())
    def the_operator_dies_in_a_pass(self, data):
        self._pass(lambda w: [x for x in w if data.draw(st.booleans())] if w else w)

    def _pass(self, survived) -> Step:
        args = (self.view, self.instances, self.revisions, self.targets, self.now_s)
        step = next_step(*args)
        assert step == next_step(*args)
        if step.failed is not None:
            failed = self.revisions.failed | {step.failed}
            self.revisions = replace(self.revisions, failed=failed)
        before = list(self.instances)
        writes = [("create", i) for i in sorted(step.instances - {i.id for i in before})]
        writes += [("keep", i.id) for i in before if i.draining and i.id in step.instances]
        writes += [("drain", i) for i in sorted(step.drain)]
        writes += [("delete", i.id) for i in before if i.id not in step.instances]
        for verb, id_ in survived(writes):
            self._write(verb, id_, step)
        self._check(before, step)
        return step

    def _write(self, verb: str, id_: InstanceId, step: Step) -> None:
        if verb == "create":
            new = loading(id_.role, id_.revision, id_.index, created_s=self.now_s, in_flight=None)
            self.instances.append(new)
            return
        (chosen,) = [i for i in self.instances if i.id == id_]
        if chosen.terminating:
            return
        if verb == "delete":
            self._change(chosen, terminating=True, serving=False)
        elif verb == "drain" and not chosen.draining:
            self._change(chosen, draining=True, serving=False, draining_since_s=self.now_s)
        elif verb == "keep" and id_ not in step.drain:
            self._change(
                chosen, draining=False, serving=chosen.pods_ready > 0, draining_since_s=None
            )

    def _check(self, before: list[InstanceView], step: Step) -> None:
        self._check_counts(before)
        if self.view.strategy == "RecreatePair" or self.view.allow_outage:
            return
        total = sum(self.targets.values())
        was, now = able(before, self.view), able(self.instances, self.view)
        for role, count in self.targets.items():
            assert now[role] >= min(was[role], floor_of(count, self.view, total))
        assert sum(now.values()) >= min(sum(was.values()), 1, total)

    def _check_counts(self, before: list[InstanceView]) -> None:
        used = sum(self.view.gpus_of(i.id) for i in self.instances)
        if self.view.max_gpus is not None:
            already = sum(self.view.gpus_of(i.id) for i in before)
            assert used <= max(self.view.max_gpus, already)
        for role, count in self.targets.items():
            surge = count if self.view.strategy == "BlueGreen" else self.view.max_surge
            here = sum(i.id.role == role for i in self.instances)
            assert here <= max(count + surge, sum(i.id.role == role for i in before))

    @invariant()
    def no_two_instances_share_a_name(self):
        names = [i.id for i in getattr(self, "instances", [])]
        assert len(names) == len(set(names))

    def teardown(self):
        """Left alone, with what it asks for granted, it ends; or it says which outage it needs."""
        if not hasattr(self, "instances"):
            return
        self.view = replace(self.view, paused=False, canary=None, to_revision=None)
        if self._runs_out():
            return
        self.view = replace(self.view, allow_outage=True)
        assert self._runs_out()

    def _runs_out(self) -> bool:
        for _ in range(16 + 6 * (len(self.instances) + sum(self.targets.values()))):
            step = self._pass(lambda writes: writes)
            if step.done:
                aimed = step.target_revision
                assert Counter(i.id.role for i in self.instances) == +Counter(self.targets)
                assert all(i.id.revision == aimed and i.serving for i in self.instances)
                return True
            self.all_get_ready()
            self.pods_end()
            self.now_s += 60
        assert step.outage is not None, step
        assert not self.view.allow_outage
        return False


def test_a_cluster_at_its_worst_breaks_no_promise_and_every_rollout_ends():
    run_state_machine_as_test(
        Cluster,
        settings=settings(
            max_examples=120,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
