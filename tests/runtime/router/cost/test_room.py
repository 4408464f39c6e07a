"""When there is room, behind those who are in line for it."""

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kimi_runtime.router.cost.room import NEVER_S, wait_for_room
from kimi_runtime.router.estimate.outputs import Length
from kimi_runtime.router.insight import Insight
from kimi_runtime.router.ledger import Ledger
from kimi_runtime.router.policies.cost import CostPolicy
from kimi_runtime.router.view import Line
from kimi_runtime.spec.router import Cost
from kimi_runtime.spec.worker import LoadReport
from router_core import info_of
from worker_views import turn, worker

SECONDS = st.floats(0.01, 60.0)
BLOCKS = st.integers(1, 900)
LINES = st.builds(
    Line,
    blocks=st.integers(-900, 1_800),
    waits=st.lists(st.tuples(BLOCKS, SECONDS), max_size=6).map(tuple),
    releases=st.lists(st.tuples(SECONDS, BLOCKS), max_size=8).map(tuple),
    share=st.floats(0.1, 1.0),
)


def waited(line, need):
    full = worker("w", running=8, waiting=len(line.waits), free_blocks=0, line=line)
    return wait_for_room(full, need, 8.0)


@settings(max_examples=100, deadline=None)
@given(LINES, BLOCKS, BLOCKS)
def test_more_room_comes_no_sooner_and_no_wait_is_more_uncertain_than_long(line, need, more):
    usual = waited(line, need)
    assert 0 <= usual.mean <= NEVER_S
    assert usual.mean <= waited(line, need + more).mean
    assert usual.var <= usual.mean**2 + 1e-9
    alone = line._replace(waits=())
    freer = alone._replace(blocks=line.blocks + more)
    assert waited(freer, need).mean <= waited(alone, need).mean


@settings(max_examples=100, deadline=None)
@given(LINES, BLOCKS)
def test_nobody_has_room_before_those_who_came_earlier(line, need):
    assume(line.waits)
    line = line._replace(share=1.0)
    *earlier, (blocks, _) = line.waits
    assert waited(line, need).mean >= waited(line._replace(waits=tuple(earlier)), blocks).mean


@settings(max_examples=60, deadline=None)
@given(LINES, BLOCKS)
def test_no_wait_is_told_where_there_is_room_for_everybody(line, need):
    enough = sum(blocks for blocks, _ in line.waits) + need
    assert waited(line._replace(blocks=enough), need) == (0.0, 0.0)


def test_the_first_of_many_ends_sooner_than_each_of_them_is_expected_to():
    one = waited(Line(0, (), ((4.0, 100),)), 50)
    many = waited(Line(0, (), ((4.0, 100),) * 8), 50)
    assert (one.mean, one.sd) == (4.0, 4.0)
    assert many.mean == pytest.approx(0.5)


def test_a_request_that_shares_its_front_with_those_that_run_needs_less():
    line = Line(600, (), ((4.0, 100),), share=0.5)
    assert waited(line, 1_000).mean == 0.0
    assert waited(line._replace(share=1.0), 1_000).mean > 0.0


class Bench:
    """One worker of a router that learns: what it reports, and what was sent there."""

    def __init__(self):
        self.planner = CostPolicy(Cost(model="kimi-k2.6", gpu="MI355X", tensor=4)).planner
        self.insight = Insight(self.planner, load_interval_s=0.2)
        self.ledger = Ledger("router-0", stale_after_s=1.0)
        self.info = info_of("w", total_blocks=1_000)
        self.seq = 0

    def send(self, name, blocks, *, made=0):
        self.ledger.start("w", name, new_tokens=0)
        length = Length(5.0, 1.0, 4_096.0)
        tokens = blocks * self.info.block_tokens - made
        self.insight.answers.begin("w", name, prompt_tokens=tokens, length=length)
        if made:
            self.insight.answers.sampled("w", name, made)

    def report(self, seen, **fields):
        self.seq += 1
        usual = {"waiting": 0, "running": 0, "queued_tokens": 0, "free_blocks": 0, "steps": 0}
        told = {"last_request": {"router-0": seen}, "total_blocks": 1_000, "epoch": 1}
        report = LoadReport(**usual | told | {"seq": self.seq} | fields)
        self.ledger.report("w", report, now_s=0.0)

    def line(self, need=300):
        load = self.ledger.loads(["w"], now_s=0.0)["w"]
        tokens = need * self.info.block_tokens
        return self.insight.facts(self.info, load, held=None, need_tokens=tokens, now_s=0.0)


def test_who_was_sent_since_the_report_takes_what_the_report_calls_free():
    bench = Bench()
    bench.send("a", 400, made=1)
    bench.report("a", running=1, in_flight={"router-0": 1}, free_blocks=600, short_blocks=0)
    bench.send("b", 500)
    line = bench.line().line
    assert line.blocks == 600
    assert [blocks for blocks, _ in line.waits] == [500]
    assert [blocks for _, blocks in line.releases] == [400]
    assert bench.line(need=100).line == Line(100), "there is room for both"


def test_what_those_who_wait_lack_is_theirs_once():
    bench = Bench()
    bench.send("a", 700, made=1)
    bench.send("b", 500)
    told = {"running": 1, "waiting": 1, "in_flight": {"router-0": 2}}
    bench.report("b", **told, free_blocks=0, short_blocks=200)
    line = bench.line().line
    assert line.blocks == 300, "of 1,000 a has 700"
    assert [blocks for blocks, _ in line.waits] == [500]
    assert waited(line, 0).mean > 0, "b is before us"


def test_blocks_of_other_routers_are_theirs_evenly():
    bench = Bench()
    bench.send("a", 400, made=1)
    told = {"running": 4, "in_flight": {"router-0": 1, "router-1": 3}}
    bench.report("a", **told, free_blocks=0, short_blocks=0)
    assert sorted(blocks for _, blocks in bench.line().line.releases) == [200, 200, 200, 400]


def test_fronts_that_requests_share_are_taken_once():
    bench = Bench()
    bench.send("a", 600, made=1)
    bench.send("b", 600, made=1)
    told = {"running": 2, "in_flight": {"router-0": 2}}
    bench.report("b", **told, free_blocks=100, short_blocks=0)
    line = bench.line().line
    assert line.share == pytest.approx(900 / 1_200)
    assert sum(blocks for _, blocks in line.releases) == 900


def test_an_engine_that_tells_no_shortage_is_estimated_by_who_waits():
    bench = Bench()
    bench.send("a", 900, made=1)
    bench.send("b", 500)
    bench.report("b", running=1, waiting=1, in_flight={"router-0": 2}, free_blocks=0)
    facts = bench.line()
    assert facts.line is None
    assert facts.releases
    full = worker("w", running=1, waiting=1, free_blocks=0, total_blocks=1_000)
    assert wait_for_room(dataclasses.replace(full, releases=facts.releases), 300, 8.0).mean > 0


def test_a_plan_waits_as_long_as_the_line_does():
    planner = CostPolicy(Cost(model="kimi-k2.6", gpu="MI355X", tensor=4)).planner
    line = Line(-500, ((700, 9.0),), ((5.0, 600), (6.0, 600)))
    views = [worker("a", running=2, waiting=1, free_blocks=0, line=line), worker("b", running=3)]
    decided = planner.plan(turn(), views, now_s=0.0, exhaustive=True)
    assert decided.plan.decode == "b"
    queued = {one.decode: one.terms.queue for one in decided.explanation.candidates}
    assert queued["a"] >= waited(line, 1_110).mean > queued["b"]
