"""What every policy promises, and what each of them prefers."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from kimi_runtime.errors import Unavailable
from kimi_runtime.router.plan import Mode
from kimi_runtime.router.policies import open_policy
from kimi_runtime.router.view import RequestView, WorkerView
from kimi_runtime.spec.router import (
    CacheAware,
    Cost,
    DynamoCost,
    InferaCost,
    LeastLoad,
    LlmdFilter,
    LongestPrefix,
    PolicySpec,
    PowerOfTwo,
    RoundRobin,
)
from kimi_runtime.spec.worker import Role

OURS = [LeastLoad(), LongestPrefix(), Cost()]
BASELINES = [
    RoundRobin(),
    PowerOfTwo(),
    CacheAware(),
    DynamoCost(),
    LlmdFilter(),
    InferaCost(),
]
POLICIES = OURS + BASELINES
IDLE = WorkerView(
    name="w0",
    role=Role.BOTH,
    roles=tuple(Role),
    revision="r1",
    layout="bf16",
    ready=True,
    draining=False,
    certain=True,
    waiting=0,
    running=0,
    queued_tokens=0,
    free_blocks=1000,
    total_blocks=1000,
    block_tokens=64,
    max_context_tokens=64_000,
    grammar=True,
    logprobs=True,
)
CHAT = RequestView(prompt_tokens=8_000, max_tokens=500, session=b"session")


def fleet(count, **fields):
    return [dataclasses.replace(IDLE, name=f"w{number}", **fields) for number in range(count)]


workers_of_any_kind = st.lists(
    st.builds(
        WorkerView,
        name=st.just(""),
        role=st.sampled_from(Role),
        roles=st.sets(st.sampled_from(Role), min_size=1).map(tuple),
        revision=st.sampled_from(["r1", "r2"]),
        layout=st.sampled_from(["bf16", "fp8"]),
        ready=st.booleans(),
        draining=st.booleans(),
        certain=st.booleans(),
        waiting=st.integers(0, 50),
        running=st.integers(0, 50),
        queued_tokens=st.integers(0, 100_000),
        free_blocks=st.integers(0, 1000),
        total_blocks=st.sampled_from([10, 1000]),
        block_tokens=st.just(64),
        max_context_tokens=st.sampled_from([4_000, 64_000]),
        grammar=st.booleans(),
        logprobs=st.booleans(),
        transports=st.sampled_from([(), ("tcp",), ("shm", "tcp"), ("verbs",)]),
        cached_tokens=st.integers(0, 10_000),
        pool_tokens=st.integers(0, 10_000),
    ),
    max_size=8,
).map(lambda many: [dataclasses.replace(w, name=f"w{n}") for n, w in enumerate(many)])

requests = st.builds(
    RequestView,
    prompt_tokens=st.sampled_from([10, 500, 8_000]),
    max_tokens=st.just(100),
    session=st.binary(min_size=1, max_size=16),
    owners=st.lists(st.sampled_from(["w0", "w1", "w2"]), max_size=2).map(tuple),
    grammar=st.booleans(),
    logprobs=st.booleans(),
)


@pytest.fixture(params=POLICIES, ids=lambda spec: spec.kind)
def policy(request):
    return open_policy(request.param)


def policy_property(test, policies=POLICIES):
    """Run a property for every policy; fixtures and hypothesis do not mix."""
    bounded = settings(max_examples=50, deadline=None)(given(workers_of_any_kind, requests)(test))
    return pytest.mark.parametrize("spec", policies, ids=lambda spec: spec.kind)(bounded)


def property_of_ours(test):
    """Of our policies only: modes that depend on the whole fleet, or memory, break it."""
    return policy_property(test, OURS)


def ours(test):
    """For tests of what our policies promise beyond the contract."""
    return pytest.mark.parametrize("policy", OURS, indirect=True, ids=lambda spec: spec.kind)(test)


@policy_property
def test_a_plan_uses_only_workers_that_can_serve_it(spec, workers, request_view):
    by_name = {worker.name: worker for worker in workers}
    try:
        plan = open_policy(spec).choose(request_view, workers, now_s=0.0)
    except Unavailable:
        return
    for name in plan.workers:
        worker = by_name[name]
        assert worker.ready
        assert not worker.draining
        assert request_view.prompt_tokens < worker.max_context_tokens
        assert request_view.prompt_tokens < worker.total_blocks * worker.block_tokens
        assert worker.grammar or not request_view.grammar
        assert worker.logprobs or not request_view.logprobs


@policy_property
def test_a_pair_is_of_one_revision_and_layout_and_of_the_right_roles(spec, workers, request_view):
    by_name = {worker.name: worker for worker in workers}
    try:
        plan = open_policy(spec).choose(request_view, workers, now_s=0.0)
    except Unavailable:
        return
    if plan.mode is not Mode.PD:
        assert plan.prefill is None
        worker = by_name[plan.decode]
        assert Role.BOTH in worker.roles or worker.role is Role.BOTH
        return
    prefill, decode = by_name[plan.prefill], by_name[plan.decode]
    assert (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE)
    assert (prefill.revision, prefill.layout) == (decode.revision, decode.layout)
    assert set(prefill.transports or ("",)) & set(decode.transports or ("",))


@policy_property
def test_the_order_of_workers_does_not_matter(spec, workers, request_view):
    try:
        plan = open_policy(spec).choose(request_view, workers, now_s=0.0)
    except Unavailable:
        with pytest.raises(Unavailable):
            open_policy(spec).choose(request_view, workers[::-1], now_s=0.0)
        return
    again = open_policy(spec).choose(request_view, workers[::-1], now_s=0.0)
    assert again.workers == plan.workers


@property_of_ours
def test_leaving_out_a_worker_that_is_not_chosen_changes_nothing(spec, workers, request_view):
    policy = open_policy(spec)
    try:
        plan = policy.choose(request_view, workers, now_s=0.0)
    except Unavailable:
        return
    planned = {w.role for w in workers if w.name in plan.workers}
    for left_out in [worker for worker in workers if worker.name not in plan.workers]:
        rest = [worker for worker in workers if worker is not left_out]
        if plan.mode is not Mode.PD and planned != {Role.BOTH}:
            continue  # a fallback: whoever is left may be needed for it to be one
        assert policy.choose(request_view, rest, now_s=0.0).workers == plan.workers


def test_workers_that_could_not_hand_kv_over_are_never_paired(policy):
    prefill = dataclasses.replace(IDLE, name="p", role=Role.PREFILL, transports=("shm", "tcp"))
    verbs = dataclasses.replace(IDLE, name="v", role=Role.DECODE, transports=("verbs",))
    tcp = dataclasses.replace(
        IDLE, name="t", role=Role.DECODE, transports=("tcp",), running=50, queued_tokens=90_000
    )
    plan = policy.choose(CHAT, [prefill, verbs, tcp], now_s=0.0)
    assert (plan.mode, plan.workers) == (Mode.PD, ("p", "t"))
    alone = policy.choose(CHAT, [prefill, verbs], now_s=0.0)
    assert alone.mode is Mode.EXTEND
    only = [dataclasses.replace(worker, roles=(worker.role,)) for worker in (prefill, verbs)]
    with pytest.raises(Unavailable, match="of its revision, layout and transport"):
        policy.choose(CHAT, only, now_s=0.0)


def test_equal_workers_share_sessions_evenly(policy):
    workers = fleet(4)
    chosen = Counter(
        policy.choose(
            dataclasses.replace(CHAT, session=f"session {number}".encode()), workers, now_s=0.0
        ).decode
        for number in range(400)
    )
    assert set(chosen) == {"w0", "w1", "w2", "w3"}
    assert min(chosen.values()) > 60


@ours
def test_concurrent_requests_of_one_session_spread_as_load_builds_up(policy):
    running = dict.fromkeys(("w0", "w1", "w2", "w3"), 0)
    for _ in range(80):
        workers = [dataclasses.replace(IDLE, name=n, running=r) for n, r in running.items()]
        running[policy.choose(CHAT, workers, now_s=0.0).decode] += 1
    assert set(running.values()) == {20}


@ours
def test_equal_workers_keep_the_last_owner(policy):
    for owner in ("w0", "w1", "w2"):
        request = dataclasses.replace(CHAT, owners=(owner,))
        assert policy.choose(request, fleet(3), now_s=0.0).decode == owner


@ours
def test_the_plan_carries_the_terms_of_its_price(policy):
    idle = policy.choose(CHAT, fleet(2), now_s=0.0)
    busy = policy.choose(CHAT, fleet(2, queued_tokens=300, running=2), now_s=0.0)
    assert idle.considered == busy.considered == 2
    assert idle.terms.keys() == busy.terms.keys()
    assert sum(busy.terms.values()) > sum(idle.terms.values())


def test_queues_are_priced_in_tokens_of_prefill():
    for spec in (LeastLoad(), LongestPrefix()):
        plan = open_policy(spec).choose(CHAT, fleet(2, queued_tokens=300, running=2), now_s=0.0)
        assert plan.terms["whole.queued"] == 300
        assert plan.terms["whole.requests"] == 128


def test_without_prefill_workers_a_capable_decode_worker_serves_alone(policy):
    prefill = dataclasses.replace(IDLE, name="p", role=Role.PREFILL, ready=False)
    decode = dataclasses.replace(IDLE, name="d", role=Role.DECODE)
    plan = policy.choose(CHAT, [prefill, decode], now_s=0.0)
    assert (plan.mode, plan.workers) == (Mode.EXTEND, ("d",))
    with pytest.raises(Unavailable, match=r"p is not ready; d has no prefill worker"):
        policy.choose(CHAT, [prefill, dataclasses.replace(decode, roles=(Role.DECODE,))], now_s=0.0)


def test_with_nobody_there_the_error_says_so(policy):
    with pytest.raises(Unavailable, match="no worker is known"):
        policy.choose(CHAT, [], now_s=0.0)


def test_a_cached_prefix_attracts():
    workers = fleet(3)
    workers[1] = dataclasses.replace(workers[1], cached_tokens=6_400, running=3)
    assert open_policy(LongestPrefix()).choose(CHAT, workers, now_s=0.0).decode == "w1"


def test_a_long_queue_outweighs_a_cached_prefix():
    workers = fleet(2)
    workers[1] = dataclasses.replace(workers[1], cached_tokens=6_400, queued_tokens=20_000)
    assert open_policy(LongestPrefix()).choose(CHAT, workers, now_s=0.0).decode == "w0"


def test_least_load_ignores_what_is_cached():
    workers = fleet(2, running=1)
    workers[1] = dataclasses.replace(workers[1], cached_tokens=8_000, running=2)
    assert open_policy(LeastLoad()).choose(CHAT, workers, now_s=0.0).decode == "w0"


def test_the_pool_makes_a_cold_worker_almost_as_good_as_the_holder():
    workers = fleet(2, pool_tokens=6_400)
    workers[1] = dataclasses.replace(workers[1], cached_tokens=6_400, running=12)
    plan = open_policy(LongestPrefix()).choose(CHAT, workers, now_s=0.0)
    assert plan.decode == "w0"
    assert plan.terms["whole.move"] == 640


def test_a_worker_that_lacks_room_now_is_a_worse_choice():
    workers = fleet(2)
    workers[0] = dataclasses.replace(workers[0], free_blocks=10)
    for number in range(8):
        request = dataclasses.replace(CHAT, session=bytes([number]))
        assert open_policy(LongestPrefix()).choose(request, workers, now_s=0.0).decode == "w1"


def picks(spec, workers, count, **fields):
    policy = open_policy(spec)
    return Counter(
        policy.choose(
            dataclasses.replace(CHAT, session=b"%d" % number, **fields), workers, now_s=0.0
        ).decode
        for number in range(count)
    )


def test_round_robin_takes_turns_whatever_the_load():
    workers = fleet(4)
    workers[2] = dataclasses.replace(workers[2], running=50)
    assert set(picks(RoundRobin(), workers, 40).values()) == {10}


def test_the_better_of_two_is_better_than_chance_and_not_the_best():
    workers = fleet(4)
    workers[2] = dataclasses.replace(workers[2], running=50)
    counts = picks(PowerOfTwo(), workers, 400)
    assert counts["w2"] == 0
    assert min(counts[name] for name in ("w0", "w1", "w3")) > 90


def test_cache_aware_has_two_regimes_and_a_cliff_between_them():
    workers = fleet(2)
    workers[1] = dataclasses.replace(workers[1], cached_tokens=6_400, running=64)
    assert open_policy(CacheAware()).choose(CHAT, workers, now_s=0.0).decode == "w1"
    workers[1] = dataclasses.replace(workers[1], running=65)
    assert open_policy(CacheAware()).choose(CHAT, workers, now_s=0.0).decode == "w0"
    workers[1] = dataclasses.replace(workers[1], running=1, cached_tokens=2_368)
    assert open_policy(CacheAware()).choose(CHAT, workers, now_s=0.0).decode == "w0"


def test_dynamo_weighs_overlap_against_blocks_in_use():
    workers = fleet(2)
    workers[1] = dataclasses.replace(workers[1], cached_tokens=6_400, free_blocks=901)
    assert open_policy(DynamoCost()).choose(CHAT, workers, now_s=0.0).decode == "w1"
    workers[1] = dataclasses.replace(workers[1], free_blocks=899)
    assert open_policy(DynamoCost()).choose(CHAT, workers, now_s=0.0).decode == "w0"
    eager = DynamoCost(overlap_credit=2.0, prefill_load_scale=4.0, active_request_weight=64.0)
    assert open_policy(eager).choose(CHAT, workers, now_s=0.0).decode == "w1"


def test_llm_d_keeps_holders_until_they_are_far_behind():
    workers = fleet(2)
    workers[1] = dataclasses.replace(workers[1], cached_tokens=6_400, queued_tokens=286_000)
    assert open_policy(LlmdFilter()).choose(CHAT, workers, now_s=0.0).decode == "w1"
    workers[1] = dataclasses.replace(workers[1], queued_tokens=288_000)
    assert open_policy(LlmdFilter()).choose(CHAT, workers, now_s=0.0).decode == "w0"


def test_infera_remembers_what_it_sent():
    counts = picks(InferaCost(), fleet(4), 80)
    assert max(counts.values()) - min(counts.values()) <= 2


@pytest.mark.parametrize("spec", POLICIES, ids=lambda spec: spec.kind)
def test_a_router_file_can_name_it(spec):
    read = TypeAdapter(PolicySpec).validate_json(spec.model_dump_json())
    assert read == spec
    assert open_policy(read).choose(CHAT, fleet(1), now_s=0.0).decode == "w0"
