"""Replica counts: who writes them, within which bounds, and what the planner makes of signals."""

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_operator.api.deployment import DeploymentSpec
from kimi_operator.observed import K8S_CURRENT, InstanceId, InstanceView, Observed, Signals
from kimi_operator.scaling import Bounds, History, RoleBounds, Targets, bounds_of, seed, targets
from kimi_operator.scaling.history import Track

NOW_S = 100_000.0
CALM = Signals(
    queue_s=0.1,
    ttft_p95_s=0.3,
    itl_p95_s=0.01,
    kv_use=0.2,
    transfer_backlog_s=0.0,
    waiting_requests=0,
)
MANAGED = {"mode": "Managed", "min": 1, "max": 8, "scaleDownDelay": "30m"}


def spec_of(prefill=None, decode=None, **more) -> DeploymentSpec:
    """Roles of 4 and 8 GPUs; a role that is not given does not exist."""
    roles = {
        name: {"parallelism": {"tp": tp}, **role}
        for name, tp, role in (("prefill", 4, prefill), ("decode", 8, decode))
        if role is not None
    }
    common = {"model": {"source": "local", "path": "/m"}, "rdma": {"allowTCP": True}}
    return DeploymentSpec.model_validate({**common, **roles, **more})


def managed(ttft="1s", itl="40ms", **changes) -> DeploymentSpec:
    scaling = {**MANAGED, **changes.pop("scaling", {})}
    return spec_of(
        {"scaling": {**scaling, "targets": {"ttft": ttft}}},
        {"scaling": {**scaling, "targets": {"itl": itl}}},
        **changes,
    )


def serving(role: str, count: int, **changes) -> list[InstanceView]:
    one = InstanceView(
        InstanceId(role, "aaaaaa", 0), 1, 1, serving=True, in_flight=1, ready_since_s=0.0
    )
    return [replace(one, id=replace(one.id, index=n), **changes) for n in range(count)]


def observed(
    prefill=0, decode=0, signals=None, workers=None, instances: Iterable[InstanceView] = ()
) -> Observed:
    own = (*serving("prefill", prefill), *serving("decode", decode), *instances)
    counts = {"prefill": prefill, "decode": decode} if workers is None else workers
    return Observed({}, own, (), None, signals or Signals(), counts, K8S_CURRENT)


class Run:
    """The planner over time: its decision is what KimiWorkers says next, and pods follow."""

    def __init__(self, spec: DeploymentSpec, prefill: int, decode: int):
        self.spec, self.now_s, self.history = spec, NOW_S, History()
        self.counts = {"prefill": prefill, "decode": decode}
        self.last: Targets | None = None

    def go(self, signals: Signals, for_s: float, every_s: float = 15.0, **changes) -> "Run":
        end_s = self.now_s + for_s
        while self.now_s < end_s:
            self.now_s += every_s
            at_s = None if signals.queue_s is None else self.now_s
            pods = [i for r, n in self.counts.items() for i in serving(r, n, **changes)]
            seen = observed(
                signals=replace(signals, at_s=at_s), workers=self.counts, instances=pods
            )
            self.last = targets(self.spec, seen, self.history, self.now_s)
            self.counts, self.history = self.last.by_role, self.last.history
        return self


def test_static_counts_are_the_specs():
    spec = spec_of({"replicas": 2}, {"replicas": 3})
    now = observed(5, 5, workers={"prefill": 9, "decode": 9})
    assert targets(spec, now, History(), NOW_S).by_role == {"prefill": 2, "decode": 3}


def test_without_prefill_there_is_no_count_for_it():
    answer = targets(spec_of(decode={"replicas": 3}), observed(), History(), NOW_S)
    assert (answer.prefill, answer.by_role) == (None, {"decode": 3})


def test_suspend_scale_stops_everything():
    spec = spec_of({"replicas": 2}, {"replicas": 3}, suspend="Scale")
    assert targets(spec, observed(2, 3), History(), NOW_S).by_role == {"prefill": 0, "decode": 0}


EXTERNAL = {"scaling": {"mode": "External", "min": 0, "max": 6}}


def test_external_counts_are_what_scale_says():
    now = observed(1, 1, workers={"prefill": 2, "decode": 5})
    answer = targets(spec_of(EXTERNAL, EXTERNAL), now, History(), NOW_S)
    assert (answer.by_role, answer.reason) == ({"prefill": 2, "decode": 5}, "/scale")


def test_external_counts_are_kept_in_bounds_and_the_reason_names_them():
    now = observed(workers={"prefill": 2, "decode": 9})
    answer = targets(spec_of(EXTERNAL, EXTERNAL), now, History(), NOW_S)
    assert answer.decode == 6
    assert "decode 6 instead of 9" in answer.reason


def test_one_role_is_not_scaled_to_zero_alone():
    now = observed(workers={"prefill": 0, "decode": 3})
    answer = targets(spec_of(EXTERNAL, EXTERNAL), now, History(), NOW_S)
    assert answer.by_role == {"prefill": 1, "decode": 3}


def test_both_roles_go_to_zero_together():
    now = observed(workers={"prefill": 0, "decode": 0})
    answer = targets(spec_of(EXTERNAL, EXTERNAL), now, History(), NOW_S)
    assert answer.by_role == {"prefill": 0, "decode": 0}


def test_the_writer_who_has_written_nothing_yet_keeps_what_is_there():
    spec = spec_of(EXTERNAL, EXTERNAL)
    answer = targets(spec, observed(2, 4, workers={}), History(), NOW_S)
    assert answer.by_role == {"prefill": 2, "decode": 4}


@pytest.mark.parametrize(("here", "seeded"), [(0, 1), (3, 3)])
def test_a_scale_is_seeded_with_what_is_there_and_never_with_zero(here, seeded):
    spec = spec_of(EXTERNAL, EXTERNAL)
    assert seed("decode", spec.decode, observed(1, here)) == seeded


def test_a_shortage_that_lasts_adds_instances():
    busy = replace(CALM, queue_s=0.5, ttft_p95_s=1.4)
    assert Run(managed(), 2, 2).go(busy, 15).counts == {"prefill": 2, "decode": 2}
    run = Run(managed(), 2, 2).go(busy, 60)
    assert run.counts == {"prefill": 3, "decode": 2}


def test_slow_tokens_are_a_shortage_of_decode():
    slow = replace(CALM, itl_p95_s=0.06)
    assert Run(managed(), 2, 2).go(slow, 45).counts == {"prefill": 2, "decode": 3}


def test_a_backlog_of_hand_offs_is_not_blamed_on_prefill():
    stuck = replace(CALM, ttft_p95_s=9.0, transfer_backlog_s=3.0)
    counts = Run(managed(), 2, 2).go(stuck, 45).counts
    assert counts == {"prefill": 2, "decode": 4}


def test_a_burst_that_is_over_before_an_instance_could_load_adds_none():
    run = Run(managed(), 2, 2)
    for _ in range(6):
        run.go(replace(CALM, queue_s=9.0), 15).go(replace(CALM, queue_s=0.4), 15)
    assert run.counts == {"prefill": 2, "decode": 2}


def test_instances_that_load_are_not_asked_for_again():
    spec, short = managed(), replace(CALM, queue_s=2.0, at_s=NOW_S)
    history, counts = History(), {"prefill": 2, "decode": 2}
    for n in range(100):
        now = observed(2, 2, replace(short, at_s=NOW_S + 15 * n), workers=counts)
        answer = targets(spec, now, history, NOW_S + 15 * n)
        history, counts = answer.history, answer.by_role
    assert counts == {"prefill": 4, "decode": 2}


def test_low_load_takes_one_instance_after_the_whole_delay():
    quiet = replace(CALM, queue_s=0.0, ttft_p95_s=0.1, kv_use=0.1)
    run = Run(managed(), 3, 3).go(quiet, 1790)
    assert run.counts == {"prefill": 3, "decode": 3}
    assert run.go(quiet, 30).counts == {"prefill": 2, "decode": 2}
    assert run.go(quiet, 1700).counts == {"prefill": 2, "decode": 2}


def test_one_busy_moment_starts_the_delay_anew():
    quiet = replace(CALM, queue_s=0.0, ttft_p95_s=0.1, kv_use=0.1)
    busy = replace(quiet, ttft_p95_s=0.9, itl_p95_s=0.039)
    run = Run(managed(), 2, 2).go(quiet, 1500).go(busy, 15).go(quiet, 1500)
    assert run.counts == {"prefill": 2, "decode": 2}


def test_a_restart_of_the_operator_only_delays_what_shrinks():
    quiet = replace(CALM, queue_s=0.0, ttft_p95_s=0.1, kv_use=0.1)
    run = Run(managed(), 2, 2).go(quiet, 1500)
    run.history = History()
    assert run.go(quiet, 1500).counts == {"prefill": 2, "decode": 2}


def test_a_young_instance_is_not_spare():
    quiet = replace(CALM, queue_s=0.0, ttft_p95_s=0.1, kv_use=0.1)
    young = {"ready_since_s": NOW_S + 1800}
    assert Run(managed(), 2, 2).go(quiet, 2000, **young).counts == {"prefill": 2, "decode": 2}


@pytest.mark.parametrize("silent", [Signals(), replace(CALM, at_s=NOW_S - 61)])
def test_stale_signals_change_nothing_and_are_said(silent):
    answer = targets(managed(), observed(3, 4, silent), History(), NOW_S)
    assert (answer.by_role, answer.stale) == ({"prefill": 3, "decode": 4}, True)
    assert "no signals" in answer.reason


def test_a_gap_in_the_signals_starts_the_delay_anew():
    quiet = replace(CALM, queue_s=0.0, ttft_p95_s=0.1, kv_use=0.1)
    run = Run(managed(), 2, 2).go(quiet, 1500).go(Signals(), 15).go(quiet, 1500)
    assert run.counts == {"prefill": 2, "decode": 2}


def test_nothing_asked_for_the_whole_delay_scales_both_to_zero():
    nothing = replace(CALM, queue_s=0.0, ttft_p95_s=None, itl_p95_s=None, kv_use=0.0)
    run = Run(managed(scaling={"min": 0}), 2, 3).go(nothing, 1830, in_flight=0)
    assert run.counts == {"prefill": 0, "decode": 0}


def test_a_running_request_keeps_the_last_instances():
    nothing = replace(CALM, queue_s=0.0, ttft_p95_s=None, itl_p95_s=None, kv_use=0.0)
    run = Run(managed(scaling={"min": 0}), 1, 1).go(nothing, 4000, in_flight=1)
    assert run.counts == {"prefill": 1, "decode": 1}


def test_a_waiting_request_wakes_both_at_once():
    asleep = Run(managed(scaling={"min": 0}), 0, 0)
    nothing = Signals(queue_s=0.0, waiting_requests=0)
    assert asleep.go(nothing, 600).counts == {"prefill": 0, "decode": 0}
    assert asleep.go(replace(nothing, waiting_requests=1), 15).counts == {
        "prefill": 1,
        "decode": 1,
    }


def test_growth_stops_at_the_budget_and_says_what_would_help():
    busy = replace(CALM, queue_s=3.0, itl_p95_s=0.035)
    run = Run(managed(budget={"maxGPUs": 28}), 2, 2).go(busy, 600)
    assert run.counts == {"prefill": 3, "decode": 2}
    assert "budget.maxGPUs" in run.last.recommendation


def test_spare_gpus_of_one_role_go_to_the_other_that_is_short():
    lopsided = replace(CALM, queue_s=3.0, ttft_p95_s=3.0, itl_p95_s=0.005, kv_use=0.05)
    run = Run(managed(budget={"maxGPUs": 32}), 2, 3).go(lopsided, 45)
    assert run.counts == {"prefill": 2, "decode": 3}
    assert run.go(lopsided, 300).counts == {"prefill": 4, "decode": 2}


def test_a_role_that_needs_its_instances_gives_none():
    both = replace(CALM, queue_s=3.0, itl_p95_s=0.039)
    run = Run(managed(budget={"maxGPUs": 32}), 2, 3).go(both, 3600)
    assert run.counts == {"prefill": 2, "decode": 3}


def test_the_ratio_moves_prefill_along_with_decode():
    slow = replace(CALM, itl_p95_s=0.08)
    spec = managed(budget={"ratio": {"min": "1:2", "max": "1:1"}})
    run = Run(spec, 1, 2).go(slow, 45)
    assert run.counts == {"prefill": 2, "decode": 4}
    assert "budget.ratio" in run.last.reason


def test_a_metric_of_the_spec_presses_too():
    scaling = {**MANAGED, "metrics": [{"type": "RunningRequests", "target": 4}]}
    run = Run(spec_of(decode={"scaling": scaling}), 0, 2)
    run.counts = {"decode": 2}
    assert run.go(CALM, 45, in_flight=6).counts == {"decode": 3}


def test_the_planner_advises_whoever_else_writes_the_counts():
    spec = spec_of({"replicas": 1}, {"replicas": 1})
    now = observed(1, 1, replace(CALM, queue_s=9.0, at_s=NOW_S))
    answer = targets(spec, now, History(), NOW_S)
    assert "prefill: requests queue longer than 2s" in answer.recommendation


SIGNALS = st.builds(
    Signals,
    queue_s=st.one_of(st.none(), st.floats(0, 30)),
    ttft_p95_s=st.one_of(st.none(), st.floats(0, 30)),
    itl_p95_s=st.one_of(st.none(), st.floats(0, 1)),
    kv_use=st.one_of(st.none(), st.floats(0, 1)),
    transfer_backlog_s=st.one_of(st.none(), st.floats(0, 5)),
    waiting_requests=st.one_of(st.none(), st.integers(0, 9)),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(SIGNALS, st.sampled_from([15, 45, 400, 2000]), st.booleans()), max_size=12),
    st.integers(0, 1),
    st.sampled_from([None, {"min": "1:4", "max": "1:1"}, {"max": "1:2"}]),
    st.one_of(st.none(), st.integers(20, 80)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_whatever_the_signals_the_counts_keep_every_bound(history, least, ratio, gpus, start):
    budget = {k: v for k, v in {"ratio": ratio, "maxGPUs": gpus}.items() if v is not None}
    spec = managed(scaling={"min": least, "max": 6}, budget=budget)
    run, bounds = Run(spec, *start), bounds_of(spec)
    for signals, for_s, restarts in history:
        before = dict(run.counts)
        run.history = History() if restarts else run.history
        run.go(signals, for_s, every_s=for_s / 3)
        prefill, decode = run.counts["prefill"], run.counts["decode"]
        assert (prefill == 0) == (decode == 0)
        assert all(least <= n <= 6 for n in (prefill, decode))
        assert bounds.max_gpus is None or bounds.gpus(run.counts) <= bounds.max_gpus
        if prefill and ratio:
            share = Fraction(prefill, decode)
            assert bounds.most_ratio is None or share <= bounds.most_ratio
            assert bounds.least_ratio is None or share >= bounds.least_ratio
        if signals.queue_s is None and bounds.nearest(before) == before:  # stale, see `Run`
            assert run.counts == before


BOUNDS = st.builds(
    lambda prefill, decode, gpus, low, high: Bounds(
        {
            "prefill": RoleBounds(*sorted(prefill), 4),
            "decode": RoleBounds(*sorted(decode), 8),
        },
        gpus,
        low,
        high,
    ),
    st.tuples(st.integers(0, 4), st.integers(1, 6)),
    st.tuples(st.integers(0, 4), st.integers(1, 6)),
    st.one_of(st.none(), st.integers(12, 90)),
    st.sampled_from([None, Fraction(1, 4), Fraction(1, 2)]),
    st.sampled_from([None, Fraction(1), Fraction(2, 3)]),
)


@settings(max_examples=150, deadline=None)
@given(BOUNDS, st.integers(0, 8), st.integers(0, 8))
def test_the_nearest_counts_are_no_further_off_than_any_others(bounds, prefill, decode):
    def allowed(p: int, d: int) -> bool:
        inside = all(
            b.least <= n <= b.most and n for n, b in zip((p, d), bounds.roles.values(), strict=True)
        )
        share = Fraction(p, d) if d else Fraction(0)
        return (
            inside
            and (bounds.max_gpus is None or 4 * p + 8 * d <= bounds.max_gpus)
            and (bounds.least_ratio is None or share >= bounds.least_ratio)
            and (bounds.most_ratio is None or share <= bounds.most_ratio)
        )

    def short(p: int, d: int) -> Fraction:
        return max(
            Fraction(max(prefill - p, 0), max(prefill, 1)),
            Fraction(max(decode - d, 0), max(decode, 1)),
        )

    chosen = bounds.nearest({"prefill": prefill, "decode": decode})
    others = [(p, d) for p in range(1, 7) for d in range(1, 7) if allowed(p, d)]
    if prefill == decode == 0 and not any(b.least for b in bounds.roles.values()):
        assert chosen == {"prefill": 0, "decode": 0}
    elif others:
        assert allowed(*chosen.values())
        assert short(*chosen.values()) == min(short(p, d) for p, d in others)


def test_counts_that_are_allowed_stay():
    bounds = Bounds({"prefill": RoleBounds(1, 5, 4), "decode": RoleBounds(1, 5, 8)}, 60)
    assert bounds.nearest({"prefill": 3, "decode": 4}) == {"prefill": 3, "decode": 4}


def test_a_role_that_the_spec_turns_off_does_not_bind_the_other():
    spec = spec_of({"replicas": 0}, EXTERNAL)
    now = observed(workers={"decode": 3})
    assert targets(spec, now, History(), NOW_S).by_role == {"prefill": 0, "decode": 3}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=60))
def test_a_track_knows_the_extremes_of_every_window_it_keeps(samples):
    track, seen, now_s = Track(), [], 0.0
    for step, count in samples:
        now_s += step
        track, seen = track.add(now_s, count, 200.0), [*seen, (now_s, count)]
        for window in (0.0, 20.0, 200.0):
            inside = [n for at_s, n in seen if at_s >= now_s - window]
            assert track.highest(now_s - window) == max(inside)
            assert track.lowest(now_s - window) == min(inside)
        assert len(track.highs) <= 10
