import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.models.cache import KvCache
from kimi_runtime.models.spans import SpanGeometry, StepBuilder
from tiny_k2 import Run

CPU = torch.device("cpu")
GEOMETRIES = st.sampled_from(
    (SpanGeometry(tuple(range(32, 513, 32))), SpanGeometry((64, 256)), SpanGeometry((100,)))
)
BLOCK_SIZES = st.sampled_from((16, 32, 64, 128, 256, 512))


def tagged_cache(blocks, block_tokens):
    """One layer whose row at (block, offset) holds its own slot number."""
    slots = torch.arange(blocks * block_tokens, dtype=torch.float32)
    return KvCache(slots.view(blocks, 1, block_tokens, 1).clone())


def hidden_of(part, queries, heads):
    """[queries, rows] bool, the same for every head."""
    if part.bias is None:
        return torch.zeros(queries, part.rows, dtype=torch.bool)
    if part.bias.shape[1] == 1:
        return part.bias[:, 0].isinf()
    by_head = part.bias.view(heads, queries, part.rows).isinf()
    assert torch.equal(by_head, by_head[:1].expand_as(by_head))
    return by_head[0]


@st.composite
def steps(draw):
    block_tokens = draw(BLOCK_SIZES)
    runs, next_block = [], 0
    for _ in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, 700))
        length = draw(st.one_of(st.just(1), st.integers(2, 300)))
        count = -(-(start + length) // block_tokens) + draw(st.integers(0, 2))
        blocks = tuple(range(next_block, next_block + count))
        next_block += count
        runs.append(Run(start, (7,) * length, blocks))
    order = draw(st.permutations(range(next_block)))
    runs = [Run(r.start, r.ids, tuple(order[b] for b in r.blocks)) for r in runs]
    return block_tokens, next_block, runs


@given(steps(), GEOMETRIES, st.sampled_from((1, 3)))
@settings(max_examples=50, deadline=None)
def test_every_query_sees_its_history_once_in_order_and_nothing_else(step, geometry, heads):
    block_tokens, blocks, runs = step
    cache = tagged_cache(blocks, block_tokens)
    inputs = StepBuilder(cache, geometry, heads, CPU).build(runs, sum(len(run.ids) for run in runs))
    seen = [[] for _ in range(inputs.tokens)]
    for group in inputs.groups:
        members = range(inputs.tokens)[group.tokens]
        for span in group.spans:
            covered = [query for part in span.parts for query in members[part.queries]]
            assert covered == list(members[span.first :])
            for part in span.parts:
                rows = cache.read(0, part.slots, part.rows)[..., 0]
                queries = members[part.queries]
                hidden = hidden_of(part, len(queries), heads)
                rows = rows.expand(len(queries), part.rows)
                for at, query in enumerate(queries):
                    seen[query].append(rows[at][~hidden[at]])
    tables = {}
    for run in runs:
        for position in range(run.start, run.start + len(run.ids)):
            slot = run.blocks[position // block_tokens] * block_tokens + position % block_tokens
            tables[slot] = (run, position)
    for query in range(inputs.tokens):
        run, position = tables[int(inputs.slots[query])]
        assert int(inputs.positions[query]) == position
        want = [
            run.blocks[p // block_tokens] * block_tokens + p % block_tokens
            for p in range(position + 1)
        ]
        assert torch.cat(seen[query]).tolist() == want
    ends = [int(inputs.slots[i]) for i in inputs.sampled]
    assert [tables[slot][0] for slot in ends] == runs


@given(st.integers(0, 4000), st.integers(1, 64), BLOCK_SIZES, GEOMETRIES)
@settings(max_examples=50, deadline=None)
def test_spans_follow_from_the_position_not_from_the_batch(
    position, others, block_tokens, geometry
):
    blocks = -(-5000 // block_tokens)
    cache = tagged_cache(blocks, block_tokens)
    builder = StepBuilder(cache, geometry, 2, CPU)
    run = Run(position, (1,), tuple(range(blocks)))
    alone = builder.build([run], 1).groups[0].spans
    crowd = [Run((position * 7 + 31 * i) % 4096, (1,), run.blocks) for i in range(others)]
    group = builder.build([run, *crowd], others + 1).groups[0]
    starts = [int(span.parts[0].slots[0]) for span in alone]
    assert starts == list(range(0, position + 1, geometry.tokens))
    assert len(group.spans) >= len(alone)


def test_histories_of_nearly_one_length_are_read_together_and_others_apart():
    geometry = SpanGeometry(tuple(range(32, 513, 32)))
    runs = [Run(start, (1,), (i,)) for i, start in enumerate((33, 31, 40, 500, 505))]
    builder = StepBuilder(tagged_cache(5, 512), geometry, 2, CPU)
    (span,) = builder.build(runs, 5).groups[0].spans
    assert [(part.queries, part.rows) for part in span.parts] == [
        (slice(0, 3), 64),
        (slice(3, 5), 512),
    ]


def test_offsets_of_large_pools_need_more_than_32_bits():
    block, layers, block_tokens = 2**20, 61, 64
    slot = np.int64(block) * layers * block_tokens
    assert slot > 2**31
    cache = KvCache(torch.zeros(1, layers, block_tokens, 1))
    assert cache.first_slots(torch.tensor([block]), torch.tensor([3])).item() == slot + 3
