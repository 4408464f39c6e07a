"""Situations a router meets, and what it should do in each of them."""

import dataclasses

import pytest

from kimi_runtime.errors import Overloaded, Unavailable
from kimi_runtime.router.cost.hits import usable_tokens
from kimi_runtime.router.cost.room import NEVER_S, wait_for_room
from kimi_runtime.router.plan import Mode
from kimi_runtime.router.policies import open_policy
from kimi_runtime.router.policies.cost import CostPolicy
from kimi_runtime.router.view import KvSource, RequestClass
from kimi_runtime.spec.router import Cost
from kimi_runtime.spec.worker import Role
from worker_views import turn, worker

SPEC = Cost(model="kimi-k2.6", gpu="MI355X", tensor=4)
POOL = KvSource("pool-1", "n1", "dram", 70_400)


def decide(workers, planner=None, **fields):
    planner = planner or CostPolicy(SPEC).planner
    return planner.plan(turn(**fields), workers, now_s=0.0)


def test_a_turn_stays_where_its_context_is():
    workers = [worker("a", cached_tokens=70_400), worker("b"), worker("c")]
    plan = decide(workers).plan
    assert (plan.mode, plan.decode, plan.fetches) == (Mode.EXTEND, "a", ())


def test_a_long_queue_at_the_holder_is_left_for_a_copy_from_the_pool():
    holder = worker("a", node="n0", cached_tokens=70_400, queued_tokens=200_000, waiting=3)
    plan = decide([holder, worker("b", node="n2")], sources=(POOL,), owners=("a",)).plan
    assert (plan.mode, plan.decode) == (Mode.FETCH, "b")
    assert plan.fetches[0].source == "pool-1"
    assert plan.fetches[0].end == 70_400
    assert plan.fetches[0].size_bytes == 70_400 * 35_136


def test_a_short_queue_at_the_holder_is_waited_for():
    queue = {"queued_tokens": 600, "waiting": 1, "utilisation": 0.1}
    holder = worker("a", node="n0", cached_tokens=70_400, **queue)
    other = worker("b", node="n2", utilisation=0.1)
    plan = decide([holder, other], sources=(POOL,), owners=("a",)).plan
    assert (plan.mode, plan.decode) == (Mode.EXTEND, "a")


def test_a_peer_is_read_from_only_by_who_can_be_told_to():
    holder = worker("a", node="n0", cached_tokens=70_400, queued_tokens=400_000, waiting=3)
    able, unable = worker("b", node="n2", fetches=True), worker("b", node="n2")
    assert decide([holder, able]).plan.fetches[0].source == "a"
    assert decide([holder, unable]).plan.fetches == ()


def test_a_full_worker_is_left_although_it_has_the_prefix():
    full = worker("a", node="n0", cached_tokens=70_400, running=40, free_blocks=100)
    plan = decide([full, worker("b", node="n2")], sources=(POOL,), owners=("a",)).plan
    assert plan.decode == "b"
    decided = CostPolicy(SPEC).planner.plan(turn(), [full, worker("b")], now_s=0.0, exhaustive=True)
    costs = {c.decode: c for c in decided.explanation.candidates}
    assert costs["b"].terms.queue == 0


def test_a_crowded_link_makes_computing_the_better_half():
    planner = CostPolicy(SPEC.model_copy(update={"others_weight": 0.0})).planner
    far = worker("b", node="n2", queued_tokens=10_000, waiting=1)
    for number in range(80):
        planner.flows.start(str(number), planner.routes.to_worker(POOL, far), 3e11, now_s=0.0)
    modes = {
        candidate.mode: candidate
        for candidate in planner.plan(
            turn(sources=(POOL,)), [far], now_s=0.0, exhaustive=True
        ).explanation.candidates
    }
    assert modes[Mode.SPLIT].cached_tokens < modes[Mode.FETCH].cached_tokens == 70_400
    best = planner.plan(turn(sources=(POOL,)), [far], now_s=0.0).plan
    assert best.mode is Mode.SPLIT
    assert best.terms["fetch"] < 0.2


def test_where_reading_and_computing_overlap_both_end_together():
    streaming = worker("b", node="n2", streams=61)
    ssd = KvSource("pool-1", "n1", "ssd", 70_400)
    explained = decide([streaming], sources=(ssd,)).explanation
    split = min((c for c in explained.candidates if c.mode is Mode.SPLIT), key=lambda c: c.cost_s)
    whole = next(c for c in explained.candidates if c.mode is Mode.FETCH)
    assert split.cost_s < whole.cost_s
    assert 0 < split.cached_tokens < 70_400


def pd_fleet(**decode):
    return [
        worker("p0", role=Role.PREFILL, node="n0"),
        worker("d0", role=Role.DECODE, node="n1", **decode),
    ]


def test_only_missing_bytes_are_handed_over():
    cold = decide(pd_fleet()).plan
    warm = decide(pd_fleet(cached_tokens=70_400)).plan
    assert cold.mode is warm.mode is Mode.PD
    assert cold.hand_off.size_bytes == 71_000 * 35_136
    assert warm.hand_off.size_bytes == 600 * 35_136
    assert warm.terms["hand_off"] < 0.01 < cold.terms["hand_off"]


def test_the_decode_worker_that_has_the_session_is_preferred():
    workers = [
        worker("p0", role=Role.PREFILL, node="n0", cached_tokens=70_400),
        worker("d0", role=Role.DECODE, node="n1"),
        worker("d1", role=Role.DECODE, node="n2", cached_tokens=70_400),
    ]
    assert decide(workers).plan.decode == "d1"


def test_streaming_by_layers_hides_the_hand_off():
    streams = [dataclasses.replace(w, streams=61) for w in pd_fleet()]
    hidden, seen = decide(streams).plan, decide(pd_fleet()).plan
    assert hidden.terms["hand_off"] < 0.1 * seen.terms["hand_off"]


def test_waiting_for_a_decode_slot_is_part_of_the_first_token():
    busy = pd_fleet(running=32, max_running=32)
    busy[0] = dataclasses.replace(busy[0], cached_tokens=70_400)
    plan = decide(busy).plan
    assert plan.terms["room"] > 0
    free = [*busy, worker("d1", role=Role.DECODE, node="n2", running=31, max_running=32)]
    assert decide(free).plan.decode == "d1"


def test_a_short_append_runs_on_who_has_it_and_a_long_first_turn_elsewhere():
    workers = [
        worker("p0", role=Role.PREFILL, node="n0"),
        worker("d0", role=Role.DECODE, node="n1", running=48, free_blocks=9_000),
        worker("b0", role=Role.BOTH, node="n2", running=48, free_blocks=9_000),
    ]
    append = [dataclasses.replace(workers[2], cached_tokens=70_400), *workers[:2]]
    assert decide(append).plan.mode is Mode.EXTEND
    assert decide(workers, prompt_tokens=100_000).plan.mode is Mode.PD


def test_hits_of_hybrid_models_end_at_a_state_checkpoint():
    assert usable_tokens(70_400, (8_192, 40_960), prompt_tokens=71_000, block_tokens=64) == 40_960
    assert usable_tokens(5_000, (8_192,), prompt_tokens=71_000, block_tokens=64) == 0
    assert usable_tokens(70_399, None, prompt_tokens=71_000, block_tokens=64) == 70_336
    assert usable_tokens(80_000, None, prompt_tokens=71_000, block_tokens=64) == 70_976
    k3 = CostPolicy(Cost(model="kimi-k3", gpu="MI355X", tensor=8)).planner
    shallow = worker("a", cached_tokens=70_400, checkpoints=(8_192,))
    deep = worker("b", cached_tokens=40_960, checkpoints=(8_192, 40_960))
    decided = k3.plan(turn(), [shallow, deep], now_s=0.0)
    assert decided.plan.decode == "b"
    assert decided.explanation.chosen.cached_tokens == 40_960


def test_a_hybrid_model_reads_its_state_as_well():
    k3 = CostPolicy(Cost(model="kimi-k3", gpu="MI355X", tensor=8)).planner
    source = KvSource("pool-1", "n1", "dram", 70_400, checkpoints=(65_536,))
    taker = worker("a", node="n0", checkpoints=())
    plan = k3.plan(turn(sources=(source,)), [taker], now_s=0.0).plan
    assert plan.fetches[0].end == 65_536
    assert plan.fetches[0].size_bytes == 65_536 * 13_824 + k3.models.speeds("").prior.state_bytes


def test_flows_that_are_under_way_slow_the_next_one():
    planner = CostPolicy(SPEC).planner
    busy, idle = worker("b", node="n2"), worker("c", node="n3")
    for number in range(3):
        route = planner.routes.to_worker(POOL, busy)[1:]
        planner.flows.start(f"other {number}", route, 2e10, now_s=0.0)
    decided = planner.plan(turn(sources=(POOL,)), [busy, idle], now_s=0.0)
    assert decided.plan.decode == "c"
    planner.commit("request", decided.plan, now_s=0.0)
    assert len(planner.flows) == 4


def test_behind_a_queue_a_prompt_delays_those_too_who_come_while_that_is_served():
    queue = {"queued_tokens": 8_000, "waiting": 1, "cached_tokens": 12_800}
    behind = worker("a", utilisation=0.2, **queue)
    explained = CostPolicy(SPEC).planner.plan(
        turn(), [behind, worker("b", utilisation=0.2)], now_s=0.0, exhaustive=True
    )
    terms = {one.decode: one.terms for one in explained.explanation.candidates}
    assert terms["a"].prefill < terms["b"].prefill
    assert terms["a"].e_queue > 2 * terms["b"].e_queue > 0


def test_a_session_leaves_its_owner_only_for_a_reason():
    owner = worker("a", running=20, cached_tokens=70_400)
    slightly_better = worker("b", running=19, cached_tokens=70_400)
    assert decide([owner, slightly_better], owners=("a",)).plan.decode == "a"
    assert decide([owner, slightly_better]).plan.decode == "b"


def test_who_has_just_moved_moves_again_only_for_a_better_reason():
    owner = worker("a", cached_tokens=70_400, queued_tokens=12_000, waiting=1)
    other = worker("b", cached_tokens=70_400)
    assert decide([owner, other], owners=("a",)).plan.decode == "b"
    assert decide([owner, other], owners=("a",), moved_ago_s=1.0).plan.decode == "a"
    crowded = dataclasses.replace(owner, queued_tokens=300_000)
    assert decide([crowded, other], owners=("a",), moved_ago_s=1.0).plan.decode == "b"


def test_interactive_requests_avoid_uncertainty_and_background_ones_do_not_mind():
    vague = worker("a", queued_tokens=20_000, waiting=1)
    sure = worker("b", running=0, queued_tokens=23_000, waiting=1)
    planner = CostPolicy(SPEC.model_copy(update={"others_weight": 0.0})).planner
    for _ in range(200):
        planner.models.queues.observe("a", expected_s=1.0, waited_s=0.1)
        planner.models.queues.observe("a", expected_s=1.0, waited_s=1.8)
        planner.models.queues.observe("b", expected_s=1.0, waited_s=1.0)
    interactive = decide([vague, sure], planner)
    background = decide([vague, sure], planner, urgency=RequestClass.BACKGROUND)
    assert (interactive.plan.decode, background.plan.decode) == ("b", "a")
    assert background.plan.terms["risk"] == 0


def test_predictions_that_come_late_widen_the_risk():
    planner = CostPolicy(SPEC).planner
    before = decide([worker("a", queued_tokens=9_000)], planner).plan.terms["risk"]
    for _ in range(100):
        planner.models.came_true("extend", expected_s=1.0, sd_s=0.1, actual_s=1.5)
    assert decide([worker("a", queued_tokens=9_000)], planner).plan.terms["risk"] > 2 * before


def test_a_shared_prefix_is_copied_when_its_holders_cannot_keep_up():
    hot = {"prompt_tokens": 22_000, "shared_tokens": 20_032, "shared_holders": 1}
    holder = worker("a", cached_tokens=20_032, queued_tokens=3_000, waiting=1)
    spare = worker("b")
    calm = decide([holder, spare], **hot, shared_per_s=1.0, shared_busy=0.0)
    rush = decide([holder, spare], **hot, shared_per_s=5.0, shared_busy=0.95)
    assert (calm.plan.decode, rush.plan.decode) == ("a", "b")
    assert rush.plan.terms["replicate"] < 0


def test_space_that_others_will_miss_is_spared():
    dear = worker("a", unused_blocks=0, space_price_s=0.005)
    cheap = worker("b", unused_blocks=16_384, space_price_s=0.005, running=1)
    assert decide([dear, cheap]).plan.decode == "b"


def test_a_session_start_that_would_be_late_is_deferred_and_a_turn_never_is():
    spec = SPEC.model_copy(update={"first_token_target": 2.0})
    crowded = worker("a", queued_tokens=400_000, waiting=20)
    policy = open_policy(spec)
    decided = policy.planner.plan(turn(starts_session=True), [crowded], now_s=0.0)
    assert decided.plan.mode is Mode.DEFER
    assert decided.plan.wait_s > 2
    with pytest.raises(Overloaded) as refused:
        policy.choose(turn(starts_session=True), [crowded], now_s=0.0)
    assert refused.value.retry_after_s == decided.plan.wait_s
    assert policy.choose(turn(), [crowded], now_s=0.0).decode == "a"
    idle = policy.choose(turn(starts_session=True, prompt_tokens=250_000), [worker("a")], now_s=0.0)
    assert idle.decode == "a"  # late however long it waited


def test_nobody_is_told_why():
    with pytest.raises(Unavailable, match="a is draining"):
        decide([worker("a", draining=True)])


def test_room_comes_when_the_worker_says_or_when_its_answers_end():
    full = worker("a", running=10, free_blocks=0)
    told = dataclasses.replace(full, releases=((1.0, 500), (4.0, 2_000)))
    assert wait_for_room(told, 1_000, 8.0).mean == 4.0
    assert wait_for_room(told, 400, 8.0).mean == 1.0
    guessed = wait_for_room(full, 1_000, 8.0)  # 1,638 blocks each, so one has to end
    assert guessed.mean == pytest.approx(0.8)
    assert guessed.var == pytest.approx(0.8**2)
    assert wait_for_room(worker("b"), 1_000, 8.0) == (0.0, 0.0)
    lying = worker("c", running=0, free_blocks=0)
    assert wait_for_room(lying, 1_000, 1e9).mean <= NEVER_S
    behind = worker("d", running=10, waiting=5, free_blocks=4_000)
    assert wait_for_room(behind, 1_000, 8.0).mean > 0


def test_an_explanation_names_every_plan_when_asked():
    decided = CostPolicy(SPEC).planner.plan(
        turn(sources=(POOL,)), [worker("a"), worker("b", node="n1")], now_s=0.0, exhaustive=True
    )
    named = {(c.decode, c.mode, c.source) for c in decided.explanation.candidates}
    assert named >= {
        ("a", Mode.EXTEND, None),
        ("b", Mode.EXTEND, None),
        ("b", Mode.FETCH, "pool-1"),
    }
    assert decided.explanation.left_out == 0
    assert decided.explanation.chosen in decided.explanation.candidates


def test_a_transfer_that_would_slow_many_others_is_not_worth_a_little_time():
    selfish = CostPolicy(SPEC.model_copy(update={"others_weight": 0.0})).planner
    kind = CostPolicy(SPEC.model_copy(update={"others_weight": 2.0})).planner
    for planner, mode in ((selfish, Mode.SPLIT), (kind, Mode.EXTEND)):
        far = worker("b", node="n2", queued_tokens=4_000, waiting=1)
        for number in range(80):
            planner.flows.start(str(number), planner.routes.to_worker(POOL, far), 3e11, now_s=0.0)
        assert planner.plan(turn(sources=(POOL,)), [far], now_s=0.0).plan.mode is mode


HALVES = (
    {"role": Role.PREFILL, "roles": (Role.PREFILL,)},
    {"role": Role.DECODE, "roles": (Role.DECODE,)},
)
SESSIONS = [number.to_bytes(2, "big") for number in range(12)]


def slowed(workers, link, **fields):
    """A planner that has seen transfers over a link take twenty times as long as they should."""
    planner = CostPolicy(SPEC).planner
    decide(workers, planner, **fields)  # the links are known from now on
    size = 2_500_000_000
    for _ in range(40):
        planner.models.links.observe(link, size, size / 2.5e9, sharing=1.0, now_s=0.0)
    return planner


def test_of_two_equal_decode_workers_the_one_behind_the_faster_link_is_chosen():
    prefill, decode = HALVES
    workers = [worker("p", node="n0", **prefill)]
    workers += [worker(f"d{number}", node=f"n{number}", **decode) for number in (1, 2, 3)]
    planner = slowed(workers, "d1/in")
    for session in SESSIONS:
        assert decide(workers, planner, session=session).plan.decode != "d1"


def test_of_two_equal_prefill_workers_the_one_behind_the_faster_link_is_chosen():
    prefill, decode = HALVES
    workers = [worker(f"p{number}", node=f"n{number}", **prefill) for number in (1, 2, 3)]
    workers += [worker("d", node="n0", **decode)]
    planner = slowed(workers, "p1/out")
    for session in SESSIONS:
        assert decide(workers, planner, session=session).plan.prefill != "p1"


@pytest.mark.parametrize(("kind", "node"), [("host", "n1"), ("in", "n5")])
def test_of_two_workers_of_a_node_the_one_that_reads_faster_prefills(kind, node):
    prefill, decode = HALVES
    workers = [worker(name, node="n1", **prefill) for name in ("p1", "p2")]
    workers += [worker("d", node="n0", **decode)]
    pool = KvSource("pool", node, "dram", 70_400)
    planner = slowed(workers, f"p1/{kind}", sources=(pool,))
    for session in SESSIONS:
        plan = decide(workers, planner, session=session, sources=(pool,)).plan
        assert plan.prefill == "p2"


def test_a_worker_that_reads_already_is_no_twin_of_one_that_does_not():
    prefill, decode = HALVES
    workers = [worker(name, node="n1", **prefill) for name in ("p1", "p2")]
    workers += [worker("d", node="n0", **decode)]
    pool = KvSource("pool", "n1", "dram", 70_400)
    planner = CostPolicy(SPEC).planner
    decide(workers, planner, sources=(pool,))
    for number in range(20):
        planner.flows.start(f"read {number}", ("p1/host",), 5e9, now_s=0.0)
    for session in SESSIONS:
        assert decide(workers, planner, session=session, sources=(pool,)).plan.prefill == "p2"
