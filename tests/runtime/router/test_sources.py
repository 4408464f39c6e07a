"""Which memories a decision may plan to read from, by what workers say that they can."""

import dataclasses

from kimi_runtime.router.cost.hits import Sources
from kimi_runtime.router.policies.cost import CostPolicy
from kimi_runtime.router.view import KvSource
from kimi_runtime.spec.router import Cost
from worker_views import turn, worker

FAR = KvSource("n9", "n9", "dram", 6400)
PEER = KvSource("w1", "n1", "hbm", 3200)
ASKED = turn(prompt_tokens=7000, sources=(FAR,))


def names(view):
    return [source.name for _, source in Sources(ASKED, [PEER]).each([view])[0]]


def test_pools_and_peers_are_sources_of_workers_that_can_be_told_to_read_them():
    assert names(worker("w0", node="n0", fetches=True)) == ["n9", "w1"]
    assert names(worker("w0", node="n0", fetches=False)) == ["n9"]


def test_a_worker_that_reaches_its_own_pool_only_is_planned_with_that():
    near = worker("w0", node="n0", reads_pools=False, pool_tokens=1280)
    assert names(near) == ["pool"]
    assert names(dataclasses.replace(near, pool_tokens=0)) == []


def test_a_mixed_fleet_plans_each_worker_with_what_it_can_reach():
    able = worker("w0", node="n0", fetches=True)
    unable = worker("w1", node="n1", reads_pools=False)
    plan = CostPolicy(Cost(model="kimi-k2.6", gpu="MI355X", tensor=4)).choose(
        dataclasses.replace(
            ASKED, prompt_tokens=100_000, sources=(dataclasses.replace(FAR, tokens=96_000),)
        ),
        [able, unable],
        now_s=0.0,
    )
    assert plan.decode == "w0"
    assert [fetch.source for fetch in plan.fetches] == ["n9"]
