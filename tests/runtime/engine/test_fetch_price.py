"""Whether blocks are fetched or computed."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_connect.wire import Source, Stretch
from kimi_runtime.engine.fetch_price import worth_fetching
from kimi_runtime.engine.pace import PrefillPace

BLOCK = 64
SECONDS = st.floats(0, 10, allow_subnormal=False)


def compute(tokens, before):
    return 1e-3 * tokens + 1e-7 * tokens * (before + tokens / 2)


def stretch(blocks, seconds, source=Source.SSD):
    return Stretch(blocks, source, seconds)


def worth(*stretches, before=0, by=compute):
    return worth_fetching(stretches, block_tokens=BLOCK, before=before, compute=by)


def test_what_comes_sooner_than_it_is_computed_is_fetched():
    assert worth(stretch(10, 0.1))[:2] == (10, 0)


def test_what_is_sooner_computed_is_not():
    assert worth(stretch(10, 1.0))[:2] == (0, 10)


def test_a_run_is_cut_where_it_gets_too_dear():
    cheap, dear = stretch(10, 0.1, Source.MEMORY), stretch(10, 5.0, Source.PEER)
    assert worth(cheap, dear)[:2] == (10, 10)


def test_a_dear_stretch_is_taken_for_the_sake_of_what_follows_it():
    dear, cheap = stretch(2, 0.5, Source.PEER), stretch(100, 0.1, Source.MEMORY)
    assert worth(dear, cheap)[:2] == (102, 0)


def test_the_same_fetch_pays_deep_in_a_prompt_and_not_at_its_start():
    assert worth(stretch(1, 0.07))[:2] == (0, 1)
    assert worth(stretch(1, 0.07), before=100_000)[:2] == (1, 0)


def test_an_engine_that_has_computed_nothing_yet_fetches_everything():
    assert worth(stretch(10, 9.0), by=lambda tokens, before: None) == (10, 0, None)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.builds(stretch, st.integers(1, 500), SECONDS), max_size=6), st.integers(0, 10**6)
)
def test_no_other_cut_between_stretches_is_sooner(stretches, before):
    def all_s(count):
        blocks = sum(one.blocks for one in stretches[:count])
        rest = (sum(one.blocks for one in stretches) - blocks) * BLOCK
        fetch_s = sum(one.seconds for one in stretches[:count])
        return fetch_s + (compute(rest, before + blocks * BLOCK) if rest else 0.0)

    chosen = worth(*stretches, before=before)
    sums = [sum(one.blocks for one in stretches[:n]) for n in range(len(stretches) + 1)]
    cut = sums.index(chosen.blocks)
    assert all_s(cut) <= min(all_s(n) for n in range(len(stretches) + 1)) + 1e-6
    assert chosen.blocks + chosen.refused == sums[-1]


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-6, 1e-2), st.floats(0, 2e-3), st.integers(0, 1 << 30))
def test_the_pace_is_learnt_from_steps(token_s, more_s, seed):
    dice, pace, pair_s = random.Random(seed), PrefillPace(), token_s * more_s
    for _ in range(100):
        before, new = dice.randrange(0, 30_000), dice.randrange(64, 600)
        took_s = token_s * new + pair_s * new * (before + new / 2)
        pace.step([(before, new)], took_s * dice.uniform(0.9, 1.1))
    for tokens, before in ((1024, 0), (512, 20_000), (16_384, 1000)):
        true_s = token_s * tokens + pair_s * tokens * (before + tokens / 2)
        assert 0.5 < pace.seconds(tokens, before) / true_s < 2


def test_decode_steps_say_nothing_of_prompts():
    pace = PrefillPace()
    pace.step([(1000, 1)] * 100, 0.5)
    pace.step([(1000, 1)] * 100 + [(0, 64)], 0.5)
    pace.step([(0, 10)], 0.5)
    assert pace.seconds(100, 0) is None
    pace.step([(0, 512), (9, 1)], 0.5)
    assert 0.08 < pace.seconds(100, 0) < 0.12
