"""A link that is thought to carry nothing is not used, and not divided by."""

import math

import pytest

from kimi_runtime.router.view import KvSource
from router_core import Core, keys_of

FAR = KvSource("n9", "n9", "dram", 96_000)
ASK = {"prompt_tokens": 100_000, "sources": (FAR,)}


def inbound(core):
    links = core.planner.routes.to_worker(FAR, core.look([])[1][0])
    assert links
    return links


def test_a_source_behind_a_link_that_is_gone_is_not_read_from():
    core = Core("a", node="n1", fetches=True)
    assert core.decide(**ASK).plan.fetches
    for link in inbound(core):
        core.planner.models.links.forget(link)
    plan = core.decide(**ASK).plan
    assert plan.fetches == ()
    assert all(math.isfinite(term) for term in plan.terms.values())


def test_a_link_that_hardly_carries_anything_is_known_for_it_and_tried_again_later():
    core = Core("a", node="n1", fetches=True)
    rates, flows, links = core.planner.models.links, core.planner.flows, inbound(core)
    healthy_s = flows.seconds(links, 1e9).mean
    for number in range(400):
        for link in links:
            rates.observe(link, 1_000_000_000, 3600.0, sharing=1.0, now_s=0.01 * number)
    core.decide(now_s=4.0, **ASK)
    assert flows.seconds(links, 1e9).mean > 20 * healthy_s
    core.decide(now_s=900.0, **ASK)
    assert flows.seconds(links, 1e9).mean < 2 * healthy_s


def test_transfers_that_took_no_time_or_for_ever_teach_no_nonsense():
    core = Core("a", node="n1", fetches=True)
    rates = core.planner.models.links
    for number, seconds in enumerate((0.0, -1.0, math.inf, math.nan, 1e12)):
        for link in inbound(core):
            rates.observe(link, 1_000_000, seconds, sharing=0.0, now_s=float(number))
            rates.observe(link, 0, 1.0, sharing=1.0, now_s=float(number))
    plan = core.decide(now_s=10.0, **ASK).plan
    assert all(math.isfinite(term) for term in plan.terms.values())


@pytest.mark.parametrize("tokens", [0, 1, 63, 10**9])
def test_what_a_source_claims_to_have_never_passes_the_prompt(tokens):
    core = Core("a", node="n1", fetches=True)
    source = KvSource("n9", "n9", "dram", tokens)
    plan = core.decide(keys_of(3), prompt_tokens=1_000, sources=(source,)).plan
    assert all(fetch.end < 1_000 for fetch in plan.fetches)
