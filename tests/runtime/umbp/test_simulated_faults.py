"""Whatever goes wrong at whichever step: right bytes or a miss, in time, and nothing is left over.

`scripts/faults` takes every step and every fault; here each kind of step meets each of its faults
once, and a part of what can happen to processes.
"""

import logging

import pytest

from kimi_connect import blocks
from kimi_connect.arena import Arena
from kimi_connect.blocks import CopiedOut
from kimi_runtime.umbp import loading
from kimi_runtime.umbp.remote import landing
from mishaps import MEETS, Blow, Kind, Mishap, Upset, at
from virtual_runs import UPSETS, everyday, first_of_each, run, storm

STORMS, TOGETHER = 40, 20


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.ERROR)  # what goes wrong here is told by assertions
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def calm():
    """The run in which nothing goes wrong."""
    return run(everyday)


def test_a_run_is_repeated_exactly_by_its_seed(calm):
    assert run(everyday) == calm
    assert storm(3) == storm(3)
    assert storm(3).trace != storm(4).trace


def test_the_everyday_run_takes_every_kind_of_step_and_gets_every_block(calm):
    assert {step.kind for step in calm.trace} == set(Kind)
    words = {step.what for step in calm.trace}
    assert words >= {"PUT", "KEEP", "KEPT", "claim", "RESERVE", "COMMIT"}
    assert words >= {"PIN", "UNPIN", "RENEW", "SERVED", "USED"}
    assert words >= {"Lend", "GiveBack", "Offer", "SsdTier.put.<lambda>", "SsdTier.get.<lambda>"}
    assert calm.loaded >= 4 * 3 + 16


@pytest.mark.parametrize("mishap", Mishap)
def test_each_kind_of_step_survives_what_can_happen_to_it(calm, mishap):
    met = [n for n, step in first_of_each(calm.trace) if mishap in MEETS[step.kind]]
    assert met
    for number in met:
        blow = Blow(mishap)
        hit = run(everyday, plan=at(number, blow))
        assert hit.blows == [(number, calm.trace[number], blow)]


def test_what_happens_to_processes_as_a_step_begins_is_survived(calm):
    """Each kind of step meets one, which is another at the next kind."""
    for turn, (number, _) in enumerate(first_of_each(calm.trace)):
        run(everyday, plan=at(number, Blow(*UPSETS[turn % len(UPSETS)])))


@pytest.mark.parametrize("part", range(STORMS // TOGETHER))
def test_engines_at_work_survive_one_blow_after_another(part):
    runs = [storm(seed) for seed in range(part * TOGETHER, (part + 1) * TOGETHER)]
    assert sum(len(one.blows) for one in runs) > TOGETHER
    assert sum(one.loaded for one in runs) > TOGETHER


def test_a_pool_that_checks_nothing_is_found_out(calm, monkeypatch):
    """The oracle sees what tags would have caught."""
    copies = [n for n, step in enumerate(calm.trace) if step.kind is Kind.COPY]
    monkeypatch.setattr(landing, "matches", lambda *_: True)
    for where in (loading, blocks):
        monkeypatch.setattr(where, "copy_out", copied_unchecked)
    with pytest.raises(BaseExceptionGroup, match="unhandled") as caught:
        run(everyday, plan=at(copies[0], Blow(Mishap.CORRUPT)))
    assert caught.value.subgroup(lambda exc: "wrong bytes" in str(exc))


def copied_unchecked(arena, keys, pinned, into, leaves, stop):
    for block, target in zip(pinned, into, strict=False):
        target[:] = b"".join(arena.parts(block.extents, block.size))
    return CopiedOut(min(len(pinned), len(into)))


def test_pins_that_outlive_their_readers_are_found_out(calm, monkeypatch):
    """So is memory that nobody gives back."""
    (unpin, *_) = [n for n, step in enumerate(calm.trace) if step.what == "UNPIN"]
    monkeypatch.setattr("kimi_runtime.umbp.pool.Pool.reader_gone", lambda *_: 0)
    monkeypatch.setattr("kimi_runtime.umbp.pool.Pool.expire", lambda *_: None)
    with pytest.raises(BaseExceptionGroup) as caught:
        run(everyday, plan=at(unpin, Blow(Upset.KILLED, calm.trace[unpin].who)))
    assert caught.value.subgroup(TimeoutError)


def test_a_stock_that_is_given_away_under_its_writer_is_found_out(calm, monkeypatch):
    """So are pages that two write to, by the tags of whoever has them then."""
    (*_, claim) = [n for n, step in enumerate(calm.trace) if step.kind is Kind.CLAIM]
    copies = [n for n, step in enumerate(calm.trace) if step.kind is Kind.THREAD and n > claim]
    plan = at(copies[0], Blow(Mishap.DELAY))
    run(everyday, plan=plan)
    monkeypatch.setattr(Arena, "claim", lambda *_: True)
    with pytest.raises(BaseExceptionGroup, match="unhandled") as caught:
        run(everyday, plan=plan)
    assert caught.value.subgroup(lambda exc: "written over" in str(exc))


def test_a_wait_without_an_end_is_found_out():
    async def hangs(cluster):
        await cluster.loop.create_future()

    with pytest.raises(TimeoutError):
        run(hangs)
