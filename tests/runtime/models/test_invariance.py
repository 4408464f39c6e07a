"""A row's bf16 logits are bitwise the same in any batch, chunking, placement and cache state."""

import functools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.models.cache import KvCache
from kimi_runtime.spec.model import KIMI_NANO
from tiny_k2 import BLOCK_TOKENS, Run, all_logits, cache_of, model_of, random_ids, tiny_spec

POOL_BLOCKS = 160


@functools.cache
def tiny(heads=4):
    return model_of(tiny_spec(heads=heads))[0]


@functools.cache
def nano():
    return model_of(KIMI_NANO)[0]


@functools.cache
def expected(model, length, seed, vocab=320):
    """Ids, and the logits after each of them when the prompt is one step of its own."""
    ids = random_ids(length, seed, vocab)
    return ids, all_logits(model, ids)


@st.composite
def schedules(draw, *, requests, longest):
    """Requests' lengths, how each is cut, which steps its parts are in, and all blocks' places."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=requests))
    cuts = [
        sorted(draw(st.sets(st.integers(1, length), max_size=4)) | {length}) for length in lengths
    ]
    tails = [draw(st.integers(0, min(3, length - 1))) for length in lengths]
    for length, cut, tail in zip(lengths, cuts, tails, strict=True):
        # the last few tokens one by one, as a decode would
        cut[:] = sorted(
            {c for c in cut if c <= length - tail} | set(range(length - tail, length + 1))
        )
    return lengths, cuts, draw(st.randoms(use_true_random=False))


def play(model, schedule, *, vocab=320):
    """Run the schedule, random parts of random requests in each step; compare every logit row."""
    lengths, cuts, chance = schedule
    places = chance.sample(range(POOL_BLOCKS), POOL_BLOCKS)
    tables, pending = [], {}
    for number, (length, cut) in enumerate(zip(lengths, cuts, strict=True)):
        count = -(-length // BLOCK_TOKENS)
        tables.append(tuple(places.pop() for _ in range(count)))
        starts = [0, *cut]
        pending[number] = [(a, b) for a, b in zip(starts, cut, strict=False) if b > a]
    cache = cache_of(model, POOL_BLOCKS, fill=torch.nan)
    while pending:
        chosen = chance.sample(sorted(pending), chance.randint(1, len(pending)))
        runs, ends = [], []
        for number in chosen:
            start, end = pending[number].pop(0)
            ids, _ = expected(model, lengths[number], number, vocab)
            runs.append(Run(start, ids[start:end], tables[number]))
            ends.append((number, end))
            if not pending[number]:
                del pending[number]
        got = model.logits(runs, cache)
        for row, (number, end) in enumerate(ends):
            want = expected(model, lengths[number], number, vocab)[1][end - 1]
            assert torch.equal(got[row], want), (ends, lengths[number])


@given(schedules(requests=6, longest=330))
@settings(max_examples=30, deadline=None)
def test_any_chunking_batch_and_placement_gives_the_same_bits(schedule):
    play(tiny(), schedule)


@pytest.mark.parametrize("heads", [8, 12])
def test_other_numbers_of_heads_keep_the_promise(heads):
    @given(schedules(requests=3, longest=280))
    @settings(max_examples=6, deadline=None)
    def check(schedule):
        play(tiny(heads), schedule)

    check()


@given(schedules(requests=4, longest=520))
@settings(max_examples=6, deadline=None)
def test_nano_keeps_the_promise(schedule):
    play(nano(), schedule, vocab=2048)


@pytest.mark.parametrize(
    ("which", "batches"), [(tiny, tuple(range(1, 65))), (nano, (1, 2, 5, 16, 33, 48, 64))]
)
def test_batches_of_1_to_64_decode_the_same_bits(which, batches):
    model = which()
    ids, logits = expected(model, 301, 0)
    tables = [tuple(range(5 * i, 5 * i + 5)) for i in range(64)]
    cache = cache_of(model, 5 * 64)
    lengths = [(37 * i) % 300 + 1 for i in range(64)]
    prompts = [Run(0, ids[:length], table) for length, table in zip(lengths, tables, strict=True)]
    for first in range(0, 64, 16):
        model.logits(prompts[first : first + 16], cache)
    runs = [
        Run(length, ids[length : length + 1], table)
        for length, table in zip(lengths, tables, strict=True)
    ]
    want = logits[lengths]
    for batch in batches:
        first = (17 * batch) % (65 - batch)
        part = slice(first, first + batch)
        assert torch.equal(model.logits(runs[part], cache), want[part]), batch


def test_a_shared_prefix_gives_the_same_bits_as_an_own_one():
    model = tiny()
    prefix = random_ids(192, seed=9)
    tails = [random_ids(70, seed=seed) for seed in (10, 11)]
    cache = cache_of(model, 12, fill=torch.nan)
    model.logits([Run(0, prefix, (4, 2, 9))], cache)
    runs = [Run(192, tail, (4, 2, 9, 2 * i + 5, 2 * i + 6)) for i, tail in enumerate(tails)]
    got = model.logits(runs, cache)
    want = [all_logits(model, prefix + tail)[-1] for tail in tails]
    assert torch.equal(got, torch.stack(want))


def test_blocks_copied_to_another_pool_give_the_same_bits():
    model = tiny()
    ids, want = expected(model, 200, 12)
    shape = (8, model.spec.layers, BLOCK_TOKENS, model.spec.kv_row_dim)
    sender, receiver = (torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2))
    model.logits([Run(0, ids[:150], (0, 1, 2))], KvCache(sender))
    receiver[[6, 1, 3]] = sender[[0, 1, 2]]
    for end in range(151, 201):
        got = model.logits([Run(end - 1, ids[end - 1 : end], (6, 1, 3, 0))], KvCache(receiver))
        assert torch.equal(got[0], want[end - 1])


def test_what_lies_behind_a_history_is_never_read():
    model = tiny()
    ids, want = expected(model, 100, 13)
    cache = cache_of(model, 4, fill=torch.nan)
    model.logits([Run(0, ids[:99], (3, 1))], cache)
    got = model.logits([Run(99, ids[99:], (3, 1))], cache)
    assert torch.equal(got[0], want[-1])


def test_a_row_of_nan_stays_alone():
    model = tiny()
    first, second = (expected(model, 90, seed) for seed in (14, 15))
    cache = cache_of(model, 4)
    model.logits([Run(0, first[0][:80], (0, 1)), Run(0, second[0][:80], (2, 3))], cache)
    cache.write(0, torch.tensor([10]), torch.full((1, 576), torch.nan, dtype=torch.bfloat16))
    got = model.logits([Run(80, first[0][80:81], (0, 1)), Run(80, second[0][80:81], (2, 3))], cache)
    assert got[0].isnan().all()
    assert torch.equal(got[1], second[1][80])


def test_two_threads_keep_the_promise():
    torch.set_num_threads(2)
    try:
        model = model_of(tiny_spec())[0]
        cuts = [[100, 299, 300], [17], [64, 128, 129]]
        play(model, ([300, 17, 129], cuts, random.Random(5)))
    finally:
        torch.set_num_threads(1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that PyTorch can use")
def test_a_gpu_keeps_the_promise():
    model = model_of(tiny_spec(), device="cuda")[0]
    for seed in range(20):
        cuts = [[100, 299, 300], [17], [64, 128, 129], [1, 2, 3, 250], [256, 257, 330]]
        play(model, ([300, 17, 129, 250, 330], cuts, random.Random(seed)))
