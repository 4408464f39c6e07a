"""Columns that are kept are those that would be made."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.router.cost.columns import Columns
from kimi_runtime.router.estimate.changes import REMEMBERED, Changes
from kimi_runtime.router.estimate.models import Models
from kimi_runtime.spec.speed import known_prior
from kimi_runtime.spec.worker import Role
from worker_views import worker

PRIOR = known_prior("kimi-k2.6", "MI355X", tensor=4)
NAMES = ("a", "b", "c", "d", "e")
KINDS = ("", "x", "y")

names = st.sampled_from(NAMES)
views = st.builds(
    worker,
    names,
    role=st.sampled_from(Role),
    kind=st.sampled_from(KINDS),
    running=st.integers(0, 9),
    waiting=st.integers(0, 3),
    queued_tokens=st.integers(0, 9_000),
    cached_tokens=st.sampled_from([0, 64, 9_000]),
    free_blocks=st.sampled_from([0, 16_384, 20_000]),
    certain=st.booleans(),
    age_s=st.sampled_from([0.0, 3.0]),
    utilisation=st.sampled_from([None, 0.5]),
    checkpoints=st.sampled_from([None, (), (64,)]),
    streams=st.sampled_from([1, 4]),
    queued_depth=st.sampled_from([None, 70_000.0]),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("view"), views),
        st.tuples(st.just("see"), views),
        st.tuples(st.sampled_from(["hit", "queue", "forget"]), names),
        st.tuples(st.sampled_from(["prefill", "step"]), st.tuples(names, st.sampled_from(KINDS))),
        st.tuples(st.just("many"), names),
        st.tuples(st.just("ask"), st.permutations(NAMES)),
    ),
    max_size=24,
)


def happen(models, what, of):
    match what:
        case "hit":
            models.hits.observe(of, "hbm", predicted=100, found=20)
        case "queue":
            models.queues.observe(of, expected_s=1.0, waited_s=3.0)
        case "forget":
            models.forget(of)
        case "prefill":
            models.speeds(of[1]).prefilled(of[0], 9_000, 0, 7.0, now_s=0.0)
        case "step":
            models.speeds(of[1]).stepped(of[0], 3, 9_000, 0.5, now_s=0.0)
        case "many":
            for _ in range(REMEMBERED + 1):
                models.queues.observe(of, expected_s=1.0, waited_s=2.0)


@settings(max_examples=300, deadline=None)
@given(steps, st.sampled_from([2, 100]))
def test_what_is_kept_is_what_would_be_made(drawn, max_rows):
    models = Models(PRIOR)
    columns = Columns(models, max_rows=max_rows)
    now = {name: worker(name) for name in NAMES}
    asked = list(NAMES)
    for what, of in drawn:
        if what == "view":
            now[of.name] = of
        elif what == "see":
            columns.see(of)  # of a moment that nobody asks about, perhaps
        elif what == "ask":
            asked = of[: len(of) - of.index("a")]
        else:
            happen(models, what, of)
        seen = [now[name] for name in asked]
        for kept, made in zip(columns.of(seen), Columns(models).of(seen), strict=True):
            assert np.array_equal(kept, made)
        assert len(columns._rows) <= max(max_rows, len(NAMES)) + 1


@given(st.lists(names, max_size=2 * REMEMBERED), st.integers(0, 2 * REMEMBERED))
def test_a_reader_is_told_all_that_changed_since_or_that_it_is_too_much(drawn, read):
    changes = Changes()
    for name in drawn:
        changes.add(name)
    read = min(read, len(drawn))
    told = changes.since(read)
    if len(drawn) - read > REMEMBERED:
        assert told is None
    else:
        assert sorted(told) == sorted(drawn[read:])
